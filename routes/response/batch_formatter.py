"""The batch format: one object with one choice per row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from routes.request.bodies import GenerationBody
from routes.response.event_stream import DecodedRow
from routes.response.generate import ResponseFormatter
from routes.response.http_response import OPENAI_ERRORS, error_body, sse
from rwkv_batch.request import Finish


def usage(finishes: Sequence[Finish | None], n: int = 1) -> dict[str, Any]:
    """Return OpenAI's usage object, summed over rows. The prompt of `n` continuations counts once."""
    ends = [end for end in finishes if end is not None]
    read = [end for end in finishes[::n] if end is not None]
    prompt = sum(end.prompt_tokens for end in read)
    completion = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in read)},
    }


class BatchFormatter(ResponseFormatter):
    """Writes the batch format.

    OpenAI's clients may send conversations. So their chunks have an id and one choice each, because these clients read
    only the first choice, and their errors have OpenAI's format.
    """

    def __init__(self, body: GenerationBody, object_name: str = "chat.completion", answer_id: str = "") -> None:
        head = {"object": object_name, "created": int(time.time()), "model": body.model}
        self._whole_head = {"id": answer_id or "rwkv7-batch", **head}
        self._chunk_head: dict[str, Any] = {"object": f"{object_name}.chunk"}
        if answer_id:
            self._chunk_head = {**self._whole_head, **self._chunk_head}
            self.error_format = OPENAI_ERRORS
        self._has_one_choice = bool(answer_id)
        self._includes_usage = body.includes_usage
        self._finishes: list[Finish] = []

    def chunk(self, updates: list[DecodedRow]) -> bytes:
        choices: list[dict[str, Any]] = []
        for row in updates:
            if row.text:
                choices.append({"index": row.row, "delta": {"content": row.text}})
            if row.finish is not None:
                self._finishes.append(row.finish)
                choices.append({"index": row.row, "delta": {}, "finish_reason": row.finish.reason})
        if self._has_one_choice:
            return b"".join(self._chunk_event([choice]) for choice in choices)
        return self._chunk_event(choices) if choices else b""

    def _chunk_event(self, choices: list[dict[str, Any]]) -> bytes:
        return sse(self.first_with_warnings({**self._chunk_head, "choices": choices}))

    def stream_end(self) -> bytes:
        if not self._includes_usage:
            return b""
        return sse({**self._chunk_head, "choices": [], "usage": usage(self._finishes)})

    def full_body(self, rows: list[DecodedRow]) -> Any:
        choices = [_choice(index, row) for index, row in enumerate(rows)]
        return {**self._whole_head, "choices": choices, "usage": usage([row.finish for row in rows])}


def _choice(index: int, row: DecodedRow) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "message": {"role": "assistant", "content": row.text}}
    choice["finish_reason"] = row.finish.reason if row.finish is not None else "error"
    if row.finish is not None and row.finish.error is not None:
        choice |= error_body(row.finish.error)
    return choice
