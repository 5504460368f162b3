"""Splits an answer's text into reasoning, content and tool calls."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from routes.response.tool_call_parser import DeltaToolCall, ToolCallParser

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


class _ParserState(enum.Enum):
    START = enum.auto()
    THOUGHT = enum.auto()
    ANSWER = enum.auto()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of each kind."""

    reasoning: str
    content: str


class ReasoningParser:
    """Parses one row's text. Any split of the text gives the same result.

    White space around reasoning and answer is dropped. Only a possible tag is scanned twice, so the work is linear in
    the length of the text.
    """

    def __init__(self, thinks: bool, keeps_space: bool = False) -> None:
        """Create the parser of one row.

        thinks: the prompt ended with `<think`, so the text begins with the end of that tag
        keeps_space: keep leading white space, because the prompt ended inside the answer or the text is constrained
        """
        self._state = _ParserState.THOUGHT if thinks else _ParserState.ANSWER if keeps_space else _ParserState.START
        self._tag_remainder = THINK_OPEN[-1] if thinks else ""
        self._at_start = not keeps_space
        self._buffer = ""
        """Text that may be part of a tag."""
        self._pending_space: list[str] = []
        """White space of a thought. It is dropped if the thought ends there."""

    @property
    def is_inside_thought(self) -> bool:
        return self._state is _ParserState.THOUGHT

    @property
    def num_held(self) -> int:
        """Length of the text that may be part of a tag."""
        return len(self._buffer)

    def feed(self, text: str, final: bool) -> ReasoningDelta:
        """Return all text that cannot change any more. With `final`, return the rest too."""
        self._buffer += text
        if self._state is _ParserState.START:
            self._start(final)
        reasoning = self._thought(final) if self._state is _ParserState.THOUGHT else ""
        content = self._answer() if self._state is _ParserState.ANSWER else ""
        return ReasoningDelta(reasoning, content)

    def _start(self, final: bool) -> None:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(THINK_OPEN):
            self._state, self._buffer = _ParserState.THOUGHT, self._buffer.removeprefix(THINK_OPEN)
        elif final or not THINK_OPEN.startswith(self._buffer):
            self._state = _ParserState.ANSWER

    def _thought(self, final: bool) -> str:
        if self._at_start and not self._begin_thought():
            return ""
        end = self._buffer.find(THINK_CLOSE)
        if end >= 0:
            thought, self._buffer = (
                self._strip_trailing_space(self._buffer[:end]),
                self._buffer[end + len(THINK_CLOSE) :],
            )
            self._state, self._at_start = _ParserState.ANSWER, True
            return thought
        safe_length = len(self._buffer) if final else _length_before_tag(self._buffer)
        thought, self._buffer = self._buffer[:safe_length], self._buffer[safe_length:]
        return "".join([*self._pending_space, thought]) if final else self._strip_trailing_space(thought)

    def _begin_thought(self) -> bool:
        """Drop the text before the thought. Return whether the thought has begun."""
        if self._buffer:
            self._buffer, self._tag_remainder = self._buffer.removeprefix(self._tag_remainder), ""
        self._buffer = self._buffer.lstrip()
        self._at_start = not self._buffer
        return not self._at_start

    def _strip_trailing_space(self, text: str) -> str:
        """Return the thought without its trailing white space. Keeps that space for the next delta."""
        stripped = text.rstrip()
        if not stripped:
            self._pending_space.append(text)
            return ""
        thought = "".join([*self._pending_space, stripped])
        self._pending_space = [text[len(stripped) :]]
        return thought

    def _answer(self) -> str:
        answer, self._buffer = self._buffer, ""
        if self._at_start:
            answer = answer.lstrip()
            self._at_start = not answer
        return answer


def _length_before_tag(text: str) -> int:
    """Return the length of the text before a possible closing tag."""
    at = text.rfind(THINK_CLOSE[0], max(0, len(text) - len(THINK_CLOSE) + 1))
    return at if at >= 0 and THINK_CLOSE.startswith(text[at:]) else len(text)


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
        """Whether the text ends inside a call, or after its opening."""
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
