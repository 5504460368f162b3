"""`POST /openai/v1/chat/completions`: conversations as OpenAI's SDKs speak them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from routes.context import Context
from routes.openai.conversation import conversation_rows
from routes.openai.errors import OPENAI_ERRORS
from routes.openai.formatter import (
    OpenAIFormatter,
    fingerprint,
    finish_fields,
    logprob_entries,
    openai_job,
    row_finish,
    token_counter,
)
from routes.openai.request import ChatBody
from routes.openai.response_models import ChatAnswer, ChatChunk
from routes.response.answer_parser import AnswerParser
from routes.response.generate import RowResult, run
from routes.response.http_response import HandlerResponse
from routes.response.output_decoder import OutputDecoder, RowUpdate
from routes.response.tool_call_parser import ToolCallPiece
from routes.route import SESSION_ERRORS, Route
from rwkv_batch.request import Finish, FinishReason, TokenLogprob

PATH = "/openai/v1/chat/completions"


class ChatFormatter(OpenAIFormatter):
    """`chat.completion` and its chunks; thoughts apart from answers."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, fingerprint: str, num_rows: int, count_tokens: Callable[[str], int]) -> None:
        """`count_tokens`: of a text."""
        super().__init__(body, fingerprint, num_rows)
        self._count_tokens = count_tokens
        self._reasoning: list[list[str]] = [[] for _ in range(num_rows)]
        self._returns_logprobs = body.logprobs
        form = body.form
        self._parsers = [AnswerParser(form) for _ in range(num_rows)]

    def stream_start(self) -> bytes:
        """See Dialect: the role of every choice."""
        delta = {"role": "assistant", "content": ""}
        choices = ({"index": row, "delta": delta, "finish_reason": None} for row in range(len(self._parsers)))
        return b"".join(map(self.frame, choices))

    def piece(self, updates: RowUpdate) -> dict[str, Any] | None:
        """See OpenAIDialect."""
        parts = self._parsers[updates.row].feed(updates.text, updates.finish is not None)
        delta: dict[str, Any] = {}
        if parts.reasoning:
            self._reasoning[updates.row].append(parts.reasoning)
            delta["reasoning_content"] = parts.reasoning
        if parts.content:
            delta["content"] = parts.content
        if parts.calls:
            delta["tool_calls"] = [_tool_call_delta(piece) for piece in parts.calls]
        if not delta and not updates.logprobs:
            return None
        choice: dict[str, Any] = {"index": updates.row, "delta": delta, "finish_reason": None}
        if self._returns_logprobs:
            choice["logprobs"] = chat_logprobs(updates.logprobs)
        return choice

    def end(self, row: int, reason: str) -> dict[str, Any]:
        """See OpenAIDialect."""
        return {"index": row, "delta": {}, **finish_fields(self._finish_reason(row, reason))}

    def full_body(self, rows: list[RowResult]) -> Any:
        """See Dialect."""
        return self.answer([self._full_choice(index, row) for index, row in enumerate(rows)], rows)

    def counts(self, finishes: Sequence[Finish | None]) -> dict[str, Any]:
        """See OpenAIDialect; tokens of the thoughts are told apart."""
        num_reasoning_tokens = sum(self._count_tokens("".join(pieces)) for pieces in self._reasoning if pieces)
        return {**super().counts(finishes), "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens}}

    def _full_choice(self, index: int, row: RowResult) -> dict[str, Any]:
        parts = self._parsers[index].feed(row.text, final=True)
        message: dict[str, Any] = {"role": "assistant", "content": parts.content, "refusal": None}
        if parts.reasoning:
            self._reasoning[index].append(parts.reasoning)
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            message["content"] = parts.content or None
            message["tool_calls"] = [_tool_call(piece) for piece in parts.calls]
        logprobs = chat_logprobs(row.logprobs) if self._returns_logprobs else None
        reason, error = row_finish(row)
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            **finish_fields(self._finish_reason(index, reason), error),
        }

    def _finish_reason(self, row: int, reason: str) -> str:
        """Why a row ended, as OpenAI says it: an answer that has made its calls ends for them."""
        return "tool_calls" if reason == FinishReason.STOP and self._parsers[row].has_calls else reason


def _tool_call(piece: ToolCallPiece) -> dict[str, Any]:
    """A call's beginning, or the whole of it."""
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _tool_call_delta(piece: ToolCallPiece) -> dict[str, Any]:
    """What is new of a call in a stream; its id and name come once."""
    if piece.name:
        return {"index": piece.index, **_tool_call(piece)}
    return {"index": piece.index, "function": {"arguments": piece.arguments}}


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    return {"content": logprob_entries(tokens), "refusal": None}


async def chat_completions(context: Context, body: ChatBody) -> HandlerResponse:
    """Answer a conversation, `n` times from one prefill.

    With `session_id` only what follows the last answer is read, once the session exists; its state holds the rest.
    Thoughts come as `reasoning_content`. A conversation that ends with the assistant's message is gone on with there.
    """
    rows = await conversation_rows(context, body, "messages")
    formatter = ChatFormatter(body, await fingerprint(context, body), body.n, token_counter(context))
    return await run(context, openai_job(body, rows, PATH), formatter, OutputDecoder(body.n), body.stream)


ROUTES = (
    Route(
        "POST",
        PATH,
        chat_completions,
        ChatBody,
        "Answer a conversation, as OpenAI's SDKs speak it.",
        is_generation=True,
        answer=ChatAnswer,
        events=(ChatChunk,),
        error_format=OPENAI_ERRORS,
        errors=SESSION_ERRORS,
        example={"model": "rwkv7", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64},
    ),
)
