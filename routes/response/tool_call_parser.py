"""Splits tool calls from text incrementally."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from routes.request.tools import FENCE, FENCE_END, TAG, TAG_END

_CLOSINGS = {FENCE: FENCE_END, TAG: TAG_END}
_OPENING = re.compile("|".join(map(re.escape, _CLOSINGS)))
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_MARKS = re.compile(r'["\\{}\[\]]')


@dataclass(slots=True)
class DeltaToolCall:
    """New output of one call. Its first delta has the name."""

    index: int
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """New text around calls, and new deltas of calls."""

    content: str
    calls: list[DeltaToolCall]
    spans: list[tuple[int, int]]
    """Where the pieces of `content` lie in the fed text: start and end, in characters."""


class _ParserState(enum.Enum):
    TEXT = enum.auto()
    HEAD = enum.auto()
    """After an opening, until its text is known to be a call or not."""
    ARGUMENTS = enum.auto()
    REST = enum.auto()
    """After the arguments, until the end of the call's object."""
    CLOSING = enum.auto()


class JsonEndFinder:
    """Finds the end of a JSON object or array, incrementally."""

    def __init__(self, depth: int = 0) -> None:
        """`depth`: number of open brackets before the text."""
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def find(self, piece: str) -> int | None:
        """Return the length of the value's part in `piece`, or None. None means that the value does not end there."""
        at = 0
        while at < len(piece):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = _MARKS.search(piece, at)
            if found is None:
                return None
            at = found.end()
            self._process_mark(found[0])
            if not self._depth and not self._in_string and found[0] in "}]":
                return at
        return None

    def _process_mark(self, mark: str) -> None:
        if mark == "\\":
            self._escaped = self._in_string
        elif mark == '"':
            self._in_string = not self._in_string
        elif not self._in_string:
            self._depth += 1 if mark in "{[" else -1


class ToolCallParser:
    """Parses one row's text. Any split of the text gives the same result.

    White space before a call and after the last call is dropped. A call that is invalid, or of an unknown function,
    stays text. A call cut off by the end of the answer is returned if its name is complete. Otherwise it is dropped.
    """

    def __init__(
        self,
        names: Iterable[str],
        is_open: bool = False,
        must_call: bool = False,
        is_calls_or_constrained: bool = False,
    ) -> None:
        """Create the parser of one row.

        names: functions that may be called
        is_open: the prompt ended with FENCE, so the text begins after it
        must_call: all text is calls
        is_calls_or_constrained: an answer that does not begin with a call has no calls
        """
        self._names = frozenset(names)
        self._must_call = must_call
        self._is_either = is_calls_or_constrained
        self._buffer = ""
        self._pending_space = ""
        """White space that is dropped if a call comes next."""
        self._state = _ParserState.HEAD if is_open else _ParserState.TEXT
        self._opening, self._closing = "", FENCE_END
        self._end = JsonEndFinder()
        self._scanned = 0
        """Length of the part of `_buffer` that `_end` has seen."""
        self._has_text = False
        self._text: list[str] = []
        self._spans: list[tuple[int, int]] = []
        self.num_fed = 0
        """Length of the fed text. The buffer is its end."""
        self._pieces: list[DeltaToolCall] = []
        self.count = 0
        """Number of calls that have begun."""

    @property
    def has_calls(self) -> bool:
        """Whether there are calls and the text does not end inside one."""
        return self.count > 0 and not self.is_inside

    @property
    def is_inside(self) -> bool:
        """Whether the text ends inside a call, or after its opening."""
        return self._state in (_ParserState.HEAD, _ParserState.ARGUMENTS)

    def ends_inside(self, is_call: bool) -> bool:
        """Return whether the text ends inside the last delta's kind: a call's arguments if `is_call`, else text."""
        return self._state is (_ParserState.ARGUMENTS if is_call else _ParserState.TEXT)

    @property
    def num_held(self) -> int:
        """Length of the undecided text at the end. It may become content or part of a call."""
        opening = self._opening if self._state is _ParserState.HEAD else ""
        return len(self._pending_space) + len(opening) + len(self._buffer)

    def feed(self, text: str, final: bool) -> ParsedDelta:
        """Return all text that cannot change any more. With `final`, return the rest too."""
        self._buffer += text
        self.num_fed += len(text)
        while self._step(final):
            pass
        if final and self._state is _ParserState.TEXT and not (self.count or self._must_call):
            self._emit(self._pending_space, self.num_fed - len(self._buffer))
        parsed = ParsedDelta("".join(self._text), self._pieces, self._spans)
        self._text, self._pieces, self._spans = [], [], []
        return parsed

    def _emit(self, text: str, end: int) -> None:
        """Add content that ends at `end` of the fed text."""
        if text:
            self._text.append(text)
            self._spans.append((end - len(text), end))

    def _step(self, final: bool) -> bool:
        """Process the buffer. Return whether there may be more to do."""
        match self._state:
            case _ParserState.TEXT:
                return self._read_text(final)
            case _ParserState.HEAD:
                return self._read_head()
            case _ParserState.ARGUMENTS:
                return self._read_arguments()
            case _ParserState.REST:
                return self._read_rest()
            case _ParserState.CLOSING:
                return self._read_closing(final)

    def _add_text(self, text: str, end: int) -> None:
        """Add text that ends at `end` of the fed text.

        Trailing white space waits for the next text. White space after a call is dropped.
        """
        if self.count and not self._has_text:
            text = text.lstrip()
        stripped = text.rstrip()
        if stripped:
            self._has_text = True
            self._emit(self._pending_space + stripped, end - len(text) + len(stripped))
            self._pending_space = ""
        self._pending_space += text[len(stripped) :]

    def _read_text(self, final: bool) -> bool:
        if self._has_no_call():
            self._take_text(len(self._buffer))
            return False
        found = _OPENING.search(self._buffer)
        if found is not None:
            self._take_text(found.start())
            self._buffer = self._buffer[len(found[0]) :]
            self._state, self._opening, self._closing = _ParserState.HEAD, found[0], _CLOSINGS[found[0]]
            self._end, self._scanned = JsonEndFinder(), 0
            return True
        only_calls = self._must_call or self.count  # after a call, only further calls may follow
        safe_length = len(self._buffer) if final and not only_calls else _length_before_opening(self._buffer)
        self._take_text(safe_length)
        return False

    def _take_text(self, length: int) -> None:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        self._add_text(text, self.num_fed - len(self._buffer))

    def _has_no_call(self) -> bool:
        """Return whether the answer has turned out to be text. Only for an answer of either calls or text."""
        if not self._is_either or self.count:
            return False
        begun = self._buffer.lstrip()
        return self._has_text or not any(one.startswith(begun) or begun.startswith(one) for one in _CLOSINGS)

    def _read_head(self) -> bool:
        head = _HEAD.match(self._buffer)
        if head is not None and (name := _string(head[1])) in self._names:
            self._start_call(name)
            self._buffer, self._state, self._end = self._buffer[head.end() :], _ParserState.ARGUMENTS, JsonEndFinder()
            return True
        begun = self._buffer.lstrip()
        if begun and begun[0] not in "{[":
            return self._revert_to_text()
        end = self._end.find(self._buffer[self._scanned :])
        if end is None:
            self._scanned = len(self._buffer)
            return False
        calls = list(_calls(self._buffer[: self._scanned + end], self._names))
        if not calls:
            return self._revert_to_text()
        for name, arguments in calls:
            self._start_call(name)
            self._pieces[-1].arguments = arguments
        self._buffer, self._state = self._buffer[self._scanned + end :], _ParserState.CLOSING
        return True

    def _revert_to_text(self) -> bool:
        """Treat the opening as text. A call may still begin in the text after it."""
        self._add_text(self._opening, self.num_fed - len(self._buffer))
        self._state = _ParserState.TEXT
        return True

    def _start_call(self, name: str) -> None:
        self._pending_space = ""
        self._pieces.append(DeltaToolCall(self.count, name))
        self.count += 1

    def _read_arguments(self) -> bool:
        end = self._end.find(self._buffer)
        piece = self._buffer if end is None else self._buffer[:end]
        if piece:
            self._add_arguments(piece)
        self._buffer = self._buffer[len(piece) :]
        if end is not None:
            self._state, self._end, self._scanned = _ParserState.REST, JsonEndFinder(depth=1), 0
        return end is not None

    def _add_arguments(self, arguments: str) -> None:
        if not self._pieces or self._pieces[-1].index != self.count - 1:
            self._pieces.append(DeltaToolCall(self.count - 1))
        self._pieces[-1].arguments += arguments

    def _read_rest(self) -> bool:
        self._buffer = self._buffer if self._scanned else self._buffer.lstrip()
        if self._buffer and not self._scanned:
            self._scanned = 1
            if self._buffer[0] not in ",}":  # the closing brace is missing
                self._state = _ParserState.CLOSING
                return True
        end = self._end.find(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._state = _ParserState.CLOSING
        return end is not None

    def _read_closing(self, final: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._closing.startswith(self._buffer) and self._buffer != self._closing and not final:
            return False
        self._buffer = self._buffer.removeprefix(self._closing)
        self._state = _ParserState.TEXT
        return True


def _length_before_opening(text: str) -> int:
    """Return the length of the part that cannot belong to an opening."""
    for length in range(min(len(text), len(TAG) - 1), 0, -1):
        if any(opening.startswith(text[-length:]) for opening in _CLOSINGS):
            return len(text) - length
    return len(text)


def _string(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return ""


def _calls(text: str, names: frozenset[str]) -> Iterable[tuple[str, str]]:
    """Yield name and arguments of each call in a JSON value. Nothing if any entry is not a valid call."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    found = [_call(one, names) for one in (value if isinstance(value, list) else [value])]
    if None not in found:
        yield from (call for call in found if call is not None)


def _call(value: Any, names: frozenset[str]) -> tuple[str, str] | None:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # JSON as text, as in OpenAI's format
        return name, arguments
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
