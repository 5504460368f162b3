"""The items of a response's output, and the events that tell of them while they grow."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from routes.response.answer_parser import AnswerDelta
from routes.response.tool_call_parser import ToolCallPiece

Event = tuple[str, dict[str, Any]]
"""Type, and what it has beside the type and its number."""
_TEXT = {
    "message": ("msg", "response.output_text", "output_text"),
    "reasoning": ("rs", "response.reasoning_text", "reasoning_text"),
}
"""Of items with a text: how ids begin, how events and the text's part are called."""


class OutputItems:
    """One response's output. At most its last item is open."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        """the open item's text or arguments"""
        self._logprobs: list[msgspec.Raw] = []
        self._is_open = False

    def feed(self, parts: AnswerDelta, logprobs: list[msgspec.Raw]) -> Iterator[Event]:
        """Take what is new, with the log-probabilities of the text's tokens."""
        if parts.reasoning:
            yield from self._add_text("reasoning", parts.reasoning, [])
        if parts.content or logprobs:
            yield from self._add_text("message", parts.content, logprobs)
        for piece in parts.calls:
            yield from self._add_call(piece)

    def end(self, is_cut: bool) -> Iterator[Event]:
        """No more comes; `is_cut`: the last item is not whole. An answer without anything is a message."""
        if not self.items:
            yield from self._add_text("message", "", [])
        yield from self._close("incomplete" if is_cut else "completed")

    def text(self, kind: str) -> str:
        """All texts of one kind of item."""
        return "".join(part["text"] for item in self.items if item["type"] == kind for part in item["content"])

    def _add_text(self, kind: str, text: str, logprobs: list[msgspec.Raw]) -> Iterator[Event]:
        prefix, event, part = _TEXT[kind]
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield self._open({"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, **own, "content": []})
            yield "response.content_part.added", {**self._position(), "content_index": 0, "part": _part(part, "", [])}
        self._pieces.append(text)
        self._logprobs += logprobs
        if text or logprobs:
            logprob_fields = {"logprobs": logprobs} if kind == "message" else {}
            yield f"{event}.delta", {**self._position(), "content_index": 0, "delta": text, **logprob_fields}

    def _add_call(self, piece: ToolCallPiece) -> Iterator[Event]:
        if piece.name:
            yield from self._close("completed")
            ids = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": f"call_{uuid.uuid4().hex}"}
            yield self._open({**ids, "name": piece.name, "arguments": ""})
        if piece.arguments:
            self._pieces.append(piece.arguments)
            yield "response.function_call_arguments.delta", {**self._position(), "delta": piece.arguments}

    def _open(self, item: dict[str, Any]) -> Event:
        item["status"] = "in_progress"
        self.items.append(item)
        self._pieces, self._logprobs, self._is_open = [], [], True
        return "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        item, text, position = self.items[-1], "".join(self._pieces), self._position()
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
