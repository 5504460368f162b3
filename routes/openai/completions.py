"""`POST /openai/v1/completions`: raw prompts as OpenAI's SDKs speak them, and the list of models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from routes import system
from routes.context import Context
from routes.openai.errors import OPENAI_ERRORS
from routes.openai.request import CompletionBody
from routes.openai.response import (
    OpenAIDialect,
    as_logprob,
    chosen,
    fingerprint,
    finish_reason,
    openai_job,
    openai_rows,
    token_text,
)
from routes.request import prompts
from routes.request.generate_requests import given_stops
from routes.request.session_turn import as_turn
from routes.response.generate import RowResult, run
from routes.response.reply import Reply
from routes.response.response_models import CompletionAnswer, CompletionChunk, ModelList
from routes.response.transcript import RowUpdate, Transcript
from routes.route import SESSION_ERRORS, Route
from rwkv_batch.request import TokenLogprob

PATH = "/openai/v1/completions"


class CompletionDialect(OpenAIDialect):
    """`text_completion`, whole and in chunks."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, fingerprint: str, num_rows: int) -> None:
        super().__init__(body, fingerprint, num_rows)
        self._tells_logprobs = body.logprobs is not None
        echoed = [str(prompt) for prompt in body.prompts for _ in range(body.n)] if body.echo else [""] * num_rows
        self._owed = echoed
        """what each row still has to say before its own text"""
        self._offsets = [0] * num_rows

    def piece(self, updates: RowUpdate) -> dict[str, Any] | None:
        """See OpenAIDialect."""
        text = self._text(updates.row, updates.text)
        if not text and not updates.logprobs:
            return None
        return self._choice(updates.row, text, updates.logprobs, None)

    def end(self, row: int, reason: str) -> dict[str, Any]:
        """See OpenAIDialect."""
        return {"index": row, "text": "", "logprobs": None, "finish_reason": reason}

    def whole(self, rows: list[RowResult]) -> Any:
        """See Dialect."""
        choices = [
            self._choice(index, self._text(index, row.text), row.logprobs, finish_reason(row))
            for index, row in enumerate(rows)
        ]
        return self.answer(choices, rows)

    def _text(self, row: int, text: str) -> str:
        owed, self._owed[row] = self._owed[row], ""
        return owed + text

    def _choice(self, row: int, text: str, tokens: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self._tells_logprobs:
            logprobs, self._offsets[row] = completion_logprobs(tokens, self._offsets[row])
        return {"index": row, "text": text, "logprobs": logprobs, "finish_reason": reason}


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> tuple[dict[str, Any], int]:
    """`logprobs` of a completion's choice whose text goes on at `offset`, and where the next piece begins."""
    texts = [token_text(token.token) for token in tokens]
    lengths = (len(token.token.decode("utf-8", "ignore")) for token in tokens)
    offsets = list(itertools.accumulate(lengths, initial=offset))
    top = [{token_text(rival): as_logprob(value) for rival, value in token.top} for token in tokens]
    logprobs = {
        "tokens": texts,
        "token_logprobs": chosen(tokens),
        "top_logprobs": top,
        "text_offset": offsets[:-1],
    }
    return logprobs, offsets[-1]


async def completions(context: Context, body: CompletionBody) -> Reply:
    """Continue raw prompts, each `n` times from one prefill; with `suffix`, fill in what stands between."""
    texts: list[str | list[int]] = list(body.prompts)
    stops = [*(given_stops(body) or ()), *body.stop_texts]
    if body.suffix is not None:
        texts = [prompts.fill_in_the_middle(str(text), body.suffix) for text in texts]
        stops.append(prompts.FIM_STOP)
    rows = await openai_rows(context, body, texts, stops, "prompt")
    if body.session_id is not None:
        rows = await as_turn(context, rows, texts[0], body.session_id, texts[0], "prompt", wait=body.wait)
    job = openai_job(body, rows, PATH)
    dialect = CompletionDialect(body, await fingerprint(context), job.num_rows)
    return await run(context, job, dialect, Transcript(job.num_rows), body.stream)


EXAMPLE = {"model": "rwkv7", "prompt": "Once upon a time", "max_tokens": 32}


def _route(path: str) -> Route:
    return Route(
        "POST",
        path,
        completions,
        CompletionBody,
        "Continue raw prompts, as OpenAI's SDKs speak it.",
        is_work=True,
        answer=CompletionAnswer,
        events=(CompletionChunk,),
        error_form=OPENAI_ERRORS,
        errors=SESSION_ERRORS,
        example=EXAMPLE,
    )


ROUTES = (
    _route(PATH),
    _route("/v1/completions"),
    Route(
        "GET",
        "/openai/v1/models",
        system.models,
        None,
        "The models served.",
        answer=ModelList,
        error_form=OPENAI_ERRORS,
    ),
    system.model_route("/openai/v1/models/{model}"),
)
