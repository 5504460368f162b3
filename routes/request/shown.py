"""What an error may repeat of a request: short, and with a JSON form."""

from __future__ import annotations

import reprlib
from typing import Any

_CHARACTERS = 200
_NAME_CHARACTERS = 64
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _CHARACTERS


def shown(value: Any) -> Any:
    """A value as an error may repeat it."""
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


def shown_name(name: str) -> str:
    """The name of a field that the request has made up."""
    text = _encodable(name[:_NAME_CHARACTERS]) or '""'
    return text if len(name) <= _NAME_CHARACTERS else f"{text}..."


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
