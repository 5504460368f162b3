"""Routes that continue many prompts in one request.

- `/v1/chat/completions`: prompts, or one conversation
- `/v2/chat/completions`: like /v1, with FlashInfer's sampler and token 0 before the prompt
- `/big_batch`: minimal work per token; supports temperature and noise only
- `/FIM/v1/batch-FIM`: fills in the middle
"""

from __future__ import annotations

import uuid
from typing import Any, Self

from pydantic import Field, model_validator

from routes.context import Context
from routes.openai import chat
from routes.request import prompts
from routes.request.bodies import BatchBody, PromptBody, SamplingBody, Texts, check_gaps
from routes.request.fields import IgnoredValue
from routes.request.jobs import BIG_BATCH_LABEL, make_job, make_rows, native_job, row_stops
from routes.request_context import current_request
from routes.response.batch_formatter import BatchFormatter
from routes.response.event_stream import OutputDecoder
from routes.response.generate import call_engine, run
from routes.response.http_response import OPENAI_ERRORS, HandlerResponse, json_response
from routes.response.response_models import BatchAnswer, BatchChunk, BigBatchStatus, Cleaned
from routes.route import SESSION_ERRORS, Routes
from rwkv_batch.calls import CancelJobs, CountJobs, GetStatus
from rwkv_batch.errors import ErrorKind
from rwkv_batch.request import Job
from sampling.params import Method, SamplingParams

ROUTES = Routes(errors=(ErrorKind.ENGINE_LOST,))

V1_PATH = "/v1/chat/completions"
V1_EXAMPLE = {
    "contents": ["English: Good morning.\n\nChinese:", "English: How are you?\n\nChinese:"],
    "max_tokens": 64,
    "temperature": 0.8,
    "stream": True,
}


V2_PATH = "/v2/chat/completions"


class PaddedBody(PromptBody):
    """Like /v1, with another default of `pad_zero`."""

    pad_zero: bool = Field(True, description="Put token 0 before the prompt.")


BIG_BATCH_PATH = "/big_batch/completions"


_IGNORED = Field(None, description="Accepted and ignored: this route samples by temperature alone.")


class BigBatchBody(BatchBody):
    """Prompts with the simplest sampling. Other routes' sampling fields are accepted and ignored."""

    top_k: IgnoredValue = _IGNORED
    top_p: IgnoredValue = _IGNORED
    alpha_presence: IgnoredValue = _IGNORED
    alpha_frequency: IgnoredValue = _IGNORED
    alpha_decay: IgnoredValue = _IGNORED
    presence_penalty: IgnoredValue = _IGNORED
    frequency_penalty: IgnoredValue = _IGNORED
    stream: bool = Field(True, description="false: one JSON answer instead of a stream.")
    noise: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="Sample argmax(logits / temperature + U(0, noise)). Default: exact sampling at the temperature.",
    )

    def sampling(self, seed: int) -> SamplingParams:
        """Return the row's sampling parameters: Gumbel-max, or uniform noise. Temperature 0 is greedy in both."""
        if self.noise is None or self.temperature == 0:
            return super().sampling(seed)
        return SamplingParams(temperature=self.temperature, seed=seed, method=Method.NOISE, noise=self.noise)


_GENERATION: dict[str, Any] = {"is_generation": True, "answer": BatchAnswer, "events": (BatchChunk,)}
_CONVERSATION: dict[str, Any] = {"conversation_error_format": OPENAI_ERRORS, "errors": SESSION_ERRORS, **_GENERATION}


async def _respond(context: Context, body: BatchBody, job: Job, answer_id: str = "") -> HandlerResponse:
    """Run a job and answer in the batch format.

    Text of a thought begins with the tag that the prompt opened. Other text of a conversation loses its leading white
    space, unless it is constrained.
    """
    opening = prompts.THINK_START if body.thinks else ""
    strip = bool(body.messages) and not body.thinks and job.rows[0].constraint is None
    decoder = OutputDecoder(job.num_rows, opening, strip)
    return await run(context, job, BatchFormatter(body, answer_id=answer_id), decoder, body.stream)


async def _respond_to_prompts(context: Context, body: PromptBody, label: str, sampler: str = "") -> HandlerResponse:
    """Continue the prompts of a body. Answers to conversations have an id."""
    answer_id = f"chatcmpl-{uuid.uuid4().hex}" if body.messages else ""
    return await _respond(context, body, await native_job(context, body, label, sampler), answer_id)


@ROUTES.add(
    "POST",
    V1_PATH,
    "Continue many prompts, or one conversation, with the first available sampler of --samplers.",
    conversation_route=chat.ROUTES[0],
    example=V1_EXAMPLE,
    **_CONVERSATION,
)
async def completions(context: Context, body: PromptBody) -> HandlerResponse:
    """Continue every prompt. Answers are in the order of the prompts; `stream` sends them as they grow.

    OpenAI's clients may send `messages` to this route too. A conversation with tools, `response_format`, `n` above 1,
    log-probabilities, `logit_bias` or `reasoning_effort` has the fields and the answer of
    `/openai/v1/chat/completions`.
    """
    return await _respond_to_prompts(context, body, V1_PATH)


@ROUTES.add(
    "POST",
    V2_PATH,
    "Continue many prompts, or one conversation, with FlashInfer's sampler if available.",
    example={**V1_EXAMPLE, "pad_zero": True, "chunk_size": 128},
    **_CONVERSATION,
)
async def padded_completions(context: Context, body: PaddedBody) -> HandlerResponse:
    """Continue every prompt like /v1/chat/completions, with the same parameters and the same distribution."""
    return await _respond_to_prompts(context, body, V2_PATH, "flashinfer")


@ROUTES.add(
    "POST",
    BIG_BATCH_PATH,
    "Continue many prompts as fast as possible. Only temperature and noise have an effect.",
    example={"contents": ["English: Good morning.\n\nChinese:"] * 2, "max_tokens": 64, "chunk_size": 8},
    **_GENERATION,
)
async def big_batch(context: Context, body: BigBatchBody) -> HandlerResponse:
    """Continue every prompt with minimal work per token. The answer is a stream unless `stream` is false."""
    return await _respond(context, body, await native_job(context, body, BIG_BATCH_LABEL))


@ROUTES.add("GET", "/big_batch/completions-status", "Whether big_batch requests run.", answer=BigBatchStatus)
async def big_batch_status(context: Context) -> HandlerResponse:
    """Return how many requests of this route run or wait. With an API key, only the requests of that key."""
    jobs = await call_engine(context, CountJobs(BIG_BATCH_LABEL, current_request().owner))
    answer = {"generating": jobs > 0, "requests": jobs}
    if current_request().is_admin:
        status = await call_engine(context, GetStatus())
        answer |= {name: status[name] for name in ("running_rows", "waiting_rows")}
    return json_response(answer)


@ROUTES.add("POST", "/big_batch/clean", "Cancel the big_batch requests.", answer=Cleaned)
async def cancel_big_batch(context: Context) -> HandlerResponse:
    """Cancel all running and waiting requests of this route. Their rows end with "cancelled".

    With an API key, only the requests of that key are cancelled.
    """
    count = await call_engine(context, CancelJobs(BIG_BATCH_LABEL, current_request().owner))
    return json_response({"status": "success", "cancelled": count, "message": f"{count} requests were cancelled"})


FIM_PATH = "/FIM/v1/batch-FIM"


FIM_EXAMPLE = {"prefix": ["def add(a, b):\n    "], "suffix": ["\n\nprint(add(1, 2))"], "max_tokens": 64}


class FimBody(SamplingBody):
    """Texts with a gap."""

    prefix: Texts = Field(min_length=1, description="Texts before the gaps.")
    suffix: Texts = Field(min_length=1, description="Texts after the gaps, one per prefix.")

    @model_validator(mode="after")
    def _equal_lengths(self) -> Self:
        check_gaps(self.prefix, self.suffix)
        return self


@ROUTES.add("POST", FIM_PATH, "Fill in the middle.", example=FIM_EXAMPLE, **_GENERATION)
async def fill_in_the_middle(context: Context, body: FimBody) -> HandlerResponse:
    """Fill the gap between each prefix and its suffix."""
    texts = [prompts.fill_in_the_middle(*pair) for pair in zip(body.prefix, body.suffix, strict=True)]
    rows = await make_rows(context, body, texts, row_stops(body, built_in=(prompts.FIM_STOP,)), "prefix")
    formatter = BatchFormatter(body, "FIM.completion")
    return await run(context, make_job(rows, body, FIM_PATH), formatter, OutputDecoder(len(rows)), body.stream)
