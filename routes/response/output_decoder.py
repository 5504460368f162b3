"""From the engine's bytes to text: one incremental UTF-8 decoder per row, and updates merged per row."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rwkv_batch.errors import ErrorInfo
from rwkv_batch.request import Finish, JobEvents, TokenLogprob

_new_decoder = codecs.getincrementaldecoder("utf-8")


class RowDecoder:
    """Text of one row, never cut inside a character; what can never become one is shown as U+FFFD."""

    def __init__(self, opening: str = "", strip: bool = False, echoed: bytes = b"") -> None:
        """`opening` is text of the prompt that belongs to the answer; `strip` drops leading white space.

        echoed: the whole prompt, which the answer repeats, perhaps from inside a character on.
        """
        self._decoder = _new_decoder("replace")
        self._opening = opening + self._decoder.decode(echoed)
        self._waits_for_text = not echoed
        self._strip = strip

    def feed(self, piece: bytes, final: bool) -> str:
        """The text that `piece` completes."""
        text = self._decoder.decode(piece, final)
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        if self._opening and (text or final or not self._waits_for_text):
            text, self._opening = self._opening + text, ""
        return text


@dataclass(slots=True)
class RowUpdate:
    """What is new of one row."""

    row: int
    text: str = ""
    num_tokens: int = 0
    finish: Finish | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class OutputDecoder:
    """WakeUps a job's events into updates per row, several steps at once if they have waited."""

    def __init__(self, num_rows: int, opening: str = "", strip: bool = False, echoed: Sequence[bytes] = ()) -> None:
        """See RowText; `echoed`: each row's, or nothing."""
        self._row_decoders = [RowDecoder(opening, strip, echo) for echo in echoed or [b""] * num_rows]
        self.error: ErrorInfo | None = None

    def read(self, batch: Iterable[JobEvents]) -> list[RowUpdate]:
        """Updates of the rows that have any, in order of their first delta. A failure of the job stays in `error`."""
        pieces: dict[int, list[bytes]] = {}
        updates: dict[int, RowUpdate] = {}
        for events in batch:
            self.error = events.error or self.error
            for delta in events.deltas:
                row = updates.setdefault(delta.row, RowUpdate(delta.row))
                pieces.setdefault(delta.row, []).append(delta.text)
                row.num_tokens += delta.num_tokens
                row.finish = delta.finish or row.finish
                row.logprobs += delta.logprobs or ()
                row.prompt_logprobs += delta.prompt_logprobs or ()
        for index, row in updates.items():
            row.text = self._row_decoders[index].feed(b"".join(pieces[index]), row.finish is not None)
        return list(updates.values())
