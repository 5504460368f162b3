"""Fields of speculative decoding: a prediction of the answer, and whether guesses are verified at all."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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


class SpeculationFields(Fields):
    """Guesses of the text, which make it faster and do not change it."""

    prediction: Annotated[str, Field(max_length=MAX_PREDICTION)] | Prediction | None = Field(
        None, description="A text that the answer probably repeats in large part. Needs `--speculate`."
    )
    speculation: Literal["auto", "off"] = Field("auto", description="off: verify no guesses of the next tokens.")

    @property
    def predicted_text(self) -> str:
        given = self.prediction
        if given is None or isinstance(given, str):
            return given or ""
        return given.content if isinstance(given.content, str) else "".join(part.text for part in given.content)
