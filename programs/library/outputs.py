"""Return values of the library's calls. Names are vLLM's."""

from __future__ import annotations

import msgspec

from programs.library.states import State
from rwkv_batch.request import TokenLogprob


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One answer to a prompt."""

    index: int
    """0 .. n - 1"""
    text: str = ""
    reasoning: str = ""
    """The thought before the answer of a conversation."""
    token_ids: list[int] | None = None
    """Tokens of the text (0: end of text), with `logprobs` only. Otherwise None: the engine returns text."""
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float | None = None
    num_tokens: int = 0
    """Sampled tokens, including the stop token."""
    finish_reason: str | None = None
    """"stop" | "length" | "timeout" | "cancelled" | "error"."""
    error: str | None = None
    """Error message of a failed answer."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """The answers to a prompt."""

    request_id: str
    prompt: str | None
    """None if the prompt was token ids or a conversation."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens restored from a state."""
    state: State | None = None
    """State after prompt and answer, if the call passed a `State`."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """New text of an answer."""

    prompt: int
    """Index of the prompt in the call."""
    index: int
    """Index of the answer, 0 .. n - 1."""
    text: str
    reasoning: str = ""
    finish_reason: str | None = None
    error: str | None = None
    num_tokens: int = 0


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Likelihood of a candidate after its prompt."""

    logprob: float
    """Sum over the tokens, natural logarithm."""
    tokens: int
    is_greedy: bool
    """Whether every token is the most likely one."""
    token_logprobs: list[float] = []
    """With `logprobs` only."""
