"""`response_format`: JSON, optionally with a schema, in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import to_json

from routes.request.fields import Fields, Ignored, Pattern, body_error
from sampling.grammar.constraint import Constraint, Form

SCHEMA_FIELD = "response_format.json_schema.schema"


class JsonSchemaFormat(Fields):
    """A schema and its name."""

    name: Annotated[str, Pattern(r"^[a-zA-Z0-9_-]{1,64}$", "1 to 64 letters, digits, '_' and '-'")] = Field(
        description="Accepted and ignored."
    )
    description: Annotated[str, Ignored()] = Field(
        "", description="Accepted and ignored: describe the answer in the messages."
    )
    schema_: dict[str, Any] = Field({}, alias="schema", description="A JSON Schema.")
    strict: bool = Field(
        False,
        description="true: refuse schemas that cannot be enforced completely. false: enforce as much as possible.",
    )


class ResponseFormat(Fields):
    """The format of the answer's content."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Text, a JSON object, or JSON with a schema."
    )
    json_schema: JsonSchemaFormat | None = Field(None, description="The schema of type json_schema.")

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise body_error("json_schema must be given with the type json_schema, and only then")
        return self

    def constraint(self, after: str = "", field: str = SCHEMA_FIELD) -> Constraint | None:
        """Return the constraint of the text after `after`. Returns None for free text.

        field: the request's field with the schema, for errors
        """
        if self.type == "text":
            return None
        schema = self.json_schema
        if schema is None:
            field = field.partition(".")[0]
            return Constraint(form=Form.JSON_SCHEMA, source='{"type":"object"}', field=field, after=after)
        return Constraint(
            form=Form.JSON_SCHEMA,
            source=to_json(schema.schema_).decode(),
            field=field,
            strict=schema.strict,
            after=after,
        )
