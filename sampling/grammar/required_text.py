"""Keeps a text's markers and words: masks from an automaton on the bytes of tokens.

A marker, like `{name}`, begins with a lead byte. After it, only tokens are allowed that continue a marker. Each marker
comes exactly once, pairs of tags nest, and the text may end only after all markers and words.

Masks depend on the automaton's state only, and rows with equal markers share an automaton. So most masks are computed
once and copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from sampling.grammar.constraint import EARLY_ENDS, RESERVE, Constraint, NoTokenLeftError, RequiredText
from sampling.grammar.matcher import MAX_JUMP_FORWARD, Grammar, Matcher
from sampling.grammar.token_index import END, MAX_CACHED, TokenIndex, starting
from sampling.grammar.word_counter import WordCounter

_MAX_AUTOMATA = 256
_MAX_MASKS = 4096
"""8 KiB each with 65,536 tokens."""
_MAX_ALLOWED = 4096
Mask = NDArray[np.int32]


class State(NamedTuple):
    """What the text so far means for the next token."""

    prefix: bytes = b""
    """The marker that has begun."""
    given: int = 0
    """Bit set of the markers in the text."""
    opened: tuple[int, ...] = ()
    """Opening tags whose closing tags are missing."""
    tail: bytes = b""
    """The last bytes, if an end may continue them."""


_ENDED = State(given=-1)


class MarkerAutomaton:
    """Which tokens may follow, given the markers so far. One thread."""

    def __init__(self, text: RequiredText, index: TokenIndex) -> None:
        self.names = [name.encode() for name in text.markers]
        self.all_given = (1 << len(self.names)) - 1
        self._partners = text.partners
        self._index = index
        self._leads = text.leads.encode()
        self._find_lead = re.compile(b"[%s]" % re.escape(self._leads) if self._leads else b"(?!)").search
        self._ends = [end.encode() for end in text.ends]
        self._barred = bytes(sorted({end[0] for end in self._ends}))
        self._longest_end = max(map(len, self._ends), default=1)
        self._special = self._leads + self._barred
        special = index.with_any(self._special) | ~index.has_bytes
        special[list(EARLY_ENDS)] = True
        self.is_special = special.tobytes()
        """Per token, whether it may change the state outside a marker, or `resolve` may replace it."""
        self._early_ends = [END] if any(end not in b"\n\n" for end in self._ends) else EARLY_ENDS
        find_allowed = partial(_allowed, self.names, text.partners, text.ordered)
        self.allowed: Callable[[int, tuple[int, ...]], list[int]] = lru_cache(_MAX_ALLOWED)(find_allowed)
        """Returns the markers that may come next after those given and opened, without duplicates."""

    def add(self, state: State, marker: int) -> State:
        """Return the state after a marker."""
        partner = self._partners[marker]
        opened = state.opened if partner < 0 else state.opened[:-1] if partner < marker else (*state.opened, marker)
        return State(given=state.given | 1 << marker, opened=opened)

    def walk(self, state: State, data: bytes, has_words: bool) -> State | None:
        """Return the state after some bytes. None: they are not allowed."""
        at = 0
        while at < len(data):
            if not state.prefix:
                lead = self._find_lead(data, at)
                text = state.tail + data[at : lead.start() if lead else len(data)]
                if any(end in text for end in self._ends):
                    return _ENDED if self.may_end(state, has_words) else None
                if lead is None:
                    return state._replace(tail=self._tail(text))
                at, state = lead.start(), state._replace(tail=b"")
            begun = state.prefix + data[at:]
            for marker in self.allowed(state.given, state.opened):
                name = self.names[marker]
                if begun.startswith(name):
                    at += len(name) - len(state.prefix)
                    state = self.add(state, marker)
                    break
                if name.startswith(begun):
                    return state._replace(prefix=begun)
            else:
                return None
        return state

    def _tail(self, text: bytes) -> bytes:
        for at in range(max(0, len(text) - self._longest_end + 1), len(text)):
            if text[at] in self._barred and any(end.startswith(text[at:]) for end in self._ends):
                return text[at:]
        return b""

    def may_end(self, state: State, has_words: bool) -> bool:
        """Return whether the text may end here."""
        return has_words and not state.prefix and state.given == self.all_given

    def mask(self, state: State, has_words: bool) -> Mask:
        """Return the allowed tokens [V/32], as bits."""
        is_allowed = np.zeros(len(self._index.table), np.bool_)
        if state.prefix:
            for marker in self.allowed(state.given, state.opened):
                if self.names[marker].startswith(state.prefix):
                    self._allow_rest(is_allowed, state, self.names[marker][len(state.prefix) :], has_words)
        else:
            self._allow_text(is_allowed, state, has_words)
        if not state.prefix:
            is_allowed[list(self._early_ends)] = True
        padding = np.zeros(-len(is_allowed) % 32, np.bool_)
        return np.packbits(np.concatenate((is_allowed, padding)), bitorder="little").view(np.int32)

    def _allow_rest(self, is_allowed: NDArray[np.bool_], state: State, rest: bytes, has_words: bool) -> None:
        """Allow the tokens that continue a marker whose `rest` is missing."""
        for length in range(1, len(rest)):
            if (number := self._index.id_of.get(rest[:length])) is not None:
                is_allowed[number] = True
        plain, special = self._index.split_after(rest, self._special)
        is_allowed[plain] = True
        for number, token in special:
            is_allowed[number] = self.walk(state, token, has_words) is not None

    def _allow_text(self, is_allowed: NDArray[np.bool_], state: State, has_words: bool) -> None:
        index = self._index
        is_allowed[:] = index.has_bytes & ~index.with_any(self._leads)
        if not self.may_end(state, has_words):
            for end in self._ends:
                is_allowed &= ~(index.with_text(end) if len(end) > 1 else index.with_any(end))
                for begun in range(1, len(state.tail) + 1):
                    if end.startswith(state.tail[-begun:]):
                        is_allowed[[index.id_of[token] for token in index.starting_with(end[begun:])]] = False
        suffixes = index.suffixes(self._leads, self._barred)
        for marker in self.allowed(state.given, state.opened):
            name = self.names[marker]
            for length in range(1, len(name)):
                if (ids := suffixes.tokens.get(name[:length])) is not None:
                    is_allowed[ids] = True
            for suffix in starting(suffixes.order, name):
                if self.walk(state, suffix, has_words) is not None:
                    is_allowed[suffixes.tokens[suffix]] = True

    def next_marker(self, state: State) -> int:
        """Return a missing marker: the one that has begun, else the closing tag of the last opened one."""
        names = [i for i in self.allowed(state.given, state.opened) if self.names[i].startswith(state.prefix)]
        return next((i for i in names if 0 <= self._partners[i] < i), names[0])

    def closing(self, state: State) -> bytes:
        """Return the shortest text with the missing markers."""
        text = b""
        while state.given != self.all_given:
            marker = self.next_marker(state)
            text += self.names[marker][len(state.prefix) :]
            state = self.add(state, marker)
        return text


def _allowed(
    names: Sequence[bytes], partners: Sequence[int], ordered: Sequence[int], given: int, opened: tuple[int, ...]
) -> list[int]:
    """See `MarkerAutomaton.allowed`."""
    first = next((i for i in ordered if not given >> i & 1), -1)
    found: dict[bytes, int] = {}
    for i, (name, partner) in enumerate(zip(names, partners, strict=True)):
        if given >> i & 1 or (i in ordered and i != first):
            continue
        if not 0 <= partner < i or (opened and opened[-1] == partner):
            found.setdefault(name, i)
    return list(found.values())


class RequiredTextMatcher:
    """Matches one row's tokens, as `Matcher` does. Engine thread."""

    def __init__(self, texts: RequiredTexts, text: RequiredText, max_tokens: int) -> None:
        self._texts, self._automaton = texts, texts.automaton(text)
        self._words = WordCounter(text) if text.words else None
        self._has_words = not text.words
        self._state = State()
        self._tokens_left = max_tokens
        self._closing: list[int] = []
        """Tokens that must come next."""
        self.was_completed = False
        """Whether markers or words were added that the model did not choose. Closing tags do not count."""
        self._mask: Mask | None = None
        self._replacement: int | None = None
        """None: not known, like `_mask`."""
        self._max_closing = len(self._closing_tokens()) + 2 * RESERVE
        self._force_late()

    def mask(self) -> Mask:
        """Return the allowed tokens [V/32], as bits. Callers do not change it."""
        if self._mask is None and self._closing:
            self._mask = self._texts.mask_of(self._closing[0])
        elif self._mask is None:
            self._mask = self._texts.mask(self._automaton, self._state, self._has_words)
        return self._mask

    def add_text(self, token: int) -> bool:
        """Add a token of plain text. Returns False, and adds nothing, for one that `advance` must check."""
        state = self._state
        if self._automaton.is_special[token] or self._closing or self._tokens_left <= self._max_closing:
            return False
        if state.prefix or state.tail:
            return False
        self._tokens_left -= 1
        if self._words is not None and self._words.add(self._texts.index.table[token]):
            self._on_counted()
        return True

    def advance(self, token: int) -> bool:
        """Add a token; return whether the text is complete and nothing may follow.

        Raises NoTokenLeftError for a token that the mask forbids.
        """
        state, data = self._state, self._texts.index.table[token]
        self._tokens_left -= 1
        if token == END and (self._closing == [END] or self._automaton.may_end(state, self._has_words)):
            return True
        if not data:
            raise NoTokenLeftError("no sampled token may follow: the text lacks markers or words")
        if state.prefix or state.tail or self._automaton.is_special[token]:
            found = self._automaton.walk(state, data, self._has_words)
            if found is None:
                raise NoTokenLeftError(f"no sampled token may follow: {data!r} breaks a marker")
            if found is _ENDED:
                return True
            self._state, self._mask = found, None
        if self._words is not None and self._words.add(data):
            self._on_counted()
        if self._closing:
            self._closing, self._mask = self._closing[1:], None
        elif self._tokens_left <= self._max_closing:
            self._force_late()
        if self._mask is None:
            self._replacement = None
        return False

    def _on_counted(self) -> None:
        assert self._words is not None
        self._replacement = None
        if self._words.has_all != self._has_words:
            self._has_words, self._mask = self._words.has_all, None
        if self._words.is_final:
            self._words = None

    @property
    def replacement(self) -> int:
        """The token to read if one of `EARLY_ENDS` is sampled, or -1."""
        if self._replacement is None:
            may_end = self._closing or self._state.prefix or self._automaton.may_end(self._state, self._has_words)
            self._replacement = -1 if may_end else self._next_required()[0]
        return self._replacement

    def resolve(self, token: int) -> int:
        """Return the token that a sampled one stands for.

        An early end stands for the first token of what is missing. The rest of that marker or word must follow.
        """
        if token not in EARLY_ENDS or self.replacement < 0:
            return token
        self._closing = list(self._next_required())
        self._mask = self._replacement = None
        self.was_completed |= not self._state.opened
        return self._closing[0]

    def jump_forward_tokens(self) -> list[int]:
        """Return the tokens that must come next."""
        return [token for token in self._closing[:MAX_JUMP_FORWARD] if token != END]

    def _next_required(self) -> tuple[int, ...]:
        """Return a missing marker's tokens, else a missing word's."""
        automaton, state = self._automaton, self._state
        if state.given != automaton.all_given:
            return self._texts.encoded(automaton.names[automaton.next_marker(state)])
        assert self._words is not None
        return self._texts.encoded(self._words.closing()[0])

    def _force_late(self) -> None:
        """Begin to force what is missing if the tokens run out."""
        tokens = self._closing_tokens()
        if tokens and self._tokens_left <= len(tokens) + RESERVE:
            self._closing, self._mask = [*tokens, END], None
            self.was_completed = True

    def _closing_tokens(self) -> list[int]:
        words = [] if self._words is None else self._words.closing()
        return self._texts.encode(b"".join((self._automaton.closing(self._state), *words)))


class RequiredTextGrammar(NamedTuple):
    """A `RequiredText` with the vocabulary, shared by equal rows."""

    texts: RequiredTexts
    constraint: Constraint

    def matcher(self, max_tokens: int) -> RequiredTextMatcher:
        """Return a new row's matcher. Engine thread."""
        return RequiredTextMatcher(
            self.texts, msgspec.json.decode(self.constraint.source, type=RequiredText), max_tokens
        )


class ByteTokenizer(Protocol):
    """A tokenizer of bytes."""

    @property
    def byte_table(self) -> list[bytes]: ...

    def encode_bytes(self, data: bytes) -> list[int]: ...


class RequiredTexts:
    """Automata and masks of one vocabulary, the latest of them cached."""

    def __init__(self, tokenizer: ByteTokenizer, vocab: int) -> None:
        """vocab: number of logits"""
        self.index = TokenIndex(tokenizer.byte_table, vocab)
        self.encode = encode = tokenizer.encode_bytes
        self.encoded: Callable[[bytes], tuple[int, ...]] = lru_cache(MAX_CACHED)(lambda text: tuple(encode(text)))
        """Returns the tokens of a short text."""
        self._automaton = lru_cache(_MAX_AUTOMATA)(MarkerAutomaton)
        self.mask: Callable[[MarkerAutomaton, State, bool], Mask] = lru_cache(_MAX_MASKS)(MarkerAutomaton.mask)
        """Returns the allowed tokens [V/32], as bits. Callers do not change it."""
        self.mask_of: Callable[[int], Mask] = lru_cache(MAX_CACHED)(self._mask_of)

    def automaton(self, text: RequiredText) -> MarkerAutomaton:
        """Return the automaton of the markers. Texts with other words share it."""
        return self._automaton(msgspec.structs.replace(text, words=()), self.index)

    def _mask_of(self, token: int) -> Mask:
        """Return the mask [V/32] that allows one token. Callers do not change it."""
        found = np.zeros(-(-len(self.index.table) // 32), np.int32)
        found.view(np.uint32)[token >> 5] = 1 << (token & 31)
        return found


AnyGrammar = Grammar | RequiredTextGrammar
AnyMatcher = Matcher | RequiredTextMatcher
