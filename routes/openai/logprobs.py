"""Log-probabilities of an answer: the tokens of its content, and the four arrays of a completion."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from routes.openai.formatter import token_text
from routes.response.answer_parser import AnswerDelta
from routes.response.event_stream import clamp_logprob
from routes.response.http_response import to_json
from rwkv_batch.request import TokenLogprob

_new_decoder = codecs.getincrementaldecoder("utf-8")


class ContentLogprobs:
    """The tokens of one row's content. Their texts joined are the content.

    Tokens of thoughts, tags, calls and dropped white space are left out. A token that is partly content is cut. A token
    that ends inside a character belongs to this character.
    """

    def __init__(self) -> None:
        self._decoder = _new_decoder("replace")
        self._length = 0
        self._waiting: deque[tuple[int, str, TokenLogprob]] = deque()
        """Start of each token in the row's text, its characters, and the token."""
        self._spans: deque[tuple[int, int]] = deque()

    def feed(self, tokens: Sequence[TokenLogprob], parts: AnswerDelta, final: bool) -> list[TokenLogprob]:
        """Return the tokens whose text was parsed. `tokens`: new tokens, whose text was fed to the parser."""
        for token in tokens:
            text = self._decoder.decode(token.token)
            self._waiting.append((self._length, text, token))
            self._length += len(text)
        self._spans += parts.content_spans
        content = []
        while self._waiting:
            start, text, token = self._waiting[0]
            if not final and start + max(len(text), 1) > parts.num_parsed:
                break
            self._waiting.popleft()
            while self._spans and self._spans[0][1] <= start:
                self._spans.popleft()
            if shown := self._shown_part(start, text, token):
                content.append(shown)
        return content

    def _shown_part(self, start: int, text: str, token: TokenLogprob) -> TokenLogprob | None:
        """Return the token, cut to its content. None if it has none. The end token has no text and is returned."""
        if not text:
            is_content = not token.token or (self._spans and self._spans[0][0] <= start)
            return token if is_content else None
        shown = "".join(text[max(first - start, 0) : max(end - start, 0)] for first, end in self._spans)
        if not shown or shown == text:
            return token if shown else None
        return msgspec.structs.replace(token, token=shown.encode())


class LogprobArrays:
    """Builds OpenAI's four arrays of one row incrementally. Each array has one entry per token."""

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


def prompt_logprobs(
    ids: Sequence[int], tokens: Sequence[TokenLogprob], id_by_bytes: Mapping[bytes, int]
) -> list[Any] | None:
    """Return vLLM's entries of a prompt: token id -> log-probability, and rank if it is among the alternatives.

    ids: the prompt's tokens. tokens: all but the first one, or fewer if the row failed. Entries are encoded at once to
    save memory.
    """
    if len(tokens) != len(ids) - 1:
        return None
    entries: list[Any] = [None]
    for token_id, token in zip(ids[1:], tokens, strict=True):
        found = {str(token_id): _entry(token.token, token.logprob, None)}
        for rank, (other, logprob) in enumerate(token.top, 1):
            other_id = token_id if other == token.token else id_by_bytes.get(other, 0)
            found[str(other_id)] = _entry(other, logprob, rank)
        entries.append(msgspec.Raw(to_json(found)))
    return entries


def _entry(token: bytes, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": clamp_logprob(logprob), "rank": rank, "decoded_token": token_text(token)}
