"""A compiled grammar, and the matcher that follows one row's text."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

from sampling.grammar.constraint import NoTokenLeftError, TooComplexError, exceeds_limit, in_one_line

if TYPE_CHECKING:
    import llguidance

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


class Matcher:
    """Matches one row's tokens. Engine thread."""

    __slots__ = ("__weakref__", "_state", "grammar", "template_index")
    replacement = -1
    was_completed = False
    """See RequiredTextMatcher."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
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
        return bool(state.is_stopped())

    def resolve(self, token: int) -> int:
        """Return the token that a sampled one stands for."""
        return token

    def jump_forward_tokens(self) -> list[int]:
        """Return the tokens that must come next: each is the only one that its mask allows.

        The tokens are those that the tokenizer makes of the text. The last ones are omitted if a longer token might
        extend beyond the text.
        """
        return self.state.compute_ff_tokens()[:MAX_JUMP_FORWARD]
