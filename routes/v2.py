"""`POST /v2/chat/completions`: like /v1, with FlashInfer's sampler and token 0 before the prompt."""

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
    """Like /v1, with another default of `pad_zero`."""

    pad_zero: bool = Field(True, description="Put token 0 before the prompt.")


async def chat_completions(context: Context, body: PaddedBody) -> HandlerResponse:
    """Continue every prompt like /v1/chat/completions, with the same parameters and the same distribution."""
    return await answer(context, body, await native_job(context, body, PATH, sampler="flashinfer"))


ROUTES = (
    Route(
        "POST",
        PATH,
        chat_completions,
        PaddedBody,
        "Continue many prompts, or one conversation, with FlashInfer's sampler if available.",
        is_generation=True,
        answer=BatchAnswer,
        events=(BatchChunk,),
        errors=SESSION_ERRORS,
        example={**v1.EXAMPLE, "pad_zero": True, "chunk_size": 128},
    ),
)
