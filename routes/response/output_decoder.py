"""Decodes the engine's bytes: one incremental UTF-8 decoder per row."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rwkv_batch.errors import ErrorInfo
from rwkv_batch.request import Finish, JobEvents, TokenLogprob

_new_decoder = codecs.getincrementaldecoder("utf-8")


class RowDecoder:
    """Decodes the text of one row. Characters stay whole; invalid bytes become U+FFFD."""

    def __init__(self, opening: str = "", strip: bool = False, echoed: bytes = b"") -> None:
        """Create the decoder of one row.

        opening: text of the prompt that belongs to the answer
        strip: drop leading white space
        echoed: the whole prompt, if the answer repeats it; it may end inside a character
        """
        self._decoder = _new_decoder("replace")
        self._opening = opening + self._decoder.decode(echoed)
        self._waits_for_text = not echoed
        self._strip = strip

    def feed(self, piece: bytes, final: bool) -> str:
        """Return the text that `piece` completes."""
        text = self._decoder.decode(piece, final)
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        if self._opening and (text or final or not self._waits_for_text):
            text, self._opening = self._opening + text, ""
        return text


@dataclass(slots=True)
class RowUpdate:
    """New output of one row."""

    row: int
    text: str = ""
    num_tokens: int = 0
    finish: Finish | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class OutputDecoder:
    """Decodes a job's events into one update per row. Events of several steps are merged."""

    def __init__(self, num_rows: int, opening: str = "", strip: bool = False, echoed: Sequence[bytes] = ()) -> None:
        """See RowDecoder; `echoed` has one entry per row, or none."""
        self._row_decoders = [RowDecoder(opening, strip, echo) for echo in echoed or [b""] * num_rows]
        self.error: ErrorInfo | None = None

    def read(self, batch: Iterable[JobEvents]) -> list[RowUpdate]:
        """Return the updates in order of each row's first delta. A job's error is stored in `error`."""
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
