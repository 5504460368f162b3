"""`POST /v2/chat/completions`: as /v1, drawn by FlashInfer if `--samplers` has it, with token 0 before the prompt."""

from __future__ import annotations

from pydantic import Field

from routes import v1
from routes.context import Context
from routes.request.bodies import PromptBody
from routes.request.jobs import native_job
from routes.response.batch_formatter import answer
from routes.response.http_response import HandlerResponse
from routes.response.response_models import BatchAnswer, BatchChunk
from routes.route import SESSION_ERRORS, Route

PATH = "/v2/chat/completions"


class PaddedBody(PromptBody):
    """As on /v1, with another default of `pad_zero`."""

    pad_zero: bool = Field(True, description="Put token 0 before the prompt.")


async def chat_completions(context: Context, body: PaddedBody) -> HandlerResponse:
    """As /v1/chat/completions; the same parameters and the same distribution."""
    return await answer(context, body, await native_job(context, body, PATH, sampler="flashinfer"))


ROUTES = (
    Route(
        "POST",
        PATH,
        chat_completions,
        PaddedBody,
        "Continue many prompts, or one conversation; drawn by FlashInfer if it runs and --samplers has it.",
        is_generation=True,
        answer=BatchAnswer,
        events=(BatchChunk,),
        errors=SESSION_ERRORS,
        example={**v1.EXAMPLE, "pad_zero": True, "chunk_size": 128},
    ),
)
