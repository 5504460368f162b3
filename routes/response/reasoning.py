"""Parts a thought from the answer after it, piece by piece, wherever the pieces cut the tags."""

from __future__ import annotations

import enum
from dataclasses import dataclass

OPEN = "<think>"
CLOSE = "</think>"


class _Place(enum.Enum):
    START = enum.auto()
    THOUGHT = enum.auto()
    ANSWER = enum.auto()


@dataclass(frozen=True, slots=True)
class Parted:
    """New text of either kind."""

    reasoning: str
    content: str


class Parting:
    """One row's text. The white space around thought and answer is dropped; the pieces' borders do not matter.

    What is kept from one piece to the next is looked at once more only as far as it may be a tag, so the work grows
    with the text however it is cut.
    """

    def __init__(self, thinks: bool, continues: bool = False) -> None:
        """`thinks`: the prompt ended with `<think`, so the text begins with the end of that tag.

        continues: the prompt ended inside the answer, whose white space is its own, or the answer is held to a form.
        """
        self._place = _Place.THOUGHT if thinks else _Place.ANSWER if continues else _Place.START
        self._rest_of_tag = OPEN[-1] if thinks else ""
        self._at_start = not continues
        self._held = ""
        """what may still turn out to be a tag"""
        self._blank: list[str] = []
        """white space of a thought, which is dropped if the thought ends with it"""

    @property
    def is_inside_thought(self) -> bool:
        """Whether the text ends inside a thought."""
        return self._place is _Place.THOUGHT

    def feed(self, text: str, final: bool) -> Parted:
        """What `text` makes certain; everything that is left with `final`."""
        self._held += text
        if self._place is _Place.START:
            self._start(final)
        reasoning = self._thought(final) if self._place is _Place.THOUGHT else ""
        content = self._answer() if self._place is _Place.ANSWER else ""
        return Parted(reasoning, content)

    def _start(self, final: bool) -> None:
        self._held = self._held.lstrip()
        if self._held.startswith(OPEN):
            self._place, self._held = _Place.THOUGHT, self._held.removeprefix(OPEN)
        elif final or not OPEN.startswith(self._held):
            self._place = _Place.ANSWER

    def _thought(self, final: bool) -> str:
        if self._at_start and not self._begin_thought():
            return ""
        end = self._held.find(CLOSE)
        if end >= 0:
            thought, self._held = self._solid(self._held[:end]), self._held[end + len(CLOSE) :]
            self._place, self._at_start = _Place.ANSWER, True
            return thought
        sure = len(self._held) if final else _before_tag(self._held)
        thought, self._held = self._held[:sure], self._held[sure:]
        return "".join([*self._blank, thought]) if final else self._solid(thought)

    def _begin_thought(self) -> bool:
        """Drop what stands before the thought; whether it has begun."""
        if self._held:
            self._held, self._rest_of_tag = self._held.removeprefix(self._rest_of_tag), ""
        self._held = self._held.lstrip()
        self._at_start = not self._held
        return not self._at_start

    def _solid(self, text: str) -> str:
        """The thought up to the white space at its end, which waits for what follows."""
        solid = text.rstrip()
        if not solid:
            self._blank.append(text)
            return ""
        thought = "".join([*self._blank, solid])
        self._blank = [text[len(solid) :]]
        return thought

    def _answer(self) -> str:
        answer, self._held = self._held, ""
        if self._at_start:
            answer = answer.lstrip()
            self._at_start = not answer
        return answer


def _before_tag(text: str) -> int:
    """How much of a thought cannot belong to the closing tag."""
    at = text.rfind(CLOSE[0], max(0, len(text) - len(CLOSE) + 1))
    return at if at >= 0 and CLOSE.startswith(text[at:]) else len(text)
