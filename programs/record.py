"""One line of the input, whatever its form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class LineError(Exception):
    """This line alone cannot be answered; the message says why."""


class RunError(Exception):
    """The run cannot begin or go on: one line that names the thing and the remedy."""


@dataclass(slots=True)
class Record:
    """A line that is to be answered, or written as it is."""

    index: int
    """Counts from 0 through the whole input, whatever shard this is."""
    line: int
    """Where it begins in the input, from 1."""
    fields: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why it cannot be read; "" if it can."""
    verbatim: str | None = None
    """Text that is passed on as it is: nothing to be answered."""
    size: int = 0
    """Bytes in the input."""
    cue_header: str = ""
    """What stands before the text in the output: a cue's number and time."""
