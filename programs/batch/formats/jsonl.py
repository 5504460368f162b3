"""JSON Lines: one object or text per line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from programs.batch.formats.file_format import unreadable_reason
from programs.batch.inputs import Line
from programs.record import Record, json_line

MAX_DEPTH = 200
"""Maximum nesting of a line. Deeper values could be read but not written."""


class Jsonl:
    """Objects keep their fields and get one more."""

    def __init__(
        self, field: str, out_field: str, is_json: bool = False, check: Callable[[bytes], str] = lambda data: ""
    ) -> None:
        """`is_json`: answers are JSON values. `check` returns why a line must not be parsed, or ""."""
        self._check = check
        self._is_json = is_json
        self._field = field
        self._out_field = out_field

    def read(self, lines: Iterable[Line]) -> Iterator[Record]:
        """See FileFormat. Empty lines are skipped."""
        index = 0
        for line in lines:
            if not line.data.strip():
                continue
            fields, problem = self._parsed(line)
            yield Record(index, line.number, fields, problem, size=line.size)
            index += 1

    def _parsed(self, line: Line) -> tuple[dict[str, Any], str]:
        if problem := unreadable_reason(line) or self._check(line.data):
            return {}, problem
        try:
            value = json.loads(line.data)
        except (ValueError, RecursionError) as error:
            return {}, f"is not JSON: {error}"
        if isinstance(value, str):
            value = {self._field: value}
        if is_too_deep(value):
            return {}, f"has more than {MAX_DEPTH} nested lists and objects"
        if not isinstance(value, dict):
            return {}, f"must be a JSON object or a text, got {type(value).__name__}"
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            return {}, "has a lone surrogate, which UTF-8 cannot encode"
        except ValueError:
            return {}, "has a number that JSON cannot write, like NaN or one beyond 1e308"
        return value, ""

    def header(self) -> str:
        """See FileFormat."""
        return ""

    def write(self, record: Record, answer: str | None) -> str:
        """See FileFormat. A failed record is in the error file only."""
        if answer is None:
            return ""
        value = json.loads(answer) if self._is_json else answer
        return json_line({**record.fields, self._out_field: value})


def is_too_deep(value: Any) -> bool:
    """Whether a JSON value is nested deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inside = [one for one in level if isinstance(one, dict | list)]
        if not inside:
            return False
        level = [one for outer in inside for one in (outer.values() if isinstance(outer, dict) else outer)]
    return True
