"""What both OpenAI routes have in common: from a body to a job, and the frame of every answer and chunk."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from routes.context import Context
from routes.openai.errors import OPENAI_ERRORS
from routes.openai.request import OpenAIBody
from routes.request.generate_requests import build_rows, offload_if_large
from routes.request.jobs import make_job
from routes.request.model_names import requested_adapter
from routes.response.batch_formatter import usage
from routes.response.event_stream import call_engine
from routes.response.generate import BaseFormatter, RowResult
from routes.response.http_response import sse, to_json
from routes.response.output_decoder import RowUpdate
from rwkv_batch.calls import GetStatus, ListAdapters
from rwkv_batch.errors import ErrorInfo, invalid
from rwkv_batch.request import Finish, FinishReason, GenerateRequest, Job, TokenLogprob

FINGERPRINT_KEY = "fingerprint"
"""Key of the model's fingerprint in `Context.shared`."""
MAX_UNSTREAMED_LOGPROBS = 2_000_000
"""Log-probabilities in one answer that is not streamed; each takes some hundred bytes until it is written."""
OPENAI_REASONS = (FinishReason.STOP, FinishReason.LENGTH, "tool_calls")
"""What `finish_reason` may be here."""
MIN_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON does not have."""


async def fingerprint(context: Context, body: OpenAIBody) -> str:
    """`system_fingerprint`: which weights answer, the adapter among them. ServiceError while the engine is away."""
    if FINGERPRINT_KEY not in context.shared:
        status = await call_engine(context, GetStatus())
        context.shared[FINGERPRINT_KEY] = f"fp_{str(status['fingerprint'])[:12]}"
    adapter = requested_adapter(body, context.config)
    digests = (
        [info.digest for info in await call_engine(context, ListAdapters()) if info.name == adapter] if adapter else []
    )
    return "+".join([str(context.shared[FINGERPRINT_KEY]), *(digest[:12] for digest in digests)])


async def openai_rows(
    context: Context,
    body: OpenAIBody,
    prompts: Sequence[str | list[int]],
    stops: Sequence[int | str],
    field: str,
) -> list[GenerateRequest]:
    """One row for each prompt, with as many continuations as are drawn. Raises ServiceError."""
    n = body.samples_per_prompt
    if len(prompts) * n > context.config.max_contents:
        limit, name = context.config.max_contents, "n" if n == body.n else "best_of"
        raise invalid(name, f"{len(prompts)} prompts by {n} pass the limit of {limit} (--max-contents)", n)
    check_logprobs(body, len(prompts) * n)
    size = sum(map(len, prompts))
    return await offload_if_large(size, build_rows, context.tokenizer, context.config, body, prompts, stops, field, n=n)


def check_logprobs(body: OpenAIBody, rows: int, echoed: int = 0) -> None:
    """An answer that is not streamed is held until it is whole: bound what that may be. Raises ServiceError.

    echoed: tokens of prompts whose log-probabilities are told too.
    """
    if body.num_logprobs is None or body.stream:
        return
    max_entries = (rows * body.max_tokens + echoed) * (1 + body.num_logprobs)
    if max_entries > MAX_UNSTREAMED_LOGPROBS:
        prompt_note = f" behind {echoed} tokens of prompts" if echoed else ""
        raise invalid(
            "logprobs",
            f"{rows} answers of max_tokens {body.max_tokens}{prompt_note} with {1 + body.num_logprobs} log-probabilities "
            f"a token may be {max_entries}, the limit is {MAX_UNSTREAMED_LOGPROBS} unless the answer is streamed; "
            "stream it, or lower max_tokens, n or the number of rivals",
            body.num_logprobs,
        )


def openai_job(body: OpenAIBody, rows: list[GenerateRequest], label: str) -> Job:
    """The job of these rows."""
    return make_job(rows, body, label)


def clamp_logprob(value: float) -> float:
    """A log-probability with a JSON form."""
    return max(value, MIN_LOGPROB)


def token_text(token: bytes) -> str:
    """A token as text; a part of a character is written as OpenAI does, `bytes:\\xe4`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def logprob_entries(tokens: Sequence[TokenLogprob]) -> list[msgspec.Raw]:
    """Log-probabilities of shown tokens, each with its rivals'; JSON at once: objects would take six times as much."""
    return [
        msgspec.Raw(
            to_json(
                {
                    **_logprob(token.token, token.logprob),
                    "top_logprobs": [_logprob(*top_logprob) for top_logprob in token.top],
                }
            )
        )
        for token in tokens
    ]


def _logprob(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": clamp_logprob(logprob), "bytes": list(token)}


class OpenAIFormatter(BaseFormatter):
    """One object an answer, one choice a chunk: SDKs look at the first choice only."""

    error_format = OPENAI_ERRORS
    id_prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, body: OpenAIBody, fingerprint: str, num_rows: int) -> None:
        self._head = {
            "id": f"{self.id_prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": fingerprint,
        }
        self._n = body.samples_per_prompt
        self._includes_usage = body.includes_usage
        self._finishes: list[Finish | None] = [None] * num_rows

    def piece(self, updates: RowUpdate) -> dict[str, Any] | None:
        """New text of a row as a choice; None if there is nothing to say."""
        raise NotImplementedError

    def end(self, row: int, reason: str) -> dict[str, Any]:
        """The last choice of a row."""
        raise NotImplementedError

    def chunk(self, updates: list[RowUpdate]) -> bytes:
        """See Dialect."""
        choices: list[dict[str, Any]] = []
        for row in updates:
            piece = self.piece(row)
            if piece is not None:
                choices.append(piece)
            if row.finish is not None:
                self._finishes[row.row] = row.finish
                choices.append(self.end(row.row, row.finish.reason))
        return b"".join(map(self.frame, choices))

    def frame(self, choice: dict[str, Any]) -> bytes:
        """One chunk."""
        body: dict[str, Any] = {**self._head, "object": self.chunk_object, "choices": [choice]}
        if self._includes_usage:
            body["usage"] = None
        return sse(body)

    def stream_end(self) -> bytes:
        """See Dialect."""
        if not self._includes_usage:
            return b""
        counts = self.counts(self._finishes)
        return sse({**self._head, "object": self.chunk_object, "choices": [], "usage": counts})

    def counts(self, finishes: Sequence[Finish | None]) -> dict[str, Any]:
        """The usage of all rows."""
        return usage(finishes, self._n)

    def answer(self, choices: list[dict[str, Any]], rows: list[RowResult]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        counts = self.counts([row.finish for row in rows])
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": counts}


def token_counter(context: Context) -> Callable[[str], int]:
    """What counts the tokens of a text."""
    return lambda text: len(context.tokenizer.encode(text))


def finish_fields(reason: str, error: ErrorInfo | None = None) -> dict[str, Any]:
    """Why a row ended, for its choice: OpenAI's clients know few words for it, and some fail at any other.

    An answer that is not whole for another reason than its length is told as one cut short, and that reason beside it.
    """
    if reason in OPENAI_REASONS:
        return {"finish_reason": reason}
    fields = {"finish_reason": FinishReason.LENGTH, "end_reason": reason}
    return fields if error is None else fields | OPENAI_ERRORS.body(error)


def row_finish(row: RowResult) -> tuple[str, ErrorInfo | None]:
    """Why a row ended, and what failed."""
    return (FinishReason.ERROR, None) if row.finish is None else (row.finish.reason, row.finish.error)
