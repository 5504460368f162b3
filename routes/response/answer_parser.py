"""An answer's text in its parts: thought, content, calls of functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from routes.response.reasoning_parser import ReasoningParser
from routes.response.tool_call_parser import ToolCallParser, ToolCallPiece


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """New text of each kind."""

    reasoning: str
    content: str
    calls: list[ToolCallPiece]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the prompt ended, and what its answer may have."""

    thinks: bool = False
    """inside the opening of a thought"""
    continues: bool = False
    """inside the answer"""
    names: Iterable[str] = ()
    """of functions that may be called"""
    opens_with_call: bool = False
    """with the opening of a call"""
    must_call: bool = False
    """calls and nothing else, but for a thought"""
    is_constrained: bool = False
    """nothing but a text in a form, whose white space and tags are its own"""
    is_calls_or_text: bool = False
    """calls or text, but not text and then calls: the text has a form, whose strings may have anything in them"""


class AnswerParser:
    """One row's text, piece by piece, wherever the pieces cut it."""

    def __init__(self, form: AnswerFormat) -> None:
        self._parser = ReasoningParser(form.thinks, form.continues or form.opens_with_call or form.is_constrained)
        self._calls = (
            ToolCallParser(form.names, form.opens_with_call, form.must_call, form.is_calls_or_text)
            if form.names
            else None
        )

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, and the text does not end inside one."""
        return self._calls is not None and self._calls.has_calls

    @property
    def is_inside_thought(self) -> bool:
        """Whether the text ends inside a thought."""
        return self._parser.is_inside_thought

    @property
    def is_inside_call(self) -> bool:
        """Whether the text ends inside a call, or in what was opened as one."""
        return self._calls is not None and self._calls.is_inside

    def ends_inside(self, opens_with_call: bool) -> bool:
        """Whether the text ends inside what was told last: a call's arguments, or text."""
        return not opens_with_call if self._calls is None else self._calls.ends_inside(opens_with_call)

    def feed(self, text: str, final: bool) -> AnswerDelta:
        """What `text` makes certain; everything that is left with `final`."""
        reasoning_delta = self._parser.feed(text, final)
        if self._calls is None:
            return AnswerDelta(reasoning_delta.reasoning, reasoning_delta.content, [])
        parsed = self._calls.feed(reasoning_delta.content, final)
        return AnswerDelta(reasoning_delta.reasoning, parsed.content, parsed.calls)
