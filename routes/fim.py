"""`POST /FIM/v1/batch-FIM`: fills in the middle for many pairs of texts."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from routes.context import Context
from routes.request import prompts
from routes.request.bodies import SamplingBody, Texts
from routes.request.jobs import build_rows, make_job, offload_if_large, row_stops
from routes.response.batch_formatter import BatchFormatter
from routes.response.generate import OutputDecoder, run
from routes.response.http_response import HandlerResponse
from routes.response.response_models import BatchAnswer, BatchChunk
from routes.route import Route

PATH = "/FIM/v1/batch-FIM"


class FimBody(SamplingBody):
    """Texts with a gap."""

    prefix: Texts = Field(min_length=1, description="Texts before the gaps.")
    suffix: Texts = Field(min_length=1, description="Texts after the gaps, one per prefix.")

    @model_validator(mode="after")
    def _equal_lengths(self) -> Self:
        if len(self.prefix) != len(self.suffix):
            raise PydanticCustomError(
                "fim_lengths",
                "prefix and suffix must be of equal length, got {prefixes} and {suffixes}",
                {"prefixes": len(self.prefix), "suffixes": len(self.suffix)},
            )
        return self


async def batch_fim(context: Context, body: FimBody) -> HandlerResponse:
    """Fill the gap between each prefix and its suffix."""
    texts = [prompts.fill_in_the_middle(*pair) for pair in zip(body.prefix, body.suffix, strict=True)]
    stops = row_stops(body, built_in=(prompts.FIM_STOP,))
    characters = sum(map(len, texts))
    rows = await offload_if_large(
        characters, build_rows, context.tokenizer, context.config, body, texts, stops, "prefix"
    )
    job = make_job(rows, body, PATH)
    formatter = BatchFormatter(body, "FIM.completion")
    return await run(context, job, formatter, OutputDecoder(len(rows)), body.stream)


EXAMPLE = {"prefix": ["def add(a, b):\n    "], "suffix": ["\n\nprint(add(1, 2))"], "max_tokens": 64}
ROUTES = (
    Route(
        "POST",
        PATH,
        batch_fim,
        FimBody,
        "Fill in the middle.",
        is_generation=True,
        answer=BatchAnswer,
        events=(BatchChunk,),
        example=EXAMPLE,
    ),
)
