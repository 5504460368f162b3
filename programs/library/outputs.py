"""What calls return, in vLLM's words."""

from __future__ import annotations

import msgspec

from programs.library.states import State
from rwkv_batch.request import TokenLogprob


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One answer to a prompt."""

    index: int
    """Which of the prompt's `n`."""
    text: str = ""
    reasoning: str = ""
    """The thought before the answer, in conversations."""
    token_ids: list[int] | None = None
    """Of the text shown (0: the end), where `logprobs` was asked for; else None: the engine tells text."""
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float | None = None
    num_tokens: int = 0
    """Drawn, the stop among them."""
    finish_reason: str | None = None
    """"stop" | "length" | "timeout" | "cancelled" | "error"."""
    error: str | None = None
    """Why it failed."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """The answers to a prompt."""

    request_id: str
    prompt: str | None
    """Its text, where the prompt was one."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    """Of the prompt, not computed since a state held them."""
    state: State | None = None
    """After prompt and answer, where the call gave a `State`."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of an answer."""

    prompt: int
    """Number of the prompt in the call."""
    index: int
    """Which of its `n` answers."""
    text: str
    reasoning: str = ""
    finish_reason: str | None = None
    error: str | None = None
    num_tokens: int = 0


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How likely a candidate is behind its prompt."""

    logprob: float
    """Of the whole text: the sum over its tokens, natural."""
    tokens: int
    is_greedy: bool
    """Whether no token of it has a likelier rival."""
    token_logprobs: list[float] = []
    """Where `logprobs` was asked for."""
