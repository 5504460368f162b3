"""The common parts of the OpenAI routes: rows, conversations, fingerprint, and the frame of answers and chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from routes.context import Context
from routes.openai.request import ConversationBody, OpenAIBody
from routes.request import prompts
from routes.request.bodies import Template
from routes.request.jobs import as_turn, make_rows
from routes.request.messages import Message
from routes.request.model_names import requested_adapter
from routes.request.tools import FENCE, ToolSet, begins_with_call
from routes.response.batch_formatter import usage
from routes.response.event_stream import DecodedRow, clamp_logprob
from routes.response.generate import ResponseFormatter, call_engine
from routes.response.http_response import OPENAI_ERRORS, sse, to_json
from rwkv_batch.calls import GetStatus, ListAdapters
from rwkv_batch.errors import ErrorInfo, invalid
from rwkv_batch.request import Finish, FinishReason, GenerateRequest, PromptLogprobs, TokenLogprob

MAX_UNSTREAMED_LOGPROBS = 2_000_000
"""Limit of log-probabilities in an answer that is not streamed. Each takes about 100 bytes until it is sent."""
OPENAI_REASONS = (FinishReason.STOP, FinishReason.LENGTH, "tool_calls")
"""Values of `finish_reason`."""


async def fingerprint(context: Context, body: OpenAIBody) -> str:
    """Return `system_fingerprint`: digests of weights and adapter. Raises ServiceError while the engine is away."""
    weights = context.readiness.fingerprint
    if not weights:
        status = await call_engine(context, GetStatus())
        weights = context.readiness.fingerprint = f"fp_{str(status['fingerprint'])[-12:]}"
    adapter = requested_adapter(body, context.config)
    digests = (
        [info.digest for info in await call_engine(context, ListAdapters()) if info.name == adapter] if adapter else []
    )
    return "+".join([weights, *(digest[:12] for digest in digests)])


async def openai_rows(
    context: Context, body: OpenAIBody, prompts: Sequence[str | list[int]], stops: Sequence[int | str], field: str
) -> list[GenerateRequest]:
    """Return one row per prompt, with `samples_per_prompt` continuations. Raises ServiceError."""
    n = body.samples_per_prompt
    if n > 1 and len(prompts) * n > context.config.max_contents:  # `build_rows` checks one each
        limit, name = context.config.max_contents, "n" if n == body.n else "best_of"
        raise invalid(
            name, f"{len(prompts)} prompts times {n} are above the limit of {limit} (--max-contents); send fewer", n
        )
    check_logprobs(body, len(prompts) * n)
    return await make_rows(context, body, prompts, stops, field, n)


def check_logprobs(body: OpenAIBody, rows: int, echoed: int = 0) -> None:
    """Check the size of the log-probabilities of a non-streamed answer. Raises ServiceError.

    echoed: number of prompt tokens with log-probabilities
    """
    if body.num_logprobs is None or body.stream:
        return
    max_entries = (rows * body.max_tokens + echoed) * (1 + body.num_logprobs)
    if max_entries > MAX_UNSTREAMED_LOGPROBS:
        prompt_note = f"{echoed} prompt tokens and" if echoed else ""
        raise invalid(
            "logprobs",
            f"{prompt_note}{rows} answers of max_tokens {body.max_tokens} with {1 + body.num_logprobs} "
            f"log-probabilities per token may have {max_entries} entries, the limit is "
            f"{MAX_UNSTREAMED_LOGPROBS} without a stream; set stream, or lower max_tokens or the number of answers "
            "or log-probabilities",
            body.num_logprobs,
        )


def with_prompt_logprobs(rows: list[GenerateRequest], top: int | None) -> list[GenerateRequest]:
    """Return rows whose prompts are scored, with `top` alternatives. None: not scored. Raises ServiceError."""
    if top is None:
        return rows
    entries = sum(len(row.prompt) * row.n for row in rows) * (1 + top)
    if entries > MAX_UNSTREAMED_LOGPROBS:
        raise invalid(
            "prompt_logprobs",
            f"the prompts may have {entries} log-probabilities, the limit is {MAX_UNSTREAMED_LOGPROBS}; send fewer or "
            "shorter prompts, or lower prompt_logprobs",
            top,
        )
    return [msgspec.structs.replace(row, prompt_logprobs=PromptLogprobs(top=top)) for row in rows]


def token_text(token: bytes) -> str:
    """Return a token as text. Part of a character becomes `bytes:\\xe4`, as in OpenAI's answers."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def logprob_entries(tokens: Sequence[TokenLogprob]) -> list[msgspec.Raw]:
    """Return OpenAI's entries of tokens with their alternatives. They are encoded at once to save memory."""
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


class OpenAIFormatter(ResponseFormatter):
    """Writes OpenAI's objects. A chunk has one choice, because SDKs read only the first."""

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

    def delta_choice(self, updates: DecodedRow) -> dict[str, Any] | None:
        """Return a row's new text as a choice. None if there is none."""
        raise NotImplementedError

    def last_choice(self, row: int, reason: str) -> dict[str, Any]:
        raise NotImplementedError

    def chunk(self, updates: list[DecodedRow]) -> bytes:
        choices: list[dict[str, Any]] = []
        for row in updates:
            choice = self.delta_choice(row)
            if choice is not None:
                choices.append(choice)
            if row.finish is not None:
                self._finishes[row.row] = row.finish
                choices.append(self.last_choice(row.row, row.finish.reason))
        return b"".join(map(self.chunk_event, choices))

    def chunk_event(self, choice: dict[str, Any]) -> bytes:
        body: dict[str, Any] = {**self._head, "object": self.chunk_object, "choices": [choice]}
        if self._includes_usage:
            body["usage"] = None
        return sse(self.first_with_warnings(body))

    def stream_end(self) -> bytes:
        if not self._includes_usage:
            return b""
        counts = self.counts(self._finishes)
        return sse({**self._head, "object": self.chunk_object, "choices": [], "usage": counts})

    def counts(self, finishes: Sequence[Finish | None]) -> dict[str, Any]:
        """Return the usage, with the numbers of reasoning tokens and of predicted ones."""
        ended = [finish for finish in finishes if finish is not None]
        details = {
            "reasoning_tokens": self.num_reasoning_tokens(),
            "accepted_prediction_tokens": sum(finish.accepted_drafts.get("prediction", 0) for finish in ended),
            "rejected_prediction_tokens": sum(finish.rejected_drafts.get("prediction", 0) for finish in ended),
        }
        return {**usage(finishes, self._n), "completion_tokens_details": details}

    def num_reasoning_tokens(self) -> int:
        return 0

    def answer(self, choices: list[dict[str, Any]], rows: list[DecodedRow]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        counts = self.counts([row.finish for row in rows])
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": counts}


def token_counter(context: Context) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text."""
    return lambda text: len(context.tokenizer.encode(text))


def finish_fields(reason: str, error: ErrorInfo | None = None) -> dict[str, Any]:
    """Return the fields for the reason that a row ended.

    OpenAI's clients know few finish reasons, and some fail at others. An answer cut for another reason has `length`,
    and the reason in `end_reason`.
    """
    if reason in OPENAI_REASONS:
        return {"finish_reason": reason}
    fields = {"finish_reason": FinishReason.LENGTH, "end_reason": reason}
    return fields if error is None else fields | OPENAI_ERRORS.body(error)


def row_finish(row: DecodedRow) -> tuple[str, ErrorInfo | None]:
    """Return why a row ended, and its error."""
    return (FinishReason.ERROR, None) if row.finish is None else (row.finish.reason, row.finish.error)


async def conversation_rows(context: Context, body: ConversationBody, field: str) -> list[GenerateRequest]:
    """Return one row with `n` continuations. Raises ServiceError.

    The row is a session turn if the body names a session. An existing session computes only the messages after the last
    answer. Its state has the rest, including the tools.
    """
    messages = body.conversation
    prompt = prompt_of(messages, body.think, body.tool_set, template=body.template, continues=body.continues)
    rows = await openai_rows(context, body, [prompt], body.stops, field)
    if body.session_id is None:
        return rows
    opening = FENCE if body.answer_format.opens_with_call else None
    new = prompts.chat(prompts.new_messages(messages), body.think, template=body.template, opening=opening)
    return await as_turn(context, rows, prompt, body.session_id, new, field, wait=body.wait)


def prompt_of(
    messages: Sequence[Message],
    think: prompts.Think,
    tool_set: ToolSet | None,
    *,
    template: Template | None = None,
    continues: bool = False,
) -> str:
    """Return the prompt of a whole conversation. Its answer may call the tools of `tool_set`."""
    listing = "" if tool_set is None else tool_set.listing
    begins_call = begins_with_call(tool_set, thinks=think is not prompts.Think.OFF, continues=continues)
    opening = FENCE if begins_call else None
    return prompts.chat(messages, think, template=template, continues=continues, listing=listing, opening=opening)
