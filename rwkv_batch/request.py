"""The engine's vocabulary: what a caller submits and what comes back. Plain data, no torch, no HTTP.

A *job* is what one HTTP request asks: one or more *rows*, each a prompt to continue. Rows are numbered
0.. in the order of `Job.rows`, with `n` numbers for a row that asks for `n` continuations, or one for each candidate.
"""

from __future__ import annotations

import enum

import msgspec

from rwkv_batch.errors import ErrorInfo
from sampling.grammar.constraint import Constraint
from sampling.params import SamplingParams


class Load(msgspec.Struct, frozen=True, array_like=True):
    """What an engine has to do."""

    rows: int
    """That run, wait or are paused."""
    prompt_tokens: int
    """That they have to read yet."""


class SessionTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The row continues a stored session, and its prompt and answer are folded into it."""

    session_id: str
    resume_prompt: list[int]
    """Token ids to read when the session exists already (`GenerateRequest.prompt` is for a new one)."""
    branch_from: int | None = None
    """None: a linear turn. n: a new dialogue is forked from dialogue n of this session (0: the empty root)."""
    wait: bool = True
    """Whether to queue behind a running turn of the same session, or fail with SESSION_BUSY."""
    expected_tokens: int | None = None
    """Of a turn that goes on after the loss of its engine: the session's tokens before it. If there are others, the
    turn was kept, and is not taken again."""


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probabilities of a prompt's own tokens are wanted; they are computed while it is read."""

    start: int = 1
    """Position of the first token that is told; token 0 follows nothing."""
    top: int = 0
    """How many of the likeliest tokens are told with each."""


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """What another engine has drawn of a row that goes on here: the next token is that of step `len(token_ids)`."""

    token_ids: list[int]
    shown: int
    """Bytes of their text that were sent; the rest may belong to a stop."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. Every field is decided; defaults belong to the dialects."""

    prompt: list[int]
    """Token ids, at least one."""
    max_tokens: int
    """Drawn at most; 0: the row reads its prompt and ends."""
    sampling: SamplingParams
    stop_ids: list[int] = []
    """Token ids that end the text and are not shown; the end token 0 is handled by `ignore_eos`."""
    stop_strings: list[bytes] = []
    """UTF-8 strings that end the text, found across token borders, and are not shown."""
    ignore_eos: bool = False
    chunk_size: int = 4
    """Tokens gathered before a delta is sent; 0: the caller wants the whole, and gets it in few large deltas."""
    n: int = 1
    """Continuations of this prompt; they share one prefill. Continuation i draws with seed + i."""
    candidates: list[list[int]] = []
    """Token ids that may follow the prompt, each in a row of its own, instead of `n`; they share its prefill."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of the prompt and of what `candidates` add to it."""
    return_logits: bool = False
    """Whether the `TokenLogprob` of each token drawn, where `sampling.top_logprobs` asks for any, has the logits."""
    session: SessionTurn | None = None
    resumed: Resumed | None = None
    """Its prompt is read with what was drawn behind it. Beside it the request is for one row."""
    use_prefix_cache: bool = True
    constraint: Constraint | None = None
    """What the whole text matches. A text that can go no further ends, with reason STOP, without an end token."""
    mixture: list[tuple[str, float]] = []
    """Names of tuned states ("": the zero state) with weights of any sign and a sum above 0: the prompt is read from
    each, and every token drawn from their logits, mixed. Beside it `state` is ""; a session of it is kept
    by its tokens."""
    state: str = ""
    """Name of the tuned state that the prompt is read from; "": the zero state. A session's turn may repeat the one
    that the session began from."""

    adapter: str = ""
    """Name of the adapter that the row runs under; "": none. A session's turn may repeat the one that the session was
    begun with, and has it in any case."""

    @property
    def num_rows(self) -> int:
        """Rows that it makes."""
        return len(self.candidates) or self.n

    @property
    def num_states(self) -> int:
        """States that each of its rows reads its tokens from."""
        return len(self.mixture) or 1

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that are read before any is drawn; what rows share counts once."""
        return len(self.prompt) + sum(map(len, self.candidates))


class Priority(enum.StrEnum):
    """Who goes first when seats are short."""

    AUTO = "auto"
    """By its size: see `Job.is_batch`."""
    INTERACTIVE = "interactive"
    """Somebody waits for the answer."""
    BATCH = "batch"
    """Gives way to interactive rows."""


INTERACTIVE_ROWS = 8
"""A job of more rows is batch work unless it says otherwise."""


class ClientLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a client that is known by name may use; None: as much as there is."""

    rows: int | None = None
    """At once."""
    tokens_per_minute: int | None = None
    """Of prompts and answers together."""
    requests_per_minute: int | None = None


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """What a job of a client with limits takes of them."""

    job_id: str
    client: str
    limits: ClientLimits
    rows: int
    """A mixture is as many as it has states, which it costs."""
    prompt_tokens: int
    """Continuations of one prompt read it once; each state of a mixture reads it."""
    states: int = 1
    """States from which each drawn token is read."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one HTTP request asks of the engine."""

    job_id: str
    rows: list[GenerateRequest]
    sampler: str = ""
    """The sampler that the request prefers, by name, taken if `--samplers` has it; "" = the engine's first choice."""
    timeout_s: float | None = None
    """Wall-clock limit from submission; unfinished rows then end with reason "timeout"."""
    label: str = ""
    """The route, for logs, metrics and `big_batch/clean`."""
    client: str = ""
    """Who asks: the API key's name or the address. Clients share the seats evenly; "" is a client like any other."""
    priority: Priority = Priority.AUTO
    attempt: int = 0
    """How often it was handed to an engine before: its client's limits were held then."""
    return_token_ids: bool = False
    """Whether deltas name the tokens drawn, so that rows can go on elsewhere."""
    limits: ClientLimits | None = None
    """Of a client that is known by name; held over all HTTP workers by the engine process."""

    @property
    def num_rows(self) -> int:
        """Rows after `n` and `candidates` are expanded."""
        return sum(row.num_rows for row in self.rows)

    @property
    def usage(self) -> Usage | None:
        """What it takes of its client's limits; None: there are none."""
        if self.limits is None:
            return None
        rows = sum(row.num_rows * row.num_states for row in self.rows)
        # Rows of a mixture share no reading.
        reads = (len(row.mixture) * row.num_rows or 1 for row in self.rows)
        prompt_tokens = sum(row.num_prompt_tokens * times for row, times in zip(self.rows, reads, strict=True))
        states = max((row.num_states for row in self.rows), default=1)
        return Usage(self.job_id, self.client, self.limits, rows, prompt_tokens, states)

    @property
    def is_batch(self) -> bool:
        """Whether its rows give way to those of interactive jobs."""
        if self.priority is Priority.AUTO:
            return self.num_rows > INTERACTIVE_ROWS
        return self.priority is Priority.BATCH


class FinishReason(enum.StrEnum):
    """Why a row ended."""

    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    ERROR = "error"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a token and of its likeliest rivals, before truncation."""

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]]
    logits: bytes = b""
    """Of the whole vocabulary, [V] fp32, as the model gave them: see `GenerateRequest.return_logits`."""


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a row, with its truthful counts."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    """Tokens drawn, the stop token among them."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed because a session state or cached prefix held them."""
    queue_s: float = 0.0
    """Seconds from the job's arrival until the row had a seat; 0 if it ended without."""
    error: ErrorInfo | None = None
    session_id: str | None = None
    dialogue_idx: int | None = None
    """The new dialogue's number after a branching turn."""


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is new of one row: bytes of text that can no longer belong to a stop, perhaps the end."""

    row: int
    text: bytes
    """UTF-8, possibly ending inside a character: decode incrementally, per row."""
    num_tokens: int
    finish: Finish | None = None
    logprobs: list[TokenLogprob] | None = None
    """Of the shown tokens, and of the end token, which has no text."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """Of the next tokens of the prompt (`GenerateRequest.prompt_logprobs`); before any text, and of a prompt that
    several rows share with the first of them."""
    token_ids: list[int] = []
    """The `num_tokens` tokens, where `Job.return_token_ids`."""
    session_tokens: int | None = None
    """Those of a session before its turn, told when the turn begins, where `Job.return_token_ids`."""


class JobEvents(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All events of one job from one engine step. `done` is set exactly once, on the last."""

    job_id: str
    deltas: list[Delta]
    done: bool = False
    error: ErrorInfo | None = None
    """The job as a whole failed (engine lost); rows that had not finished got no Finish."""
