"""`logprobs` of a completion's choice: OpenAI's four arrays with one entry per token."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from routes.openai.formatter import clamp_logprob, token_text
from rwkv_batch.request import TokenLogprob

_new_decoder = codecs.getincrementaldecoder("utf-8")


class LogprobArrays:
    """Builds the arrays of one row incrementally."""

    def __init__(self, first: bytes | None = None) -> None:
        """`first`: first token of the row's text, if it has no log-probability."""
        self._first = first
        self._decoder = _new_decoder("replace")
        self._length = 0

    def take(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the arrays of the next tokens. The first call includes the token without log-probability."""
        unscored = () if self._first is None else (self._first,)
        self._first = None
        offsets = []
        for token in (*unscored, *(token.token for token in tokens)):
            offsets.append(self._length)
            self._length += len(self._decoder.decode(token))
        nothing = [None] * len(unscored)
        return {
            "tokens": [*map(token_text, unscored), *(token_text(token.token) for token in tokens)],
            "token_logprobs": [*nothing, *(clamp_logprob(token.logprob) for token in tokens)],
            "top_logprobs": [
                *nothing,
                *({token_text(other): clamp_logprob(value) for other, value in token.top} for token in tokens),
            ],
            "text_offset": offsets,
        }
