"""`POST /openai/v1/chat/completions`: conversations in OpenAI's format."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from routes.context import Context
from routes.openai.completion_models import ChatAnswer, ChatChunk
from routes.openai.formatter import (
    OpenAIFormatter,
    conversation_rows,
    fingerprint,
    finish_fields,
    logprob_entries,
    row_finish,
    token_counter,
    with_prompt_logprobs,
)
from routes.openai.logprobs import ContentLogprobs, prompt_logprobs
from routes.openai.request import ChatBody
from routes.request.jobs import make_job
from routes.response.answer_parser import AnswerParser
from routes.response.event_stream import DecodedRow, OutputDecoder
from routes.response.generate import run
from routes.response.http_response import OPENAI_ERRORS, HandlerResponse
from routes.response.tool_call_parser import DeltaToolCall
from routes.route import SESSION_ERRORS, Routes
from rwkv_batch.request import FinishReason, TokenLogprob

ROUTES = Routes()

PATH = "/openai/v1/chat/completions"


class ChatFormatter(OpenAIFormatter):
    """Writes `chat.completion` and its chunks, with reasoning separate from content."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, fingerprint: str, num_rows: int, count_tokens: Callable[[str], int]) -> None:
        """`count_tokens`: returns the number of tokens of a text."""
        super().__init__(body, fingerprint, num_rows)
        self.scored: Callable[[list[TokenLogprob]], list[Any] | None] | None = None
        """Returns the prompt's `prompt_logprobs`. None: not requested."""
        self._count_tokens = count_tokens
        self._reasoning: list[list[str]] = [[] for _ in range(num_rows)]
        self._returns_logprobs = body.logprobs
        self._parsers = [AnswerParser(body.answer_format) for _ in range(num_rows)]
        self._logprobs = [ContentLogprobs() for _ in range(num_rows)]

    def stream_start(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choices = ({"index": row, "delta": delta, "finish_reason": None} for row in range(len(self._parsers)))
        return b"".join(map(self.chunk_event, choices))

    def delta_choice(self, updates: DecodedRow) -> dict[str, Any] | None:
        is_final = updates.finish is not None
        parts = self._parsers[updates.row].feed(updates.text, is_final)
        logprobs = self._logprobs[updates.row].feed(updates.logprobs, parts, is_final)
        delta: dict[str, Any] = {}
        if parts.reasoning:
            self._reasoning[updates.row].append(parts.reasoning)
            delta["reasoning_content"] = parts.reasoning
        if parts.content:
            delta["content"] = parts.content
        if parts.calls:
            delta["tool_calls"] = [_tool_call_delta(call) for call in parts.calls]
        if not delta and not logprobs:
            return None
        choice: dict[str, Any] = {"index": updates.row, "delta": delta, "finish_reason": None}
        if self._returns_logprobs:
            choice["logprobs"] = chat_logprobs(logprobs)
        return choice

    def last_choice(self, row: int, reason: str) -> dict[str, Any]:
        return {"index": row, "delta": {}, **finish_fields(self._finish_reason(row, reason))}

    def full_body(self, rows: list[DecodedRow]) -> Any:
        answer = self.answer([self._full_choice(index, row) for index, row in enumerate(rows)], rows)
        if self.scored is not None:
            answer["prompt_logprobs"] = self.scored(rows[0].prompt_logprobs)
        return answer

    def num_reasoning_tokens(self) -> int:
        return sum(self._count_tokens("".join(texts)) for texts in self._reasoning if texts)

    def _full_choice(self, index: int, row: DecodedRow) -> dict[str, Any]:
        parts = self._parsers[index].feed(row.text, final=True)
        message: dict[str, Any] = {"role": "assistant", "content": parts.content, "refusal": None}
        if parts.reasoning:
            self._reasoning[index].append(parts.reasoning)
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            message["content"] = parts.content or None
            message["tool_calls"] = [_tool_call(call) for call in parts.calls]
        tokens = self._logprobs[index].feed(row.logprobs, parts, final=True)
        logprobs = chat_logprobs(tokens) if self._returns_logprobs else None
        reason, error = row_finish(row)
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            **finish_fields(self._finish_reason(index, reason), error),
        }

    def _finish_reason(self, row: int, reason: str) -> str:
        """Return OpenAI's finish reason: "tool_calls" for an answer that ends after its calls."""
        return "tool_calls" if reason == FinishReason.STOP and self._parsers[row].has_calls else reason


def _tool_call(call: DeltaToolCall) -> dict[str, Any]:
    """Return a complete call, or the beginning of one."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _tool_call_delta(call: DeltaToolCall) -> dict[str, Any]:
    """Return a stream's delta of a call. Id and name are in its first delta."""
    if call.name:
        return {"index": call.index, **_tool_call(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": logprob_entries(tokens), "refusal": None}


@ROUTES.add(
    "POST",
    PATH,
    "Answer a conversation in OpenAI's format.",
    is_generation=True,
    answer=ChatAnswer,
    events=(ChatChunk,),
    error_format=OPENAI_ERRORS,
    errors=SESSION_ERRORS,
    example={"model": "rwkv7", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64},
)
async def chat_completions(context: Context, body: ChatBody) -> HandlerResponse:
    """Answer a conversation, `n` times with one prefill.

    With an existing `session_id`, only the messages after the last answer are computed. Reasoning is returned as
    `reasoning_content`. If the last message is the assistant's, the answer continues it.
    """
    rows = await conversation_rows(context, body, "messages")
    rows = with_prompt_logprobs(rows, body.prompt_logprobs)
    formatter = ChatFormatter(body, await fingerprint(context, body), body.n, token_counter(context))
    if body.prompt_logprobs is not None:
        ids = rows[0].prompt
        formatter.scored = lambda tokens: prompt_logprobs(ids, tokens, context.tokenizer.id_by_bytes)
    return await run(context, make_job(rows, body, PATH), formatter, OutputDecoder(body.n), body.stream)
