"""`POST /v1/chat/completions`: continues many prompts, or one conversation."""

from __future__ import annotations

from routes.context import Context
from routes.request.bodies import PromptBody
from routes.request.jobs import native_job
from routes.response.batch_formatter import answer
from routes.response.http_response import HandlerResponse
from routes.response.response_models import BatchAnswer, BatchChunk
from routes.route import SESSION_ERRORS, Route

PATH = "/v1/chat/completions"


async def chat_completions(context: Context, body: PromptBody) -> HandlerResponse:
    """Continue every prompt. Answers are in the order of the prompts; `stream` sends them as they grow.

    OpenAI's clients may send `messages` to this route too. Tools, several answers (`n`), log-probabilities and separate
    reasoning text are on `/openai/v1/chat/completions`.
    """
    return await answer(context, body, await native_job(context, body, PATH))


EXAMPLE = {
    "contents": ["English: Good morning.\n\nChinese:", "English: How are you?\n\nChinese:"],
    "max_tokens": 64,
    "temperature": 0.8,
    "stream": True,
}
ROUTES = (
    Route(
        "POST",
        PATH,
        chat_completions,
        PromptBody,
        "Continue many prompts, or one conversation, with the first available sampler of --samplers.",
        is_generation=True,
        answer=BatchAnswer,
        events=(BatchChunk,),
        errors=SESSION_ERRORS,
        example=EXAMPLE,
    ),
)
