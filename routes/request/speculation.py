"""Fields of speculative decoding: a prediction of the answer, and whether guesses are verified at all."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from routes.request.fields import Fields

MAX_PREDICTION = 200_000
"""Characters."""


def _text_or(other: type, description: str) -> BeforeValidator:
    """Return a check whose error says all that is allowed, not a union's first member."""

    def check(given: object) -> object:
        if given is None or isinstance(given, str | other):
            return given
        raise PydanticCustomError("prediction", "must be a text, or {other}", {"other": description})

    return BeforeValidator(check)


class TextPart(Fields):
    """A part of a prediction."""

    type: Literal["text"] = "text"
    text: str = Field(max_length=MAX_PREDICTION)


class Prediction(Fields):
    """OpenAI's form of a prediction."""

    type: Literal["content"] = "content"
    content: Annotated[
        Annotated[str, Field(max_length=MAX_PREDICTION)] | Annotated[list[TextPart], Field(max_length=64)],
        _text_or(list, "a list of text parts"),
    ]

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


class SpeculationFields(Fields):
    """Guesses of the text, which make it faster and do not change it."""

    prediction: Annotated[
        Annotated[str, Field(max_length=MAX_PREDICTION)] | Prediction | None,
        _text_or(dict, "an object with the text as content"),
    ] = Field(None, description="A text that the answer probably repeats in large part. Needs `--speculate`.")
    speculation: Literal["auto", "off"] = Field("auto", description="off: verify no guesses of the next tokens.")

    @property
    def predicted_text(self) -> str:
        given = self.prediction
        return given.joined if isinstance(given, Prediction) else given or ""
