"""`/v1/messages` and `/v1/messages/count_tokens`: conversations in Anthropic's format."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from routes.anthropic.answers import AnthropicAnswer, AnthropicEvent, CountedTokens
from routes.anthropic.request import AnthropicChat, MessagesBody, MessagesPrompt
from routes.context import Context
from routes.openai.formatter import conversation_rows, prompt_of
from routes.request.jobs import make_job, offload_if_large
from routes.request_context import current_request
from routes.response.answer_parser import AnswerDelta, AnswerParser
from routes.response.event_stream import DecodedRow, OutputDecoder
from routes.response.generate import ResponseFormatter, run
from routes.response.http_response import (
    OPENAI_STATUS,
    SSE,
    ErrorFormat,
    HandlerResponse,
    StreamFormat,
    json_response,
    named_sse,
    with_warnings,
)
from routes.route import Routes, with_defaults_applied
from rwkv_batch.errors import ErrorInfo
from rwkv_batch.request import Finish, FinishReason

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
_STOP_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}


def _error_body(info: ErrorInfo) -> dict[str, Any]:
    error = {"type": _TYPES.get(OPENAI_STATUS[info.kind], "invalid_request_error"), "message": info.message}
    return {"type": "error", "error": error, "request_id": current_request().request_id}


PING = named_sse({"type": "ping"})
ANTHROPIC_ERRORS = ErrorFormat(
    _error_body, OPENAI_STATUS, "AnthropicError", StreamFormat(SSE, named_sse, b"", heartbeat=PING)
)
ROUTES = Routes(error_format=ANTHROPIC_ERRORS, ignored_query=("beta",))
_EXAMPLE = {"model": "rwkv7", "messages": [{"role": "user", "content": "Hello!"}]}


class ContentBlocks:
    """The blocks of one answer. Only the last one may be open."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        """Text or arguments of the open block."""
        self._is_open = False

    def feed(self, parts: AnswerDelta) -> Iterator[dict[str, Any]]:
        """Add new output. Yield its events."""
        if parts.reasoning:
            yield from self._add_text({"type": "thinking", "thinking": "", "signature": ""}, parts.reasoning)
        if parts.content:
            yield from self._add_text({"type": "text", "text": ""}, parts.content)
        for call in parts.calls:
            if call.name:
                block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call.name, "input": {}}
                yield from self._open(block)
            if call.arguments:
                yield self._delta("input_json_delta", "partial_json", call.arguments)

    def close(self) -> Iterator[dict[str, Any]]:
        """Complete the last block. The arguments of a call that was cut off are empty."""
        if not self._is_open:
            return
        block, text, self._is_open = self.blocks[-1], "".join(self._pieces), False
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(text or "{}")
            except ValueError:
                block["input"] = {}
        else:
            block[block["type"]] = text
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _add_text(self, empty_block: dict[str, Any], text: str) -> Iterator[dict[str, Any]]:
        kind = empty_block["type"]
        if not self._is_open or self.blocks[-1]["type"] != kind:
            yield from self._open(empty_block)
        yield self._delta(f"{kind}_delta", kind, text)

    def _open(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        self.blocks.append(block)
        self._pieces, self._is_open = [], True
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, kind: str, field: str, text: str) -> dict[str, Any]:
        self._pieces.append(text)
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


class MessagesFormatter(ResponseFormatter):
    """Writes one message, complete or as events."""

    error_format = ANTHROPIC_ERRORS

    def __init__(self, body: MessagesBody, request: AnthropicChat, prompt_tokens: int) -> None:
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": body.model}
        self._stop_sequences = frozenset(body.stop_sequences)
        self._prompt_tokens = prompt_tokens
        self._parser = AnswerParser(request.answer_format)
        self._blocks = ContentBlocks()

    def stream_start(self) -> bytes:
        usage: Any = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        empty: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return named_sse({"type": "message_start", "message": with_warnings(empty)})

    def chunk(self, updates: list[DecodedRow]) -> bytes:
        return b"".join(named_sse(event) for update in updates for event in self._events(update))

    def full_body(self, rows: list[DecodedRow]) -> Any:
        (row,) = rows
        for _ in self._output(row.text, True):
            pass
        return {**self._head, "content": self._blocks.blocks, **self._end(row.finish), "usage": _usage(row.finish)}

    def _events(self, update: DecodedRow) -> Iterable[dict[str, Any]]:
        finish = update.finish
        yield from self._output(update.text, finish is not None)
        if finish is not None and finish.error is None:
            yield {"type": "message_delta", "delta": self._end(finish), "usage": _usage(finish)}
            yield {"type": "message_stop"}

    def _output(self, text: str, final: bool) -> Iterator[dict[str, Any]]:
        yield from self._blocks.feed(self._parser.feed(text, final))
        if final:
            yield from self._blocks.close()

    def _end(self, finish: Finish | None) -> dict[str, Any]:
        """Return why the message ended. Anthropic's clients know few reasons: see `end_reason` for others."""
        reason = FinishReason.ERROR if finish is None else finish.reason
        stop = finish.stop_string.decode() if finish is not None else ""
        if stop in self._stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        if reason == FinishReason.STOP and self._parser.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        known = {"stop_reason": _STOP_REASONS.get(reason, "max_tokens"), "stop_sequence": None}
        return known if reason in _STOP_REASONS else {**known, "end_reason": reason}


def _usage(finish: Finish | None) -> dict[str, int]:
    prompt, cached, output = (
        (0, 0, 0) if finish is None else (finish.prompt_tokens, finish.cached_tokens, finish.completion_tokens)
    )
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": output,
    }


async def _chat(context: Context, body: MessagesPrompt) -> AnthropicChat:
    """Return the request in OpenAI's format with the model's defaults. Raises ServiceError."""
    chat: AnthropicChat = await with_defaults_applied(context, await offload_if_large(body.size, body.chat))
    return chat


@ROUTES.add(
    "POST",
    PATH,
    "Answer a conversation in Anthropic's format.",
    is_generation=True,
    answer=AnthropicAnswer,
    events=(AnthropicEvent,),
    example={**_EXAMPLE, "max_tokens": 64},
)
async def messages(context: Context, body: MessagesBody) -> HandlerResponse:
    """Answer a conversation in Anthropic's format. Nothing is stored."""
    request = await _chat(context, body)
    rows = await conversation_rows(context, request, "messages")
    formatter = MessagesFormatter(body, request, len(rows[0].prompt))
    return await run(context, make_job(rows, request, PATH), formatter, OutputDecoder(1), body.stream)


@ROUTES.add(
    "POST", COUNT_PATH, "Count a conversation's tokens in Anthropic's format.", answer=CountedTokens, example=_EXAMPLE
)
async def count_tokens(context: Context, body: MessagesPrompt) -> HandlerResponse:
    """Count the tokens of the prompt that /v1/messages would compute, tools included."""
    chat = await _chat(context, body)
    prompt = prompt_of(chat.messages, chat.think, chat.tool_set, template=chat.template, continues=chat.continues)
    ids = await offload_if_large(len(prompt), context.tokenizer.encode, prompt)
    return json_response({"input_tokens": len(ids)})
