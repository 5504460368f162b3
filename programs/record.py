"""One record of the input, in any file format."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rwkv_batch.line_breaks import escape_line_breaks


class LineError(Exception):
    """One line cannot be answered. The message says why."""


class RunError(Exception):
    """The run cannot start or continue. The message is one line with cause and remedy."""


@dataclass(slots=True)
class Record:
    """A line to answer, or to copy unchanged."""

    index: int
    """Index in the whole input from 0, in every shard."""
    line: int
    """Line number in the input, from 1."""
    fields: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why the line is invalid, or ""."""
    verbatim: str | None = None
    """Text to copy unchanged, or None."""
    size: int = 0
    """Size in the input in bytes."""


def json_line(value: Any) -> str:
    """Returns the value as one line of JSON. Characters without a UTF-8 form become escapes."""
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")
    return escape_line_breaks(data).decode() + "\n"
