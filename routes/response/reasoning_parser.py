"""Parts a thought from the answer after it, piece by piece, wherever the pieces cut the tags."""

from __future__ import annotations

import enum
from dataclasses import dataclass

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


class _ParserState(enum.Enum):
    START = enum.auto()
    THOUGHT = enum.auto()
    ANSWER = enum.auto()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of either kind."""

    reasoning: str
    content: str


class ReasoningParser:
    """One row's text. The white space around thought and answer is dropped; the pieces' borders do not matter.

    What is kept from one piece to the next is looked at once more only as far as it may be a tag, so the work grows
    with the text however it is cut.
    """

    def __init__(self, thinks: bool, continues: bool = False) -> None:
        """`thinks`: the prompt ended with `<think`, so the text begins with the end of that tag.

        continues: the prompt ended inside the answer, whose white space is its own, or the answer is held to a form.
        """
        self._state = _ParserState.THOUGHT if thinks else _ParserState.ANSWER if continues else _ParserState.START
        self._tag_remainder = THINK_OPEN[-1] if thinks else ""
        self._at_start = not continues
        self._buffer = ""
        """what may still turn out to be a tag"""
        self._pending_space: list[str] = []
        """white space of a thought, which is dropped if the thought ends with it"""

    @property
    def is_inside_thought(self) -> bool:
        """Whether the text ends inside a thought."""
        return self._state is _ParserState.THOUGHT

    def feed(self, text: str, final: bool) -> ReasoningDelta:
        """What `text` makes certain; everything that is left with `final`."""
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
        """Drop what stands before the thought; whether it has begun."""
        if self._buffer:
            self._buffer, self._tag_remainder = self._buffer.removeprefix(self._tag_remainder), ""
        self._buffer = self._buffer.lstrip()
        self._at_start = not self._buffer
        return not self._at_start

    def _strip_trailing_space(self, text: str) -> str:
        """The thought up to the white space at its end, which waits for what follows."""
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
    """How much of a thought cannot belong to the closing tag."""
    at = text.rfind(THINK_CLOSE[0], max(0, len(text) - len(THINK_CLOSE) + 1))
    return at if at >= 0 and THINK_CLOSE.startswith(text[at:]) else len(text)
