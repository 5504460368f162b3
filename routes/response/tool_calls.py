"""Parts calls of functions from the text around them, piece by piece, wherever the pieces cut them."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from routes.request.toolbox import FENCE, FENCE_END, TAG, TAG_END

_CLOSINGS = {FENCE: FENCE_END, TAG: TAG_END}
_OPENING = re.compile("|".join(map(re.escape, _CLOSINGS)))
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_MARKS = re.compile(r'["\\{}\[\]]')


@dataclass(slots=True)
class CallPiece:
    """What is new of one call; its name comes once, first."""

    index: int
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Spoken:
    """New text around calls, and new pieces of calls."""

    content: str
    calls: list[CallPiece]


class _Place(enum.Enum):
    TEXT = enum.auto()
    HEAD = enum.auto()
    """behind an opening, until it is a call or none"""
    ARGUMENTS = enum.auto()
    REST = enum.auto()
    """what the call's object has behind its arguments"""
    CLOSING = enum.auto()


class ValueEnd:
    """Finds where a JSON value of brackets ends, piece by piece."""

    def __init__(self, depth: int = 0) -> None:
        """`depth`: brackets that are open already."""
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def find(self, piece: str) -> int | None:
        """How much of `piece` belongs to the value, if it ends there."""
        at = 0
        while at < len(piece):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = _MARKS.search(piece, at)
            if found is None:
                return None
            at = found.end()
            self._meet(found[0])
            if not self._depth and not self._in_string and found[0] in "}]":
                return at
        return None

    def _meet(self, mark: str) -> None:
        if mark == "\\":
            self._escaped = self._in_string
        elif mark == '"':
            self._in_string = not self._in_string
        elif not self._in_string:
            self._depth += 1 if mark in "{[" else -1


class CallParting:
    """One row's answer. White space before a call and after the last is dropped; the pieces' borders do not matter.

    What is none, or calls what is not offered, stays text. A call that the answer's end cuts is told if its name is
    whole, with as much of its arguments as there is; else it is no text either, and not told.
    """

    def __init__(
        self, names: Iterable[str], is_open: bool = False, must_call: bool = False, is_either: bool = False
    ) -> None:
        """`names`: what may be called; `is_open`: the prompt ended with FENCE, so the text begins behind it;
        `must_call`: there is no text but calls; `is_either`: an answer that does not begin with a call has none."""
        self._names = frozenset(names)
        self._must_call = must_call
        self._is_either = is_either
        self._held = ""
        self._blank = ""
        """white space that is dropped if a call comes next"""
        self._place = _Place.HEAD if is_open else _Place.TEXT
        self._opening, self._closing = "", FENCE_END
        self._end = ValueEnd()
        self._looked = 0
        """how much of what is held is known to `_end`"""
        self._has_said = False
        self._text: list[str] = []
        self._pieces: list[CallPiece] = []
        self.count = 0
        """calls that have begun"""

    @property
    def has_called(self) -> bool:
        """Whether there are calls, and the text does not end inside one."""
        return self.count > 0 and not self.is_inside

    @property
    def is_inside(self) -> bool:
        """Whether the text ends inside a call, or in what was opened as one."""
        return self._place in (_Place.HEAD, _Place.ARGUMENTS)

    def ends_inside(self, is_call: bool) -> bool:
        """Whether the text ends inside what was told last: a call's arguments, or text."""
        return self._place is (_Place.ARGUMENTS if is_call else _Place.TEXT)

    def feed(self, text: str, final: bool) -> Spoken:
        """What `text` makes certain; everything that is left with `final`."""
        self._held += text
        while self._step(final):
            pass
        if final and self._place is _Place.TEXT and not (self.count or self._must_call):
            self._text.append(self._blank)
        spoken = Spoken("".join(self._text), self._pieces)
        self._text, self._pieces = [], []
        return spoken

    def _step(self, final: bool) -> bool:
        """Work on what is held; whether there may be more to do."""
        match self._place:
            case _Place.TEXT:
                return self._read_text(final)
            case _Place.HEAD:
                return self._read_head(final)
            case _Place.ARGUMENTS:
                return self._read_arguments()
            case _Place.REST:
                return self._read_rest()
            case _Place.CLOSING:
                return self._read_closing(final)

    def _say(self, text: str) -> None:
        """Text, whose last white space waits for what follows; that at a call's end is dropped."""
        if self.count and not self._has_said:
            text = text.lstrip()
        solid = text.rstrip()
        if solid:
            self._has_said = True
            self._text += [self._blank, solid]
            self._blank = ""
        self._blank += text[len(solid) :]

    def _read_text(self, final: bool) -> bool:
        if self._has_no_call():
            self._say(self._held)
            self._held = ""
            return False
        found = _OPENING.search(self._held)
        if found is not None:
            self._say(self._held[: found.start()])
            self._held = self._held[found.end() :]
            self._place, self._opening, self._closing = _Place.HEAD, found[0], _CLOSINGS[found[0]]
            self._end, self._looked = ValueEnd(), 0
            return True
        only_calls = self._must_call or self.count  # behind a call come only more of them
        sure = len(self._held) if final and not only_calls else _before_opening(self._held)
        self._say(self._held[:sure])
        self._held = self._held[sure:]
        return False

    def _has_no_call(self) -> bool:
        """Whether an answer that is either calls or text is text, whatever its strings have in them."""
        if not self._is_either or self.count:
            return False
        begun = self._held.lstrip()
        return self._has_said or not any(one.startswith(begun) or begun.startswith(one) for one in _CLOSINGS)

    def _read_head(self, final: bool) -> bool:
        head = _HEAD.match(self._held)
        if head is not None and (name := _string(head[1])) in self._names:
            self._begin(name)
            self._held, self._place, self._end = self._held[head.end() :], _Place.ARGUMENTS, ValueEnd()
            return True
        begun = self._held.lstrip()
        if begun and begun[0] not in "{[":
            return self._is_none()
        end = self._end.find(self._held[self._looked :])
        if end is None:
            self._looked = len(self._held)
            return False
        calls = list(_calls(self._held[: self._looked + end], self._names))
        if not calls:
            return self._is_none()
        for name, arguments in calls:
            self._begin(name)
            self._pieces[-1].arguments = arguments
        self._held, self._place = self._held[self._looked + end :], _Place.CLOSING
        return True

    def _is_none(self) -> bool:
        """What was opened is text, in which a call may yet begin."""
        self._say(self._opening)
        self._place = _Place.TEXT
        return True

    def _begin(self, name: str) -> None:
        self._blank = ""
        self._pieces.append(CallPiece(self.count, name))
        self.count += 1

    def _read_arguments(self) -> bool:
        end = self._end.find(self._held)
        piece = self._held if end is None else self._held[:end]
        if piece:
            self._add(piece)
        self._held = self._held[len(piece) :]
        if end is not None:
            self._place, self._end, self._looked = _Place.REST, ValueEnd(depth=1), 0
        return end is not None

    def _add(self, arguments: str) -> None:
        if not self._pieces or self._pieces[-1].index != self.count - 1:
            self._pieces.append(CallPiece(self.count - 1))
        self._pieces[-1].arguments += arguments

    def _read_rest(self) -> bool:
        self._held = self._held if self._looked else self._held.lstrip()
        if self._held and not self._looked:
            self._looked = 1
            if self._held[0] not in ",}":  # a brace was forgotten
                self._place = _Place.CLOSING
                return True
        end = self._end.find(self._held)
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._place = _Place.CLOSING
        return end is not None

    def _read_closing(self, final: bool) -> bool:
        self._held = self._held.lstrip()
        if self._closing.startswith(self._held) and self._held != self._closing and not final:
            return False
        self._held = self._held.removeprefix(self._closing)
        self._place = _Place.TEXT
        return True


def _before_opening(text: str) -> int:
    """How much of a text cannot belong to an opening."""
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
    """Name and arguments of each call that a JSON value is; nothing if it is none, or has other things in it."""
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
    if isinstance(arguments, str):  # JSON as text, as OpenAI writes it
        return name, arguments
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
