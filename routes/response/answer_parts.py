"""An answer's text in its parts: thought, content, calls of functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from routes.response.reasoning import Parting
from routes.response.tool_calls import CallParting, CallPiece


@dataclass(frozen=True, slots=True)
class Parts:
    """New text of each kind."""

    reasoning: str
    content: str
    calls: list[CallPiece]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the prompt ended, and what its answer may have."""

    thinks: bool = False
    """inside the opening of a thought"""
    continues: bool = False
    """inside the answer"""
    names: Iterable[str] = ()
    """of functions that may be called"""
    is_call: bool = False
    """with the opening of a call"""
    must_call: bool = False
    """calls and nothing else, but for a thought"""
    is_exact: bool = False
    """nothing but a text in a form, whose white space and tags are its own"""
    is_either: bool = False
    """calls or text, but not text and then calls: the text has a form, whose strings may have anything in them"""


class AnswerParting:
    """One row's text, piece by piece, wherever the pieces cut it."""

    def __init__(self, form: AnswerForm) -> None:
        self._parting = Parting(form.thinks, form.continues or form.is_call or form.is_exact)
        self._calls = CallParting(form.names, form.is_call, form.must_call, form.is_either) if form.names else None

    @property
    def has_called(self) -> bool:
        """Whether there are calls, and the text does not end inside one."""
        return self._calls is not None and self._calls.has_called

    @property
    def is_inside_thought(self) -> bool:
        """Whether the text ends inside a thought."""
        return self._parting.is_inside_thought

    @property
    def is_inside_call(self) -> bool:
        """Whether the text ends inside a call, or in what was opened as one."""
        return self._calls is not None and self._calls.is_inside

    def ends_inside(self, is_call: bool) -> bool:
        """Whether the text ends inside what was told last: a call's arguments, or text."""
        return not is_call if self._calls is None else self._calls.ends_inside(is_call)

    def feed(self, text: str, final: bool) -> Parts:
        """What `text` makes certain; everything that is left with `final`."""
        parted = self._parting.feed(text, final)
        if self._calls is None:
            return Parts(parted.reasoning, parted.content, [])
        spoken = self._calls.feed(parted.content, final)
        return Parts(parted.reasoning, spoken.content, spoken.calls)
