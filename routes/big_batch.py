"""`/big_batch`: the fastest way through many prompts. Only temperature and noise act on the draw."""

from __future__ import annotations

from pydantic import Field

from routes.context import Context
from routes.request.bodies import BatchBody
from routes.request.jobs import native_job
from routes.request_context import current_request
from routes.response.batch_formatter import BatchFormatter, make_decoder
from routes.response.event_stream import call_engine
from routes.response.generate import run
from routes.response.http_response import HandlerResponse, json_response
from routes.response.response_models import BatchAnswer, BatchChunk, BigBatchStatus, Cleaned
from routes.route import Route
from rwkv_batch.calls import CancelJobs, GetStatus
from rwkv_batch.errors import ErrorKind
from sampling.params import Method, SamplingParams

PATH = "/big_batch/completions"
LABEL = "big_batch"
"""Of the route's jobs; the engine counts them under this name."""


class BigBatchBody(BatchBody):
    """Prompts that are drawn as simply as can be; top_k, top_p and penalties have no effect here."""

    stream: bool = Field(True, description="False: one JSON answer.")
    noise: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="n: draw argmax(logits / temperature + U(0, n)). Not given: exact sampling at that temperature.",
    )

    def sampling(self, seed: int) -> SamplingParams:
        """Gumbel-max, or the family's simple sampler; temperature 0 is greedy with either."""
        if self.noise is None or self.temperature == 0:
            return super().sampling(seed)
        return SamplingParams(temperature=self.temperature, seed=seed, method=Method.NOISE, noise=self.noise)


async def completions(context: Context, body: BigBatchBody) -> HandlerResponse:
    """Continue every prompt with the least work per token; server-sent events unless `stream` is false."""
    job = await native_job(context, body, LABEL)
    return await run(context, job, BatchFormatter(body), make_decoder(body, job), body.stream)


async def completions_status(context: Context, query: dict[str, str]) -> HandlerResponse:
    """Whether requests of this route run, and how many."""
    status = await call_engine(context, GetStatus())
    jobs = status["jobs"].get(LABEL, 0)
    rows = {name: status[name] for name in ("running_rows", "waiting_rows")}
    return json_response({"generating": jobs > 0, "requests": jobs, **rows})


async def clean(context: Context, query: dict[str, str]) -> HandlerResponse:
    """Cancel every request of this route that runs or waits, with an API key those of that key; their rows end with
    "cancelled"."""
    count = await call_engine(context, CancelJobs(LABEL, current_request().owner))
    return json_response({"status": "success", "cancelled": count, "message": f"{count} requests were cancelled"})


ROUTES = (
    Route(
        "POST",
        PATH,
        completions,
        BigBatchBody,
        "Continue many prompts as fast as possible; only temperature and noise act.",
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
        "Cancel the big_batch requests that run.",
        answer=Cleaned,
        errors=(ErrorKind.ENGINE_LOST,),
    ),
)
