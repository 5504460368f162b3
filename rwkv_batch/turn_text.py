"""Texts of turns. A blank line ends a turn, so no turn has one."""

from __future__ import annotations

import re

_NEWLINES = re.compile(r"\n{2,}")


def collapse_newlines(text: str) -> str:
    return _NEWLINES.sub("\n", text.replace("\r\n", "\n").replace("\r", "\n"))


def format_turn(text: str) -> str:
    """Return a turn without blank lines and without newlines at its ends."""
    return collapse_newlines(text).strip("\n")
