"""`/big_batch`: continues many prompts with minimal work per token. Supports temperature and noise only."""

from __future__ import annotations

from pydantic import Field

from routes.context import Context
from routes.request.bodies import BatchBody
from routes.request.jobs import native_job
from routes.request_context import current_request
from routes.response.batch_formatter import BatchFormatter, make_decoder
from routes.response.generate import call_engine, run
from routes.response.http_response import HandlerResponse, json_response
from routes.response.response_models import BatchAnswer, BatchChunk, BigBatchStatus, Cleaned
from routes.route import Route
from rwkv_batch.calls import CancelJobs, GetStatus
from rwkv_batch.errors import ErrorKind
from sampling.params import Method, SamplingParams

PATH = "/big_batch/completions"
LABEL = "big_batch"
"""Label of the route's jobs in the engine's counters."""


class BigBatchBody(BatchBody):
    """Prompts with the simplest sampling. top_k, top_p and penalties have no effect."""

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


async def completions(context: Context, body: BigBatchBody) -> HandlerResponse:
    """Continue every prompt with minimal work per token. The answer is a stream unless `stream` is false."""
    job = await native_job(context, body, LABEL)
    return await run(context, job, BatchFormatter(body), make_decoder(body, job), body.stream)


async def completions_status(context: Context, query: dict[str, str]) -> HandlerResponse:
    """Return how many requests of this route run or wait."""
    status = await call_engine(context, GetStatus())
    jobs = status["jobs"].get(LABEL, 0)
    rows = {name: status[name] for name in ("running_rows", "waiting_rows")}
    return json_response({"generating": jobs > 0, "requests": jobs, **rows})


async def clean(context: Context, query: dict[str, str]) -> HandlerResponse:
    """Cancel all running and waiting requests of this route. Their rows end with "cancelled".

    With an API key, only the requests of that key are cancelled.
    """
    count = await call_engine(context, CancelJobs(LABEL, current_request().owner))
    return json_response({"status": "success", "cancelled": count, "message": f"{count} requests were cancelled"})


ROUTES = (
    Route(
        "POST",
        PATH,
        completions,
        BigBatchBody,
        "Continue many prompts as fast as possible. Only temperature and noise have an effect.",
        is_generation=True,
        answer=BatchAnswer,
        events=(BatchChunk,),
        example={"contents": ["English: Good morning.\n\nChinese:"] * 2, "max_tokens": 64, "chunk_size": 8},
    ),
    Route(
        "GET",
        "/big_batch/completions-status",
        completions_status,
        None,
        "Whether big_batch requests run.",
        answer=BigBatchStatus,
        errors=(ErrorKind.ENGINE_LOST,),
    ),
    Route(
        "POST",
        "/big_batch/clean",
        clean,
        None,
        "Cancel the big_batch requests.",
        answer=Cleaned,
        errors=(ErrorKind.ENGINE_LOST,),
    ),
)
