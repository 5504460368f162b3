"""Fields that hold a text to a form, and the constraint they become."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError, PydanticSerializationError, to_json

from routes.request.fields import Fields
from rwkv_batch.errors import ErrorKind, ServiceError
from sampling.grammar.constraint import MAX_CHOICES, MAX_SOURCE_CHARACTERS, Constraint, Form

THINK_END = "</think>"
"""Where a model that thinks first begins its answer."""
Choice = Annotated[str, Field(min_length=1, max_length=MAX_SOURCE_CHARACTERS)]


class ConstraintFields(Fields):
    """What the text of every row has to match; at most one of these."""

    grammar: str | None = Field(
        None, min_length=1, max_length=MAX_SOURCE_CHARACTERS, description="The text matches this grammar, in Lark."
    )
    regex: str | None = Field(
        None, min_length=1, max_length=MAX_SOURCE_CHARACTERS, description="The whole text matches this, as in Rust."
    )
    choice: Annotated[list[Choice], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = Field(
        None, description="The text is one of these."
    )
    json_schema: dict[str, Any] | bool | None = Field(
        None, description="The text is a JSON value that is valid under this schema."
    )

    @property
    def thinks(self) -> bool:
        """Whether a thought comes before the text that is meant."""
        return False

    @property
    def constraint(self) -> Constraint | None:
        """What the rows are held to. Raises ServiceError for a schema that cannot be written down."""
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
        message = "json_schema: is nested too deeply; write it with fewer schemas inside each other, or with $ref"
        raise ServiceError(ErrorKind.INVALID_FIELD, message, field="json_schema") from None


def at_most_one(given: Iterable[str]) -> None:
    """PydanticCustomError for fields that hold the text to more than one form."""
    names = list(given)
    if len(names) > 1:
        what = " and ".join(names)
        raise PydanticCustomError("constraint", "{what} exclude each other", {"what": what, "field": names[-1]})
