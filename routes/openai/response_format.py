"""`response_format`: JSON, or JSON under a schema, in OpenAI's words."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError, to_json

from routes.request.fields import Fields, Pattern
from sampling.grammar.constraint import Constraint, Form


class JsonSchemaFormat(Fields):
    """A schema and its name."""

    name: Annotated[str, Pattern(r"^[a-zA-Z0-9_-]{1,64}$", "1..64 letters, digits, '_' and '-'")] = Field(
        description="Accepted; nothing depends on it."
    )
    description: str = Field("", description="Accepted; nothing depends on it: say in the messages what is wanted.")
    schema_: dict[str, Any] = Field({}, alias="schema", description="A JSON schema.")
    strict: bool = Field(
        False, description="true: refused if the answer cannot be held to all of the schema; false: to what it can."
    )


class ResponseFormat(Fields):
    """What the answer's content is."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="Text, a JSON object, JSON by a schema.")
    json_schema: JsonSchemaFormat | None = Field(None, description="For the type of that name.")

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("json_schema", "json_schema is given with the type json_schema, and only then")
        return self

    def constraint(self, after: str = "") -> Constraint | None:
        """What the text after `after` is held to, if it is to be JSON."""
        if self.type == "text":
            return None
        schema = self.json_schema
        if schema is None:
            return Constraint(form=Form.JSON_SCHEMA, source='{"type":"object"}', field="response_format", after=after)
        return Constraint(
            form=Form.JSON_SCHEMA,
            source=to_json(schema.schema_).decode(),
            field="response_format.json_schema.schema",
            strict=schema.strict,
            after=after,
        )
