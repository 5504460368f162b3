"""A row's output: stop rules, sampled tokens as bytes, deltas.

`StopAutomaton` finds any of many stop strings. Its cost per byte does not depend on their number (Aho and Corasick,
1975). Rows with the same stops share an automaton.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable

import msgspec

from rwkv_batch.request import Delta, Finish, FinishReason, GenerateRequest, Resumed, TokenLogprob
from rwkv_batch.tokenizer import END_OF_TEXT


class Node:
    """A state of the automaton: the longest suffix of the text that is a prefix of a stop."""

    __slots__ = ("children", "depth", "longest")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        """length of that prefix in bytes"""
        self.longest = 0
        """length of the longest stop that ends here; 0: none"""
        self.children: dict[int, Node | range] = {}
        """by the next byte; a range of the sorted stops until the node is created"""


class StopAutomaton:
    """Finds a set of byte strings in streams. Nodes are created when texts reach them.

    Engine thread only. Each row keeps its `Node`.
    """

    def __init__(self, strings: Iterable[bytes]) -> None:
        self._strings = sorted({string for string in strings if string})
        # A field of the nodes would create reference cycles, which only the garbage collector frees.
        self._fallbacks: dict[Node, Node] = {}
        """by node, except the root: its longest proper suffix that is a prefix of a stop"""
        self.root = self._node(0, range(len(self._strings)))
        self.first_bytes = bytes(self.root.children)

    def shortest_at_start(self, text: bytes) -> bytes:
        """Return the shortest stop that the text begins with, or b""."""
        return shortest_start(self._strings, text)

    def advance(self, node: Node, piece: bytes) -> tuple[Node, int | None]:
        """Read a piece of text. Returns the next node, and the start of the earliest stop ending in the piece.

        The start is a byte offset in `piece`, negative if the stop began before it. None: no stop ends here.
        """
        if node is self.root and len(piece.translate(None, self.first_bytes)) == len(piece):
            return node, None
        found: int | None = None
        for end, byte in enumerate(piece, 1):
            node = self._step(node, byte)
            if node.longest and (found is None or end - node.longest < found):
                found = end - node.longest
        return node, found

    def _step(self, node: Node, byte: int) -> Node:
        while byte not in node.children:
            if node is self.root:
                return node
            node = self._fallbacks[node]
        child = node.children[byte]
        return self._grow(node, byte, child) if isinstance(child, range) else child

    def _grow(self, parent: Node, byte: int, stops: range) -> Node:
        """Create the child that these stops share.

        All its ancestors exist, so recursion is limited by a stop's length.
        """
        child = parent.children[byte] = self._node(parent.depth + 1, stops)
        fallback = self.root if parent is self.root else self._step(self._fallbacks[parent], byte)
        self._fallbacks[child] = fallback
        child.longest = child.longest or fallback.longest
        return child

    def _node(self, depth: int, stops: range) -> Node:
        node = Node(depth)
        start = stops.start
        for index in stops:
            string = self._strings[index]
            if len(string) == depth:
                node.longest = depth
                start = index + 1
            elif index + 1 == stops.stop or self._strings[index + 1][depth] != string[depth]:
                node.children[string[depth]] = range(start, index + 1)
                start = index + 1
        return node


def shortest_start(strings: Iterable[bytes], text: bytes) -> bytes:
    """Return the shortest string that the text begins with, or b""."""
    return min((string for string in strings if text.startswith(string)), key=len, default=b"")


class StopRules:
    """Ends of a row's text: token ids, and byte strings at any position."""

    def __init__(self, request: GenerateRequest, byte_table: list[bytes]) -> None:
        ids = set(request.stop_ids)
        if request.ignore_eos:
            ids.discard(END_OF_TEXT)
        else:
            ids.add(END_OF_TEXT)
        self.ids = frozenset(ids)
        # A blank line may span two tokens ("。\n" + "\n"), so a stop token of newlines only is also matched as text.
        newline_stops = {byte_table[i] for i in ids if len(byte_table[i]) > 1 and not byte_table[i].strip(b"\n")}
        self.automaton = StopAutomaton(newline_stops | set(request.stop_strings))


class StopRulesCache:
    def __init__(self, byte_table: list[bytes]) -> None:
        self._byte_table = byte_table
        self._rules: weakref.WeakValueDictionary[object, StopRules] = weakref.WeakValueDictionary()

    def build(self, request: GenerateRequest) -> StopRules:
        """Return the rules of a request. They are cached while a running row uses them."""
        key = (request.ignore_eos, frozenset(request.stop_ids), frozenset(request.stop_strings))
        rules = self._rules.get(key)
        if rules is None:
            rules = self._rules[key] = StopRules(request, self._byte_table)
        return rules


MAX_CHUNK_TOKENS = 4096
"""Maximum tokens per delta for a row that does not stream. It bounds the memory per row."""
MAX_LOGPROBS_CHUNK_TOKENS = 256
"""The same with log-probabilities, which take some kilobytes per token."""


def _chunk_of(request: GenerateRequest) -> int:
    chunk = request.chunk_size or MAX_CHUNK_TOKENS
    return chunk if request.sampling.top_logprobs is None else min(chunk, MAX_LOGPROBS_CHUNK_TOKENS)


class RowOutput:
    """Turns tokens into deltas. Owned by the engine's thread."""

    __slots__ = (
        "_automaton",
        "_byte_table",
        "_chunk",
        "_eos_logprob",
        "_held_text",
        "_include_stop",
        "_logprobs",
        "_max_tokens",
        "_min_tokens",
        "_node",
        "_num_unsent",
        "_ready",
        "_return_token_ids",
        "_shown_end",
        "_stop_first_bytes",
        "_stop_ids",
        "_token_ends",
        "row",
        "tokens",
    )

    def __init__(
        self,
        row: int,
        request: GenerateRequest,
        stops: StopRules,
        byte_table: list[bytes],
        return_token_ids: bool = False,
    ) -> None:
        self.row = row
        self._return_token_ids = return_token_ids
        self.tokens: list[int] = []
        """all sampled tokens, including a stop token"""
        self._max_tokens = request.max_tokens
        filters = request.sampling.filters
        self._min_tokens = 0 if filters is None else filters.min_tokens
        self._include_stop = request.include_stop
        self._chunk = _chunk_of(request)
        self._stop_ids = stops.ids
        self._automaton = stops.automaton
        self._stop_first_bytes = stops.automaton.first_bytes
        self._node = stops.automaton.root
        self._byte_table = byte_table
        self._token_ends: list[int] = []
        """byte offset in the row's text at which each token ends; extended on demand by `_length`"""
        self._held_text = b""
        """text that may still be part of a stop"""
        self._ready: list[bytes] = []
        """text to send, in pieces"""
        self._num_unsent = 0
        """sampled tokens that are in no delta yet"""
        self._logprobs: list[tuple[int, TokenLogprob]] = []
        """log-probabilities not sent yet, with the byte offset of each token"""
        self._eos_logprob: TokenLogprob | None = None
        """of a sampled end token, which has no text"""
        self._shown_end: int | None = None
        """end of the shown text in bytes, after a stop"""
        if request.resumed is not None:
            self._resume(request.resumed)

    @property
    def stop_ids(self) -> list[int]:
        """The tokens that end the text."""
        return sorted(self._stop_ids)

    @property
    def _length(self) -> int:
        """The text's bytes, computed on demand: few rows need it."""
        ends, length = self._token_ends, self._token_ends[-1] if self._token_ends else 0
        for token in self.tokens[len(ends) :]:
            length += len(self._byte_table[token])
            ends.append(length)
        return length

    def _resume(self, resumed: Resumed) -> None:
        """Append the tokens of a failed engine. The client has the first `resumed.shown` bytes of their text."""
        for token in resumed.token_ids:
            self.append_token(token)
        # The failed engine may have sent text that is held here: its later tokens showed that the text is no stop.
        num_unsent_bytes = self._length - resumed.shown
        self._release(max(0, len(self._held_text) - num_unsent_bytes))
        self._ready.clear()
        self._num_unsent = 0

    def process_token(self, token: int, logprob: TokenLogprob | None = None) -> FinishReason | Delta | None:
        """Append a sampled token. Returns why the row ends, or a delta to send, or None.

        Same as `append_token` and `pop_delta`, with a fast path for tokens that cannot be part of a stop.
        """
        tokens, text = self.tokens, self._byte_table[token]
        if (
            logprob is not None
            or token in self._stop_ids
            or len(tokens) + 1 >= self._max_tokens
            or (
                self._stop_first_bytes
                and (self._held_text or self._node.depth or text.translate(None, self._stop_first_bytes) != text)
            )
        ):
            reason = self.append_token(token, logprob)
            return self.pop_delta() if reason is None else reason
        tokens.append(token)
        num_unsent, ready = self._num_unsent + 1, self._ready
        if num_unsent < self._chunk or self._logprobs or not (text or ready):
            self._num_unsent = num_unsent
            if text:
                ready.append(text)
            return None if num_unsent < self._chunk else self.pop_delta()
        self._num_unsent = 0
        if ready:
            ready.append(text)
            text = b"".join(ready)
            ready.clear()
        if self._return_token_ids:
            return Delta(self.row, text, num_unsent, token_ids=tokens[-num_unsent:])
        return Delta(self.row, text, num_unsent)

    def append_token(self, token: int, logprob: TokenLogprob | None = None) -> FinishReason | None:
        """Append a sampled token. Returns why the row ends, if it does."""
        tokens, text = self.tokens, self._byte_table[token]
        if token in self._stop_ids:
            return self._finish_at_stop_token(token, logprob)
        if logprob is not None:
            self._logprobs.append((self._length, logprob))
        tokens.append(token)
        self._num_unsent += 1
        # The stops of the first tokens are no stops, nor is text that begins with them.
        is_checked = len(tokens) > self._min_tokens
        node, found = self._automaton.advance(self._node, text) if is_checked else (self._node, None)
        if found is None and not node.depth and not self._held_text and len(tokens) < self._max_tokens:
            self._node = node
            if text:  # no part of it can belong to a stop
                self._ready.append(text)
            return None
        self._node = node
        self._held_text += text
        if found is not None:
            length = self._length
            self._shown_end = length - len(text) + found
            self._release(len(self._held_text) - (length - self._shown_end))
            if self._include_stop:
                self._ready.append(self._automaton.shortest_at_start(self._held_text))
            self._held_text = b""
            return FinishReason.STOP
        if len(tokens) >= self._max_tokens:
            self._release(len(self._held_text))
            return FinishReason.LENGTH
        self._release(
            len(self._held_text) - (node.depth if logprob is None else self._rounded_up_to_tokens(node.depth))
        )
        return None

    def _rounded_up_to_tokens(self, num_bytes: int) -> int:
        """Return `num_bytes` of held text, rounded up to whole tokens: text is sent with its log-probabilities."""
        length = self._length
        num_whole = bisect_right(self._token_ends, length - num_bytes)
        return length - (self._token_ends[num_whole - 1] if num_whole else 0)

    def _finish_at_stop_token(self, token: int, logprob: TokenLogprob | None) -> FinishReason:
        """End the row with a stop token, which is not shown. Held text is released."""
        self._shown_end = self._length
        self.tokens.append(token)
        self._num_unsent += 1
        if logprob is not None and token == END_OF_TEXT:
            self._eos_logprob = logprob
        self._release(len(self._held_text))
        if self._include_stop:
            self._ready.append(self._byte_table[token])
        return FinishReason.STOP

    def _release(self, num_bytes: int) -> None:
        """Move `num_bytes` of the held text to the text to send; none if negative."""
        if num_bytes > 0:
            self._ready.append(self._held_text[:num_bytes])
            self._held_text = self._held_text[num_bytes:]

    def flush_held_text(self) -> None:
        """Release the held text. The row ends without a stop, for example by a timeout."""
        self._release(len(self._held_text))

    @property
    def has_held_text(self) -> bool:
        """Whether the end of the text may be part of a stop."""
        return bool(self._held_text)

    def first_held_token(self) -> int:
        """Index of the token in which the held text begins."""
        return bisect_right(self._token_ends, self._length - len(self._held_text))

    def shown_tokens(self) -> tuple[list[int], bytes]:
        """Return the shown tokens and the shown bytes of the next one. Shown tokens lie wholly before the stop."""
        if self._shown_end is None:
            return list(self.tokens), b""
        num_whole = bisect_right(self._token_ends, self._shown_end)
        start = self._token_ends[num_whole - 1] if num_whole else 0
        partial = (
            b"" if start == self._shown_end else self._byte_table[self.tokens[num_whole]][: self._shown_end - start]
        )
        return self.tokens[:num_whole], partial

    def matched_stop(self, strings: Iterable[bytes]) -> bytes:
        """Return the stop string that ended the text, or b""."""
        if self._shown_end is None:
            return b""
        first = bisect_right(self._token_ends, self._shown_end)
        start = self._token_ends[first - 1] if first else 0
        rest = b"".join(self._byte_table[token] for token in self.tokens[first:])[self._shown_end - start :]
        return shortest_start(strings, rest)

    def pop_delta(self, finish: Finish | None = None) -> Delta | None:
        """Return the next delta: a full chunk, or everything if `finish` is given."""
        ready, num_unsent = self._ready, self._num_unsent
        if finish is None and (num_unsent < self._chunk or not (ready or self._logprobs)):
            return None
        logprobs = self._shown_logprobs(finish is not None) if self._logprobs or self._eos_logprob else None
        ids = self.tokens[len(self.tokens) - num_unsent :] if self._return_token_ids else []
        text = ready[0] if len(ready) == 1 else b"".join(ready)
        ready.clear()
        self._num_unsent = 0
        return Delta(self.row, text, num_unsent, finish, logprobs or None, None, ids)

    def _shown_logprobs(self, is_final: bool) -> list[TokenLogprob]:
        """Remove and return the log-probabilities of the shown text. A stop may cut its last token."""
        shown = self._length - len(self._held_text) if self._shown_end is None else self._shown_end
        found: list[TokenLogprob] = []
        for start, logprob in self._logprobs:
            is_whole = start + len(logprob.token) <= shown
            if not is_whole and not (is_final and start < shown):
                break
            found.append(
                logprob if is_whole else msgspec.structs.replace(logprob, token=logprob.token[: shown - start])
            )
        self._logprobs = self._logprobs[len(found) :]
        return found if self._eos_logprob is None else [*found, self._eos_logprob]
