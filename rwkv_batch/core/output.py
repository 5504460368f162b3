"""A row's output: its drawn tokens as bytes, judged against its stops, gathered into deltas."""

from __future__ import annotations

from bisect import bisect_right

from rwkv_batch.core.stops import StopRules
from rwkv_batch.request import Delta, Finish, FinishReason, GenerateRequest, Resumed, TokenLogprob
from rwkv_batch.tokenizer import END_OF_TEXT

WHOLE_CHUNK = 4096
"""Tokens gathered at most for a row whose text is wanted whole: nothing grows with its length here."""
LOGPROBS_CHUNK = 256
"""The same of a row with log-probabilities, which take some kilobytes a token."""


def _chunk_of(request: GenerateRequest) -> int:
    """Tokens that are gathered before a delta is sent."""
    chunk = request.chunk_size or WHOLE_CHUNK
    return chunk if request.sampling.top_logprobs is None else min(chunk, LOGPROBS_CHUNK)


class RowOutput:
    """Tokens in, deltas out. Owned by the engine thread."""

    def __init__(
        self, row: int, request: GenerateRequest, stops: StopRules, byte_table: list[bytes], tells_ids: bool = False
    ) -> None:
        self.row = row
        self._tells_ids = tells_ids
        self.tokens: list[int] = []
        """all tokens drawn, a stop token among them"""
        self._max_tokens = request.max_tokens
        self._chunk = _chunk_of(request)
        self._stop_ids = stops.ids
        self._automaton = stops.automaton
        self._node = stops.automaton.root
        self._table = byte_table
        self._ends: list[int] = []
        """end of each shown token in the row's whole text, in bytes"""
        self._length = 0
        self._tail = bytearray()
        """text that may still belong to a stop"""
        self._ready = bytearray()
        self._gathered = 0
        self._logprobs: list[tuple[int, TokenLogprob]] = []
        """of tokens not sent yet, with where each begins in the whole text"""
        self._end: TokenLogprob | None = None
        """of the end token: it was drawn and has no text"""
        self._cut: int | None = None
        """where the shown text ends, in bytes, once a stop is met"""
        if request.resumed is not None:
            self._resume(request.resumed)

    def _resume(self, resumed: Resumed) -> None:
        """Take what was drawn elsewhere, as if its text had been sent up to where it was."""
        for token in resumed.token_ids:
            self.push(token)
        # Later tokens, which are drawn again, may have shown that text held here is no stop.
        held = self._length - resumed.shown
        self._release(max(0, len(self._tail) - held))
        self._ready.clear()
        self._gathered = 0

    def push(self, token: int, logprob: TokenLogprob | None = None) -> FinishReason | None:
        """Take a drawn token; returns why the row ends with it, if it does."""
        self.tokens.append(token)
        self._gathered += 1
        if token in self._stop_ids:
            if logprob is not None and token == END_OF_TEXT:
                self._end = logprob
            self._cut = self._length
            self._release(len(self._tail))
            return FinishReason.STOP
        text = self._table[token]
        if logprob is not None:
            self._logprobs.append((self._length, logprob))
        self._node, found = self._automaton.advance(self._node, text)
        if found is None and not self._node.depth and not self._tail and len(self.tokens) < self._max_tokens:
            self._ready += text  # nothing here can belong to a stop: by far the most tokens
            self._length += len(text)
            self._ends.append(self._length)
            return None
        self._tail += text
        if found is not None:
            self._cut = self._length + found
        self._length += len(text)
        self._ends.append(self._length)
        if self._cut is not None:
            del self._tail[max(0, len(self._tail) - (self._length - self._cut)) :]
            self._release(len(self._tail))
            return FinishReason.STOP
        if len(self.tokens) >= self._max_tokens:
            self._release(len(self._tail))
            return FinishReason.LENGTH
        self._release(max(0, len(self._tail) - self._node.depth))
        return None

    def _release(self, num_bytes: int) -> None:
        self._ready += self._tail[:num_bytes]
        del self._tail[:num_bytes]

    def give_up_holding(self) -> None:
        """The row ends for a reason of its own (a timeout): held text was no stop and is shown."""
        self._release(len(self._tail))

    @property
    def is_holding(self) -> bool:
        """Whether the end of the text may turn out to be a stop that began in an earlier token."""
        return bool(self._tail)

    def first_held_token(self) -> int:
        """Index of the drawn token in which the held text begins."""
        return bisect_right(self._ends, self._length - len(self._tail))

    def shown_tokens(self) -> tuple[list[int], bytes]:
        """The drawn tokens that lie wholly before the stop, and the bytes of the next one that do."""
        if self._cut is None:
            return list(self.tokens), b""
        whole = bisect_right(self._ends, self._cut)
        start = self._ends[whole - 1] if whole else 0
        partial = b"" if start == self._cut else self._table[self.tokens[whole]][: self._cut - start]
        return self.tokens[:whole], partial

    def take_delta(self, finish: Finish | None = None) -> Delta | None:
        """What is worth sending now: a full chunk, or everything with the finish; None: not yet."""
        if finish is None and (self._gathered < self._chunk or not (self._ready or self._logprobs)):
            return None
        logprobs = self._shown_logprobs() if self._logprobs or self._end else None
        ids = self.tokens[len(self.tokens) - self._gathered :] if self._tells_ids else []
        delta = Delta(self.row, bytes(self._ready), self._gathered, finish, logprobs or None, token_ids=ids)
        self._ready.clear()
        self._gathered = 0
        return delta

    def _shown_logprobs(self) -> list[TokenLogprob]:
        """Those of tokens of which some text is shown by now; the rest waits, or belongs to a stop."""
        shown = self._length - len(self._tail) if self._cut is None else self._cut
        begun = [entry for entry in self._logprobs if entry[0] < shown]
        self._logprobs = self._logprobs[len(begun) :]
        end = () if self._end is None else (self._end,)
        return [*(logprob for _, logprob in begun), *end]
