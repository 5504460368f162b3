"""Escapes Unicode's line breaks in JSON.

JSON may contain these characters. But readers such as Python's `splitlines` and httpx split lines at them, and so
would split an event. They only occur inside strings, where an escape is equivalent.
"""

from __future__ import annotations

_ESCAPES = [(character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\u0085\u2028\u2029"]


def escape_line_breaks(json: bytes) -> bytes:
    for character, escape in _ESCAPES:
        json = json.replace(character, escape)
    return json
