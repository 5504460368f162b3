"""Fields of speculative decoding: a prediction of the answer, and whether guesses are verified at all."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from routes.request.fields import Fields

MAX_PREDICTION = 200_000
"""Characters."""


class TextPart(Fields):
    """A part of a prediction."""

    type: Literal["text"] = "text"
    text: str = Field(max_length=MAX_PREDICTION)


class Prediction(Fields):
    """OpenAI's form of a prediction."""

    type: Literal["content"] = "content"
    content: str | Annotated[list[TextPart], Field(max_length=64)] = Field(max_length=MAX_PREDICTION)

    @property
    def joined(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @field_validator("content")
    @classmethod
    def _check_length(cls, content: str | list[TextPart]) -> str | list[TextPart]:
        if not isinstance(content, str) and (count := sum(len(part.text) for part in content)) > MAX_PREDICTION:
            raise PydanticCustomError(
                "prediction",
                "must have at most {limit} characters in all its parts, has {count}",
                {"limit": MAX_PREDICTION, "count": count},
            )
        return content


def _check_type(given: object) -> object:
    if given is None or isinstance(given, str | dict):
        return given
    raise PydanticCustomError("prediction", "must be a text, or an object with the text as content")


class SpeculationFields(Fields):
    """Guesses of the text, which make it faster and do not change it."""

    prediction: Annotated[
        Annotated[str, Field(max_length=MAX_PREDICTION)] | Prediction | None, BeforeValidator(_check_type)
    ] = Field(None, description="A text that the answer probably repeats in large part. Needs `--speculate`.")
    speculation: Literal["auto", "off"] = Field("auto", description="off: verify no guesses of the next tokens.")

    @property
    def predicted_text(self) -> str:
        given = self.prediction
        return given.joined if isinstance(given, Prediction) else given or ""
