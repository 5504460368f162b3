"""`POST /openai/v1/chat/completions`: conversations as OpenAI's SDKs speak them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from routes.context import Context
from routes.openai.answer_models import ChatAnswer, ChatChunk
from routes.openai.conversation import conversation_rows
from routes.openai.errors import OPENAI_ERRORS
from routes.openai.request import ChatBody
from routes.openai.response import (
    OpenAIDialect,
    fingerprint,
    openai_job,
    row_end,
    token_counter,
    told_end,
    told_logprobs,
)
from routes.response.answer_parts import AnswerParting
from routes.response.generate import RowResult, run
from routes.response.reply import Reply
from routes.response.tool_calls import CallPiece
from routes.response.transcript import RowUpdate, Transcript
from routes.route import SESSION_ERRORS, Route
from rwkv_batch.request import Finish, FinishReason, TokenLogprob

PATH = "/openai/v1/chat/completions"


class ChatDialect(OpenAIDialect):
    """`chat.completion` and its chunks; thoughts apart from answers."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, fingerprint: str, num_rows: int, count_tokens: Callable[[str], int]) -> None:
        """`count_tokens`: of a text."""
        super().__init__(body, fingerprint, num_rows)
        self._count_tokens = count_tokens
        self._thoughts: list[list[str]] = [[] for _ in range(num_rows)]
        self._tells_logprobs = body.logprobs
        form = body.form
        self._partings = [AnswerParting(form) for _ in range(num_rows)]

    def opening(self) -> bytes:
        """See Dialect: the role of every choice."""
        delta = {"role": "assistant", "content": ""}
        choices = ({"index": row, "delta": delta, "finish_reason": None} for row in range(len(self._partings)))
        return b"".join(map(self.frame, choices))

    def piece(self, updates: RowUpdate) -> dict[str, Any] | None:
        """See OpenAIDialect."""
        parts = self._partings[updates.row].feed(updates.text, updates.finish is not None)
        delta: dict[str, Any] = {}
        if parts.reasoning:
            self._thoughts[updates.row].append(parts.reasoning)
            delta["reasoning_content"] = parts.reasoning
        if parts.content:
            delta["content"] = parts.content
        if parts.calls:
            delta["tool_calls"] = [_call_delta(piece) for piece in parts.calls]
        if not delta and not updates.logprobs:
            return None
        choice: dict[str, Any] = {"index": updates.row, "delta": delta, "finish_reason": None}
        if self._tells_logprobs:
            choice["logprobs"] = chat_logprobs(updates.logprobs)
        return choice

    def end(self, row: int, reason: str) -> dict[str, Any]:
        """See OpenAIDialect."""
        return {"index": row, "delta": {}, **told_end(self._reason(row, reason))}

    def whole(self, rows: list[RowResult]) -> Any:
        """See Dialect."""
        return self.answer([self._choice(index, row) for index, row in enumerate(rows)], rows)

    def counts(self, finishes: Sequence[Finish | None]) -> dict[str, Any]:
        """See OpenAIDialect; tokens of the thoughts are told apart."""
        thought = sum(self._count_tokens("".join(pieces)) for pieces in self._thoughts if pieces)
        return {**super().counts(finishes), "completion_tokens_details": {"reasoning_tokens": thought}}

    def _choice(self, index: int, row: RowResult) -> dict[str, Any]:
        parts = self._partings[index].feed(row.text, final=True)
        message: dict[str, Any] = {"role": "assistant", "content": parts.content, "refusal": None}
        if parts.reasoning:
            self._thoughts[index].append(parts.reasoning)
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            message["content"] = parts.content or None
            message["tool_calls"] = [_called(piece) for piece in parts.calls]
        logprobs = chat_logprobs(row.logprobs) if self._tells_logprobs else None
        reason, error = row_end(row)
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            **told_end(self._reason(index, reason), error),
        }

    def _reason(self, row: int, reason: str) -> str:
        """Why a row ended, as OpenAI says it: an answer that has made its calls ends for them."""
        return "tool_calls" if reason == FinishReason.STOP and self._partings[row].has_called else reason


def _called(piece: CallPiece) -> dict[str, Any]:
    """A call's beginning, or the whole of it."""
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _call_delta(piece: CallPiece) -> dict[str, Any]:
    """What is new of a call in a stream; its id and name come once."""
    if piece.name:
        return {"index": piece.index, **_called(piece)}
    return {"index": piece.index, "function": {"arguments": piece.arguments}}


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    return {"content": told_logprobs(tokens), "refusal": None}


async def chat_completions(context: Context, body: ChatBody) -> Reply:
    """Answer a conversation, `n` times from one prefill.

    With `session_id` only what follows the last answer is read, once the session exists; its state holds the rest.
    Thoughts come as `reasoning_content`. A conversation that ends with the assistant's message is gone on with there.
    """
    rows = await conversation_rows(context, body, "messages")
    dialect = ChatDialect(body, await fingerprint(context, body), body.n, token_counter(context))
    return await run(context, openai_job(body, rows, PATH), dialect, Transcript(body.n), body.stream)


ROUTES = (
    Route(
        "POST",
        PATH,
        chat_completions,
        ChatBody,
        "Answer a conversation, as OpenAI's SDKs speak it.",
        is_work=True,
        answer=ChatAnswer,
        events=(ChatChunk,),
        error_form=OPENAI_ERRORS,
        errors=SESSION_ERRORS,
        example={"model": "rwkv7", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64},
    ),
)
