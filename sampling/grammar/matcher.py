"""A compiled grammar, and the matcher with which one row follows it."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

from sampling.grammar.errors import NoTokenLeftError, TooComplexError, exceeds_limit, in_one_line

if TYPE_CHECKING:
    import llguidance

MEAN_MASK_S = 0.005
SLOW_S = 0.25
"""A grammar whose masks have taken this long, and more than the mean each, is followed no further."""
MAX_JUMP_FORWARD = 64
"""Tokens told at a time."""


class Grammar:
    """What rows with the same constraint have in common."""

    __slots__ = ("_next_template", "compile_s", "field", "mask_s", "masks", "matchers", "templates")

    def __init__(self, start: llguidance.LLMatcher, field: str, compile_s: float = 0.0) -> None:
        self.templates = [start]
        """Compiled alike and never advanced: rows copy them, each in turn.

        Copies of one share its lexer, behind a lock: of these one mask is computed at a time, however many threads
        there are.
        """
        self.compile_s = compile_s
        """processor time that one of them took"""
        self.field = field
        self.matchers: weakref.WeakSet[Matcher] = weakref.WeakSet()
        """of the rows that follow it"""
        self.mask_s = 0.0
        """seconds that its masks have taken, of those that were timed (see masks.py)"""
        self.masks = 0
        """how many were timed"""
        self._next_template = itertools.count()

    def next_template(self) -> int:
        """Which of `templates` the next row copies."""
        return next(self._next_template) % len(self.templates)

    @property
    def is_too_slow(self) -> bool:
        """Whether its masks hold up everybody's steps."""
        return self.mask_s > SLOW_S and self.mask_s > MEAN_MASK_S * self.masks


class Matcher:
    """Follows a row's tokens. Engine thread."""

    __slots__ = ("__weakref__", "_state", "grammar", "template_index")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.template_index = -1
        """which of the grammar's starts it has copied"""
        self._state: llguidance.LLMatcher | None = None
        grammar.matchers.add(self)

    @property
    def state(self) -> llguidance.LLMatcher:
        """llguidance's own; copied when the row draws for the first time."""
        if self._state is None:
            self.template_index = self.grammar.next_template()
            self._state = self.grammar.templates[self.template_index].deep_copy()
        return self._state

    def advance(self, token: int) -> bool:
        """Take the token drawn; returns whether the text is whole and nothing may follow.

        Raises NoTokenLeftError for a token that the grammar does not allow, and TooMuchError where what is certain
        behind it passes `LIMITS` (compiler.py).
        """
        state = self.state
        if not state.consume_token(token):
            why = in_one_line(state.get_error())
            if exceeds_limit(why):
                raise TooComplexError(why)
            raise NoTokenLeftError(f"no token was left that the grammar allows: {why}")
        return bool(state.is_stopped())

    def jump_forward_tokens(self) -> list[int]:
        """Tokens that follow whatever is drawn: where each stands it is the only one that its mask allows.

        Text that is certain has the tokens that the tokenizer makes of it; its end is left where a longer token might
        reach beyond it.
        """
        return self.state.compute_ff_tokens()[:MAX_JUMP_FORWARD]
