"""Request fields that constrain the text, and the constraint that they become."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError, PydanticSerializationError, to_json

from routes.request.fields import Fields
from rwkv_batch.errors import ErrorKind, ServiceError
from sampling.grammar.constraint import MAX_CHOICES, MAX_SOURCE_CHARACTERS, Constraint, Form

THINK_END = "</think>"
"""End of a thought. The constraint applies to the text after it."""
Choice = Annotated[str, Field(min_length=1, max_length=MAX_SOURCE_CHARACTERS)]


class ConstraintFields(Fields):
    """Constraints on the text of every row. At most one may be given."""

    grammar: str | None = Field(
        None, min_length=1, max_length=MAX_SOURCE_CHARACTERS, description="The text matches this Lark grammar."
    )
    regex: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_SOURCE_CHARACTERS,
        description="The whole text matches this regular expression, in Rust's syntax.",
    )
    choice: Annotated[list[Choice], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = Field(
        None, description="The text is one of these."
    )
    json_schema: dict[str, Any] | bool | None = Field(
        None, description="The text is JSON that is valid under this schema."
    )

    @property
    def thinks(self) -> bool:
        """Whether a thought comes before the constrained text."""
        return False

    @property
    def constraint(self) -> Constraint | None:
        """The constraint of the rows. Raises ServiceError for a schema that is nested too deeply."""
        after = THINK_END if self.thinks else ""
        if self.grammar is not None:
            return Constraint(form=Form.LARK, source=self.grammar, field="grammar", after=after)
        if self.regex is not None:
            return Constraint(form=Form.REGEX, source=self.regex, field="regex", after=after)
        if self.choice is not None:
            return Constraint(form=Form.CHOICE, source=to_json(self.choice).decode(), field="choice", after=after)
        if self.json_schema is not None:
            source = _as_source(self.json_schema)
            return Constraint(form=Form.JSON_SCHEMA, source=source, field="json_schema", after=after)
        return None

    @model_validator(mode="after")
    def _one_constraint(self) -> Self:
        named = ("grammar", "regex", "choice", "json_schema")
        at_most_one(name for name in named if getattr(self, name) is not None)
        return self


def _as_source(schema: dict[str, Any] | bool) -> str:
    try:
        return to_json(schema).decode()
    except PydanticSerializationError:
        message = "json_schema: is nested too deeply; nest fewer schemas or use $ref"
        raise ServiceError(ErrorKind.INVALID_FIELD, message, field="json_schema") from None


def at_most_one(given: Iterable[str]) -> None:
    """Check that at most one constraint is given. Raises PydanticCustomError for more."""
    names = list(given)
    if len(names) > 1:
        what = " and ".join(names)
        raise PydanticCustomError("constraint", "{what} exclude each other", {"what": what, "field": names[-1]})
