"""A compiled grammar, and the matcher that follows one row's text."""

from __future__ import annotations

import codecs
import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sampling.grammar.constraint import THINK_END, NoTokenLeftError, TooComplexError, exceeds_limit, in_one_line

if TYPE_CHECKING:
    import llguidance

_THINK_END = THINK_END.encode()
MEAN_MASK_S = 0.005
SLOW_S = 0.25
"""A grammar is too slow if its masks took SLOW_S in total and MEAN_MASK_S on average."""
MAX_JUMP_FORWARD = 64
"""per call"""


class Grammar:
    """A compiled grammar, shared by all rows with the same constraint."""

    __slots__ = ("_next_template", "compile_s", "field", "mask_s", "masks", "matchers", "templates")

    def __init__(self, start: llguidance.LLMatcher, field: str, compile_s: float = 0.0) -> None:
        self.templates = [start]
        """Compiled alike and never advanced: rows copy them in turn.

        Copies of one template share a lexer with a lock, so their masks are computed one at a time.
        """
        self.compile_s = compile_s
        """CPU seconds of one template"""
        self.field = field
        self.matchers: weakref.WeakSet[Matcher] = weakref.WeakSet()
        """of the rows that use it"""
        self.mask_s = 0.0
        """CPU seconds of the timed masks (masks.py)"""
        self.masks = 0
        self._next_template = itertools.count()

    def next_template(self) -> int:
        """Return the index of the next row's template. Rows copy the templates in turn."""
        return next(self._next_template) % len(self.templates)

    def matcher(self, max_tokens: int) -> Matcher:
        """Return a new row's matcher."""
        return Matcher(self)

    @property
    def is_too_slow(self) -> bool:
        """Return whether its masks delay every step."""
        return self.mask_s > SLOW_S and self.mask_s > MEAN_MASK_S * self.masks


class ThoughtBudget:
    """Counts a thought's tokens, and forces its end."""

    __slots__ = ("_byte_table", "_decoder", "_end", "_left", "_tail", "forced", "is_over")

    def __init__(self, tokens: int, end: list[int], byte_table: Sequence[bytes]) -> None:
        """end: token ids of a line break and THINK_END"""
        self._left, self._end, self._byte_table = tokens, end, byte_table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._tail = b""
        self.forced: list[int] = []
        """the next tokens, if they are forced"""
        self.is_over = False

    def advance(self, token: int) -> None:
        if self.forced:
            self.forced = self.forced[1:]
            self.is_over = not self.forced
            return
        text = self._byte_table[token]
        self._decoder.decode(text)
        self._left -= 1
        self._tail = (self._tail + text)[-len(text) - len(_THINK_END) :]
        self.is_over = _THINK_END in self._tail
        if self._left <= 0 and not self.is_over and not self._decoder.getstate()[0]:  # not inside a character
            self.forced = self._end


class Matcher:
    """Matches one row's tokens. Engine thread."""

    __slots__ = ("__weakref__", "_state", "budget", "grammar", "template_index")
    replacement = -1
    was_completed = False
    """See RequiredTextMatcher."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.budget: ThoughtBudget | None = None
        self.template_index = -1
        """index of the template that it copied"""
        self._state: llguidance.LLMatcher | None = None
        grammar.matchers.add(self)

    @property
    def state(self) -> llguidance.LLMatcher:
        """llguidance's matcher, copied before the row's first sample."""
        if self._state is None:
            self.template_index = self.grammar.next_template()
            self._state = self.grammar.templates[self.template_index].deep_copy()
        return self._state

    def add_text(self, token: int) -> bool:
        """See RequiredTextMatcher. A grammar checks every token."""
        return False

    def advance(self, token: int) -> bool:
        """Add a token; return whether the text is complete and nothing may follow.

        Raises NoTokenLeftError for a token that the grammar forbids, TooComplexError if the jump-forward text after it
        exceeds `LIMITS` (compiler.py).
        """
        state = self.state
        if not state.consume_token(token):
            why = in_one_line(state.get_error())
            if exceeds_limit(why):
                raise TooComplexError(why)
            raise NoTokenLeftError(f"no sampled token matches the grammar: {why}")
        if self.budget is not None:
            self.budget.advance(token)
            if self.budget.is_over:
                self.budget = None
        return bool(state.is_stopped())

    @property
    def forced_token(self) -> int | None:
        """The next token, if the end of a thought forces it."""
        return self.budget.forced[0] if self.budget is not None and self.budget.forced else None

    def resolve(self, token: int) -> int:
        """Return the token that a sampled one stands for."""
        return token

    def jump_forward_tokens(self) -> list[int]:
        """Return the tokens that must come next: each is the only one that its mask allows.

        The tokens are those that the tokenizer makes of the text. The last ones are omitted if a longer token might
        extend beyond the text.
        """
        if self.budget is not None and self.budget.forced:
            return list(self.budget.forced)
        return self.state.compute_ff_tokens()[:MAX_JUMP_FORWARD]
