"""`POST /openai/v1/responses`: the newer face of OpenAI's SDKs; nothing is kept between requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from routes.context import Context
from routes.openai.conversation import conversation_rows
from routes.openai.errors import OPENAI_ERRORS
from routes.openai.formatter import logprob_entries, openai_job, token_counter
from routes.openai.output_items import Event, OutputItems
from routes.openai.responses_body import ResponsesBody
from routes.openai.responses_models import ResponseEvent, ResponseObject
from routes.response.answer_parser import AnswerParser
from routes.response.generate import BaseFormatter, RowResult, run
from routes.response.http_response import ErrorFormat, HandlerResponse, sse
from routes.response.output_decoder import OutputDecoder, RowUpdate
from routes.route import SESSION_ERRORS, Route
from rwkv_batch.errors import ErrorInfo
from rwkv_batch.request import Finish, FinishReason

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
    """A failure both as an event of this route and as the error object of all others."""
    body = OPENAI_ERRORS.body(info)
    error = body["error"]
    return {"type": "error", "message": error["message"], "code": error["code"], "param": error["param"], **body}


class ResponsesFormatter(BaseFormatter):
    """One response: its items whole, or the events of their growing."""

    error_format = ErrorFormat(_error_event, OPENAI_ERRORS.statuses)

    def __init__(self, body: ResponsesBody, count_tokens: Callable[[str], int]) -> None:
        """`count_tokens`: of a text."""
        self._head = _head(body)
        self._count_tokens = count_tokens
        self._parser = AnswerParser(body.form)
        self._items = OutputItems()
        self._sequence_number = 0

    def stream_start(self) -> bytes:
        """See Dialect."""
        response_fields = {"response": self._response("in_progress", None)}
        return self._sse_frames([("response.created", response_fields), ("response.in_progress", response_fields)])

    def chunk(self, updates: list[RowUpdate]) -> bytes:
        """See Dialect."""
        return b"".join(self._sse_frames(self._events(update)) for update in updates)

    def full_body(self, rows: list[RowResult]) -> Any:
        """See Dialect."""
        (row,) = rows
        for _ in self._delta_events(RowUpdate(0, row.text, finish=row.finish, logprobs=row.logprobs), final=True):
            pass
        return self._response(self._status(row.finish), row.finish)

    def _events(self, update: RowUpdate) -> Iterable[Event]:
        finish = update.finish
        yield from self._delta_events(update, final=finish is not None)
        if finish is not None:
            status = self._status(finish)
            yield f"response.{status}", {"response": self._response(status, finish)}

    def _delta_events(self, update: RowUpdate, final: bool) -> Iterable[Event]:
        parts = self._parser.feed(update.text, final)
        yield from self._items.feed(parts, logprob_entries(update.logprobs))
        if final:
            yield from self._items.end(is_cut=self._last_item_is_incomplete(update.finish))

    def _status(self, finish: Finish | None) -> str:
        """Of a response that has ended; one that a stop ended inside a call is not whole."""
        status = "failed" if finish is None else _STATUS[finish.reason]
        return "incomplete" if status == "completed" and self._parser.is_inside_call else status

    def _last_item_is_incomplete(self, finish: Finish | None) -> bool:
        """Whether the last item is not whole: what is left out behind it, as the opening of a call, is none of it."""
        last = self._items.items[-1]["type"] if self._items.items else ""
        if last == "reasoning":
            is_inside = self._parser.is_inside_thought
        else:
            is_inside = not last or self._parser.ends_inside(last == "function_call")
        return is_inside and self._status(finish) != "completed"

    def _sse_frames(self, events: Iterable[Event]) -> bytes:
        frames = []
        for kind, fields in events:
            event = {"type": kind, "sequence_number": self._sequence_number, **fields}
            frames.append(b"event: " + kind.encode() + b"\n" + sse(event))
            self._sequence_number += 1
        return b"".join(frames)

    def _response(self, status: str, finish: Finish | None) -> dict[str, Any]:
        error = None if finish is None else finish.error
        why = _INCOMPLETE_REASONS[finish.reason] if finish is not None and status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": None if why is None else {"reason": why},
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
    """What every state of a response repeats of its request."""
    form, choice = body.text.format, body.tool_choice
    format_fields = {"type": form.type}
    if form.type == "json_schema":
        format_fields |= form.model_dump(by_alias=True)
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


async def responses(context: Context, body: ResponsesBody) -> HandlerResponse:
    """Answer a conversation. Nothing is kept: `previous_response_id` is refused, `store` is answered with false.

    Send the conversation's items again, or name a `session_id`: then only what follows the last answer is read, once
    the session exists.
    """
    rows = await conversation_rows(context, body, "input")
    formatter = ResponsesFormatter(body, token_counter(context))
    return await run(context, openai_job(body, rows, PATH), formatter, OutputDecoder(1), body.stream)


def _route(path: str) -> Route:
    return Route(
        "POST",
        path,
        responses,
        ResponsesBody,
        "Answer a conversation, as OpenAI's SDKs speak it on their newer route.",
        is_generation=True,
        answer=ResponseObject,
        events=(ResponseEvent,),
        error_format=OPENAI_ERRORS,
        errors=SESSION_ERRORS,
        example={"model": "rwkv7", "input": "Hello!", "max_output_tokens": 64},
    )


ROUTES = (_route(PATH), _route("/v1/responses"))
