"""Splits an answer's text into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from routes.response.reasoning_parser import ReasoningParser
from routes.response.tool_call_parser import DeltaToolCall, ToolCallParser


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """New text of each kind."""

    reasoning: str
    content: str
    calls: list[DeltaToolCall]
    content_spans: Sequence[tuple[int, int]] = ()
    """Where the pieces of `content` lie in the row's text: start and end, in characters."""
    num_parsed: int = 0
    """Length of the row's text that cannot become content any more, or is in a span already."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Where the prompt ended, and what its answer may contain."""

    thinks: bool = False
    """The prompt ended inside the opening tag of a thought."""
    continues: bool = False
    """The prompt ended inside the answer."""
    names: Iterable[str] = ()
    """Names of the functions that may be called."""
    opens_with_call: bool = False
    """The prompt ended with the opening of a call."""
    must_call: bool = False
    """The answer has calls only, except for a thought."""
    is_constrained: bool = False
    """The answer is constrained text without calls: its white space and tags are kept."""
    is_calls_or_constrained: bool = False
    """The answer is either calls or constrained text, whose strings may look like calls."""


class AnswerParser:
    """Parses one row's text incrementally. Any split of the text gives the same result."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        keeps_space = answer_format.continues or answer_format.opens_with_call or answer_format.is_constrained
        self._parser = ReasoningParser(answer_format.thinks, keeps_space)
        self._calls = (
            ToolCallParser(
                answer_format.names,
                answer_format.opens_with_call,
                answer_format.must_call,
                answer_format.is_calls_or_constrained,
            )
            if answer_format.names
            else None
        )
        self._num_fed = 0
        """Length of the row's text."""

    @property
    def has_calls(self) -> bool:
        """Whether there are calls and the text does not end inside one."""
        return self._calls is not None and self._calls.has_calls

    @property
    def is_inside_thought(self) -> bool:
        return self._parser.is_inside_thought

    @property
    def is_inside_call(self) -> bool:
        """Whether the text ends inside a call, or after the opening of one."""
        return self._calls is not None and self._calls.is_inside

    def ends_inside(self, is_call: bool) -> bool:
        """Return whether the text ends inside the last delta's kind: a call's arguments if `is_call`, else text."""
        return not is_call if self._calls is None else self._calls.ends_inside(is_call)

    def feed(self, text: str, final: bool) -> AnswerDelta:
        """Return all text that cannot change any more. With `final`, return the rest too."""
        self._num_fed += len(text)
        parts = self._parser.feed(text, final)
        num_parsed = self._num_fed - self._parser.num_held
        # The reasoning parser's content is everything from its start on.
        if self._calls is None:
            spans = [(num_parsed - len(parts.content), num_parsed)] if parts.content else []
            return AnswerDelta(parts.reasoning, parts.content, [], spans, num_parsed)
        parsed = self._calls.feed(parts.content, final)
        first = num_parsed - self._calls.num_fed
        spans = [(first + start, first + end) for start, end in parsed.spans]
        return AnswerDelta(parts.reasoning, parsed.content, parsed.calls, spans, num_parsed - self._calls.num_held)
