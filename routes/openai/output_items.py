"""The items of a response's output, and their stream events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from routes.response.answer_parser import AnswerDelta
from routes.response.tool_call_parser import DeltaToolCall

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
