"""Request values as an error repeats them: short and valid JSON."""

from __future__ import annotations

import json
import reprlib
from typing import Any

_CHARACTERS = 200
_NAME_CHARACTERS = 64


class _JsonRepr(reprlib.Repr):
    """A short repr in JSON's notation."""

    def repr_str(self, x: str, level: int) -> str:
        """See reprlib.Repr."""
        return json.dumps(x if len(x) <= self.maxstring else f"{x[: self.maxstring]}...", ensure_ascii=False)

    def repr_bool(self, x: bool, level: int) -> str:
        """See reprlib.Repr."""
        return json.dumps(x)

    def repr_NoneType(self, x: None, level: int) -> str:  # noqa: N802 - reprlib's own form
        """See reprlib.Repr."""
        return json.dumps(x)


_short = _JsonRepr()
_short.maxstring = _short.maxother = _CHARACTERS


def error_value(value: Any) -> Any:
    """Return the value as an error may repeat it: at most 200 characters."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**53:
        return value
    if isinstance(value, float) and abs(value) < float("inf"):
        return value
    if not isinstance(value, str):
        return _encodable(_short.repr(value))[:_CHARACTERS]
    text = _encodable(value[:_CHARACTERS])
    return text if len(value) <= _CHARACTERS else f"{text}... ({len(value)} characters)"


def describe_value(value: Any) -> str:
    """Return the value for use within a sentence."""
    if value == "":
        return "an empty text"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(error_value(value))


def error_field_name(name: str) -> str:
    """Return a field name that the client chose, shortened to 64 characters."""
    text = _encodable(name[:_NAME_CHARACTERS]) or '""'
    return text if len(name) <= _NAME_CHARACTERS else f"{text}..."


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
