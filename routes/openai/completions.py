"""`/openai/v1/completions`: raw prompts in OpenAI's format, the list of models, and the refusal of embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from routes import models
from routes.context import Context
from routes.openai import chat
from routes.openai.completion_models import CompletionAnswer, CompletionChunk
from routes.openai.formatter import (
    OpenAIFormatter,
    check_logprobs,
    fingerprint,
    finish_fields,
    openai_rows,
    row_finish,
    with_prompt_logprobs,
)
from routes.openai.logprobs import LogprobArrays, prompt_logprobs
from routes.openai.request import CompletionBody
from routes.request import prompts
from routes.request.bodies import Body
from routes.request.jobs import as_turn, encode, make_job, row_stops
from routes.response.event_stream import DecodedRow, OutputDecoder
from routes.response.generate import run
from routes.response.http_response import OPENAI_ERRORS, HandlerResponse
from routes.route import SESSION_ERRORS, Routes
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.request import PromptLogprobs, TokenLogprob

ROUTES = Routes(error_format=OPENAI_ERRORS)

PATH = "/openai/v1/completions"


class CompletionFormatter(OpenAIFormatter):
    """Writes `text_completion`, complete and in chunks."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, fingerprint: str, num_rows: int) -> None:
        super().__init__(body, fingerprint, num_rows)
        self._returns_logprobs = body.logprobs is not None
        self._echoes_scores = body.scores_prompts
        self._scored: Callable[[int, list[TokenLogprob]], list[Any] | None] | None = None
        self._num_returned = body.n
        self._logprobs = [LogprobArrays() for _ in range(num_rows)]

    def set_prompts(self, scored: Callable[[int, list[TokenLogprob]], list[Any] | None]) -> None:
        """Set the function that returns the `prompt_logprobs` of a prompt by its index."""
        self._scored = scored

    def set_first_tokens(self, prompts: Sequence[bytes]) -> None:
        """Set the first token of each scored prompt. It has no log-probability."""
        self._logprobs = [LogprobArrays(prompts[row // self._n]) for row in range(len(self._logprobs))]

    def chunk(self, updates: list[DecodedRow]) -> bytes:
        """See ResponseFormatter. A prompt's log-probabilities arrive with its first row and are repeated for the
        others.
        """
        other_rows = range(1, self._n)
        shared = [DecodedRow(one.row + i, prompt_logprobs=one.prompt_logprobs) for one in updates for i in other_rows]
        return super().chunk([*[one for one in shared if one.prompt_logprobs], *updates])

    def delta_choice(self, updates: DecodedRow) -> dict[str, Any] | None:
        tokens = [*updates.prompt_logprobs, *updates.logprobs]
        if not updates.text and not tokens:
            return None
        return self._choice(updates.row, updates.row, updates.text, tokens, {"finish_reason": None})

    def last_choice(self, row: int, reason: str) -> dict[str, Any]:
        return {"index": row, "text": "", "logprobs": None, **finish_fields(reason)}

    def full_body(self, rows: list[DecodedRow]) -> Any:
        choices: list[dict[str, Any]] = []
        for first in range(0, len(rows), self._n):
            scored_tokens = rows[first].prompt_logprobs
            for row in _best_rows(rows, range(first, first + self._n), self._num_returned):
                tokens = [*(scored_tokens if self._echoes_scores else ()), *rows[row].logprobs]
                end = finish_fields(*row_finish(rows[row]))
                if self._scored is not None:
                    end["prompt_logprobs"] = self._scored(first // self._n, scored_tokens)
                choices.append(self._choice(len(choices), row, rows[row].text, tokens, end))
        return self.answer(choices, rows)

    def _choice(
        self, index: int, row: int, text: str, tokens: Sequence[TokenLogprob], end: dict[str, Any]
    ) -> dict[str, Any]:
        logprobs = self._logprobs[row].take(tokens) if self._returns_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, **end}


def _best_rows(rows: Sequence[DecodedRow], candidates: range, count: int) -> list[int]:
    """Return the `count` rows with the highest mean log-probability, best first."""
    if count == len(candidates):
        return list(candidates)

    def mean(row: int) -> float:
        values = [token.logprob for token in rows[row].logprobs]
        return sum(values) / len(values) if values else -math.inf

    return sorted(candidates, key=mean, reverse=True)[:count]


@ROUTES.add(
    "POST",
    PATH,
    "Continue raw prompts in OpenAI's format.",
    is_generation=True,
    answer=CompletionAnswer,
    events=(CompletionChunk,),
    errors=SESSION_ERRORS,
    example={"model": "rwkv7", "prompt": "Once upon a time", "max_tokens": 32},
)
async def completions(context: Context, body: CompletionBody) -> HandlerResponse:
    """Continue raw prompts, each `n` times with one prefill. With `suffix`, fill in the middle."""
    texts: list[str | list[int]] = list(body.prompts)
    if body.suffix is not None:
        texts = [_fim_prompt(context, text, body.suffix) for text in texts]
    stops = row_stops(body, built_in=() if body.suffix is None else (prompts.FIM_STOP,))
    rows = await openai_rows(context, body, texts, stops, "prompt")
    if body.scores_prompts:
        check_logprobs(body, len(rows) * body.samples_per_prompt, sum(len(row.prompt) * row.n for row in rows))
        rows = [msgspec.structs.replace(row, prompt_logprobs=PromptLogprobs(top=body.logprobs or 0)) for row in rows]
    rows = with_prompt_logprobs(rows, body.prompt_logprobs)
    if body.session_id is not None:
        rows = await as_turn(context, rows, texts[0], body.session_id, texts[0], "prompt", wait=body.wait)
    job = make_job(rows, body, PATH)
    formatter = CompletionFormatter(body, await fingerprint(context, body), job.num_rows)
    if body.scores_prompts:
        formatter.set_first_tokens([context.tokenizer.byte_table[row.prompt[0]] for row in rows])
    if body.prompt_logprobs is not None:
        ids_of = [row.prompt for row in rows]
        formatter.set_prompts(lambda i, tokens: prompt_logprobs(ids_of[i], tokens, context.tokenizer.id_by_bytes))
    return await run(
        context, job, formatter, OutputDecoder(job.num_rows, echoed=_echoed_prompts(context, body)), body.stream
    )


def _fim_prompt(context: Context, prompt: str | list[int], suffix: str) -> str | list[int]:
    """Return the fill-in-the-middle prompt of a prompt and a suffix. Raises ServiceError."""
    if isinstance(prompt, str):
        return prompts.fill_in_the_middle(prompt, suffix)
    return encode(context.tokenizer, prompts.fill_in_the_middle("", suffix), "suffix", context.config) + prompt


def _echoed_prompts(context: Context, body: CompletionBody) -> list[bytes]:
    """Return the text that each answer repeats: its prompt, or nothing."""
    if not body.echo:
        return []
    given = (one.encode() if isinstance(one, str) else context.tokenizer.decode_bytes(one) for one in body.prompts)
    return [prompt for prompt in given for _ in range(body.samples_per_prompt)]


ROUTES.append(ROUTES[-1].at("/v1/completions"))
ROUTES.append(
    ROUTES[-1].at(
        "/invocations",
        summary="vLLM's route for SageMaker.",
        description="With `messages` like /openai/v1/chat/completions, otherwise like /openai/v1/completions.",
        conversation_route=chat.ROUTES[0],
    )
)
ROUTES += [models.ROUTES[0].at("/openai/v1/models"), models.ROUTES[1].at("/openai/v1/models/{model}")]


EMBEDDINGS_PATH = "/openai/v1/embeddings"


@ROUTES.add(
    "POST",
    EMBEDDINGS_PATH,
    "Not supported.",
    errors=(ErrorKind.NOT_FOUND,),
    example={"model": "rwkv7", "input": "Hello!"},
)
async def embeddings(context: Context, body: Body) -> HandlerResponse:
    """Not supported: the model is trained to continue text and has no embeddings."""
    raise ServiceError(
        ErrorKind.NOT_FOUND,
        "embeddings are not supported: RWKV-7 language models have no vectors trained to compare texts; use "
        "an embedding model's service",
    )
