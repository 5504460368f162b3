"""`POST /openai/v1/responses`: OpenAI's newer route. Nothing is stored between requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from routes.context import Context
from routes.openai.formatter import conversation_rows, logprob_entries, token_counter
from routes.openai.logprobs import ContentLogprobs
from routes.openai.responses_body import ResponsesBody
from routes.openai.responses_models import ResponseEvent, ResponseObject
from routes.request.jobs import make_job
from routes.response.answer_parser import AnswerDelta, AnswerParser
from routes.response.event_stream import DecodedRow, OutputDecoder
from routes.response.generate import ResponseFormatter, run
from routes.response.http_response import OPENAI_ERRORS, ErrorFormat, HandlerResponse, named_sse, with_warnings
from routes.response.tool_call_parser import DeltaToolCall
from routes.route import SESSION_ERRORS, Routes
from rwkv_batch.errors import ErrorInfo
from rwkv_batch.request import Finish, FinishReason

ROUTES = Routes()

Event = tuple[str, dict[str, Any]]
"""Type, and all fields except type and sequence number."""
_TEXT = {
    "message": ("msg", "response.output_text", "output_text"),
    "reasoning": ("rs", "response.reasoning_text", "reasoning_text"),
}
"""Per item with text: prefix of ids, prefix of events, and type of the text part."""


class OutputItems:
    """The output of one response. Only its last item may be open."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Text or arguments of the open item."""
        self._logprobs: list[msgspec.Raw] = []
        self._is_open = False

    def feed(self, parts: AnswerDelta, logprobs: list[msgspec.Raw]) -> Iterator[Event]:
        """Add new output with the log-probabilities of its content tokens. Yield its events."""
        if parts.reasoning:
            yield from self._add_text("reasoning", parts.reasoning, [])
        if parts.content or logprobs:
            yield from self._add_text("message", parts.content, logprobs)
        for call in parts.calls:
            yield from self._add_call(call)

    def end(self, is_cut: bool) -> Iterator[Event]:
        """Close the last item. `is_cut`: it is incomplete. An empty answer becomes an empty message."""
        if not self.items:
            yield from self._add_text("message", "", [])
        yield from self._close("incomplete" if is_cut else "completed")

    def text(self, kind: str) -> str:
        """Return all text of one kind of item."""
        return "".join(part["text"] for item in self.items if item["type"] == kind for part in item["content"])

    def _add_text(self, kind: str, text: str, logprobs: list[msgspec.Raw]) -> Iterator[Event]:
        prefix, event, part = _TEXT[kind]
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield self._open({"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, **own, "content": []})
            yield "response.content_part.added", {**self._position(), "content_index": 0, "part": _part(part, "", [])}
        self._texts.append(text)
        self._logprobs += logprobs
        if text or logprobs:
            logprob_fields = {"logprobs": logprobs} if kind == "message" else {}
            yield f"{event}.delta", {**self._position(), "content_index": 0, "delta": text, **logprob_fields}

    def _add_call(self, call: DeltaToolCall) -> Iterator[Event]:
        if call.name:
            yield from self._close("completed")
            ids = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": f"call_{uuid.uuid4().hex}"}
            yield self._open({**ids, "name": call.name, "arguments": ""})
        if call.arguments:
            self._texts.append(call.arguments)
            yield "response.function_call_arguments.delta", {**self._position(), "delta": call.arguments}

    def _open(self, item: dict[str, Any]) -> Event:
        item["status"] = "in_progress"
        self.items.append(item)
        self._texts, self._logprobs, self._is_open = [], [], True
        return "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        item, text, position = self.items[-1], "".join(self._texts), self._position()
        if item["type"] == "function_call":
            item["arguments"] = text
            call_fields = {"name": item["name"], "arguments": text}
            yield "response.function_call_arguments.done", {**position, **call_fields}
        else:
            _, event, kind = _TEXT[item["type"]]
            part = _part(kind, text, self._logprobs)
            item["content"] = [part]
            logprob_fields = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            yield f"{event}.done", {**position, "content_index": 0, "text": text, **logprob_fields}
            yield "response.content_part.done", {**position, "content_index": 0, "part": part}
        item["status"], self._is_open = status, False
        yield "response.output_item.done", {"output_index": position["output_index"], "item": item}

    def _position(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _part(kind: str, text: str, logprobs: list[msgspec.Raw]) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": logprobs} if kind == "output_text" else part


PATH = "/openai/v1/responses"
_STATUS = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.TIMEOUT: "incomplete",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.ERROR: "failed",
}
_INCOMPLETE_REASONS = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.TIMEOUT: "timeout",
    FinishReason.STOP: "stop",
}


def _error_event(info: ErrorInfo) -> dict[str, Any]:
    """Return an error as both this route's event and OpenAI's error object."""
    body = OPENAI_ERRORS.body(info)
    error = body["error"]
    return {"type": "error", "message": error["message"], "code": error["code"], "param": error["param"], **body}


class ResponsesFormatter(ResponseFormatter):
    """Writes one response: complete, or as stream events."""

    error_format = ErrorFormat(_error_event, OPENAI_ERRORS.statuses, OPENAI_ERRORS.schema)

    def __init__(self, body: ResponsesBody, count_tokens: Callable[[str], int]) -> None:
        """`count_tokens`: returns the number of tokens of a text."""
        self._head = with_warnings(_head(body))
        self._count_tokens = count_tokens
        self._parser = AnswerParser(body.answer_format)
        self._logprobs = ContentLogprobs()
        self._items = OutputItems()
        self._sequence_number = 0

    def stream_start(self) -> bytes:
        response_fields = {"response": self._response("in_progress", None)}
        return self._sse_frames([("response.created", response_fields), ("response.in_progress", response_fields)])

    def chunk(self, updates: list[DecodedRow]) -> bytes:
        return b"".join(self._sse_frames(self._events(update)) for update in updates)

    def full_body(self, rows: list[DecodedRow]) -> Any:
        (row,) = rows
        for _ in self._delta_events(row, final=True):
            pass
        return self._response(self._status(row.finish), row.finish)

    def _events(self, update: DecodedRow) -> Iterable[Event]:
        finish = update.finish
        yield from self._delta_events(update, final=finish is not None)
        if finish is not None:
            status = self._status(finish)
            yield f"response.{status}", {"response": self._response(status, finish)}

    def _delta_events(self, update: DecodedRow, final: bool) -> Iterable[Event]:
        parts = self._parser.feed(update.text, final)
        yield from self._items.feed(parts, logprob_entries(self._logprobs.feed(update.logprobs, parts, final)))
        if final:
            yield from self._items.end(is_cut=self._last_item_is_incomplete(update.finish))

    def _status(self, finish: Finish | None) -> str:
        """Return the status of a finished response. A stop inside a call makes it incomplete."""
        status = "failed" if finish is None else _STATUS[finish.reason]
        return "incomplete" if status == "completed" and self._parser.is_inside_call else status

    def _last_item_is_incomplete(self, finish: Finish | None) -> bool:
        """Return whether the last item is incomplete. An unfinished opening of a call after it does not count."""
        last = self._items.items[-1]["type"] if self._items.items else ""
        if last == "reasoning":
            is_inside = self._parser.is_inside_thought
        else:
            is_inside = not last or self._parser.ends_inside(last == "function_call")
        return is_inside and self._status(finish) != "completed"

    def _sse_frames(self, events: Iterable[Event]) -> bytes:
        frames = []
        for kind, fields in events:
            frames.append(named_sse({"type": kind, "sequence_number": self._sequence_number, **fields}))
            self._sequence_number += 1
        return b"".join(frames)

    def _response(self, status: str, finish: Finish | None) -> dict[str, Any]:
        error = None if finish is None else finish.error
        reason = _INCOMPLETE_REASONS[finish.reason] if finish is not None and status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": [dict(item) for item in self._items.items],
            "usage": None if finish is None else self._usage(finish),
        }

    def _usage(self, finish: Finish) -> dict[str, Any]:
        return {
            "input_tokens": finish.prompt_tokens,
            "input_tokens_details": {"cached_tokens": finish.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": finish.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._count_tokens(self._items.text("reasoning"))},
            "total_tokens": finish.prompt_tokens + finish.completion_tokens,
        }


def _head(body: ResponsesBody) -> dict[str, Any]:
    text_format, choice = body.text.format, body.tool_choice
    format_fields = {"type": text_format.type}
    if text_format.type == "json_schema":
        format_fields |= text_format.model_dump(by_alias=True)
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": body.model,
        "instructions": body.instructions or None,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": format_fields},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools],
        "top_p": body.top_p,
        "truncation": "disabled",
    }


@ROUTES.add(
    "POST",
    PATH,
    "Answer a conversation in the format of OpenAI's newer route.",
    is_generation=True,
    answer=ResponseObject,
    events=(ResponseEvent,),
    error_format=OPENAI_ERRORS,
    errors=SESSION_ERRORS,
    example={"model": "rwkv7", "input": "Hello!", "max_output_tokens": 64},
)
async def responses(context: Context, body: ResponsesBody) -> HandlerResponse:
    """Answer a conversation. Nothing is stored: `previous_response_id` is refused, and `store` is false in the answer.

    Send the conversation's items with each request, or use `session_id`. With an existing session, only the items after
    the last answer are computed.
    """
    rows = await conversation_rows(context, body, "input")
    formatter = ResponsesFormatter(body, token_counter(context))
    return await run(context, make_job(rows, body, PATH), formatter, OutputDecoder(1), body.stream)


ROUTES.append(ROUTES[0].at("/v1/responses"))
