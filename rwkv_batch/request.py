"""The engine's requests and events. Plain data, no torch, no HTTP.

A *job* is one HTTP request: one or more *rows*, each a prompt to continue. Rows are numbered from 0 in the order of
`Job.rows`. A request with `n` continuations or several candidates takes one number for each.
"""

from __future__ import annotations

import enum

import msgspec

from rwkv_batch.errors import ErrorInfo, ErrorKind
from sampling.grammar.constraint import Constraint
from sampling.params import SamplingParams


class Load(msgspec.Struct, frozen=True, array_like=True):
    rows: int
    """running, waiting and paused"""
    prompt_tokens: int
    """tokens that these rows have to read"""


class SessionTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A stored session that the row continues. Its prompt and answer become part of the session."""

    session_id: str
    resume_prompt: list[int]
    """token ids to read if the session exists; `GenerateRequest.prompt` is for a new one"""
    branch_from: int | None = None
    """None: a linear turn; n: fork a new dialogue from dialogue n of this session (0: the empty root)"""
    wait: bool = True
    """whether to queue behind a running turn of the session, or fail with SESSION_BUSY"""
    max_replayed_tokens: int | None = None
    """maximum tokens of the session to read again, because no stored state contains them; None: no limit"""
    expected_history: tuple[int, int] | None = None
    """
    for a turn resumed after the loss of its engine: the session's row and turns before it

    If the session has others, the turn was kept, or the session was begun again. The turn must not run then.
    """


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Requests log-probabilities of the prompt's own tokens, computed during prefill."""

    start: int = 1
    """position of the first scored token; token 0 has no predecessor"""
    top: int = 0
    """number of most likely tokens to report with each"""


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that another engine sampled for a row. The next one is sampled as step `len(token_ids)`."""

    token_ids: list[int]
    shown: int
    """bytes of their text that were sent; the rest may be part of a stop"""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. Every field has a value; defaults belong to the dialects."""

    prompt: list[int]
    """token ids, at least one"""
    max_tokens: int
    """maximum sampled tokens; 0: the row reads its prompt and ends"""
    sampling: SamplingParams
    stop_ids: list[int] = []
    """token ids that end the text and are not shown; `ignore_eos` controls the end token 0"""
    stop_strings: list[bytes] = []
    """UTF-8 strings that end the text and are not shown, also across token boundaries"""
    ignore_eos: bool = False
    include_stop: bool = False
    """whether the text ends with the stop; a session's state never contains it"""
    chunk_size: int = 4
    """tokens per delta; 0: no streaming, few large deltas"""
    n: int = 1
    """continuations of this prompt, with one shared prefill; continuation i uses seed + i"""
    candidates: list[list[int]] = []
    """token ids that may follow the prompt, each in a row of its own, instead of `n`; they share the prefill"""
    prompt_logprobs: PromptLogprobs | None = None
    """of the prompt and its candidate"""
    return_logits: bool = False
    """whether each `TokenLogprob` contains the logits; needs `sampling.top_logprobs`"""
    session: SessionTurn | None = None
    resumed: Resumed | None = None
    """tokens to read after the prompt; the request must have one row"""
    use_prefix_cache: bool = True
    cached_tokens: int = 0
    """beginning of the prompt that later prompts share; the prefix cache keeps its state at the first time"""
    constraint: Constraint | None = None
    """grammar of the whole text; complete text ends with STOP, without an end token"""
    mixture: list[tuple[str, float]] = []
    """names of tuned states ("": the zero state) with weights of any sign and a sum above 0

    The prompt is read from each state. Every token is sampled from their mixed logits. `state` must be "". Only the
    tokens of its session are stored.
    """
    prediction: list[int] = []
    """token ids that the text probably has; drafts are made of them, and the text does not depend on them"""
    speculation: str = ""
    """"off": no drafts for this row; "": by the engine's `speculate`"""
    state: str = ""
    """name of the initial tuned state; "": the zero state. A session's turn may repeat its session's state"""

    adapter: str = ""
    """name of the row's adapter; "": none. A session's turn always uses its session's adapter and may repeat it"""

    @property
    def num_rows(self) -> int:
        return len(self.candidates) or self.n

    @property
    def num_states(self) -> int:
        return len(self.mixture) or 1

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens to prefill. A shared prompt counts once."""
        return len(self.prompt) + sum(map(len, self.candidates))


class Priority(enum.StrEnum):
    AUTO = "auto"
    """by size: see `Job.is_batch`"""
    INTERACTIVE = "interactive"
    """a user waits for the answer"""
    BATCH = "batch"
    """interactive rows come first"""


INTERACTIVE_ROWS = 8
"""With Priority.AUTO, a job with more rows is batch work."""


class ClientLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an API key. None: unlimited."""

    rows: int | None = None
    """at the same time"""
    tokens_per_minute: int | None = None
    """prompts and answers together"""
    requests_per_minute: int | None = None

    def rows_error(self, client: str, rows: int, states: int = 1) -> ErrorInfo | None:
        """Return the error of a request with too many rows.

        Too many: more than the client may ever have at once.
        rows: a mixture counts once per state
        """
        if self.rows is None or rows <= self.rows:
            return None
        counted = f"{rows} rows" + (", one per state of its mixture" if states > 1 else "")
        message = f"the request has {counted}; the key {client} may have {self.rows} at once; send fewer"
        return ErrorInfo(kind=ErrorKind.INVALID_FIELD, message=message, field="rows", given=rows)


class Usage(msgspec.Struct, frozen=True, array_like=True):
    job_id: str
    client: str
    limits: ClientLimits
    rows: int
    """a mixture counts once per state"""
    prompt_tokens: int
    """continuations share a prompt; each state of a mixture reads it"""
    states: int = 1
    """states that read each sampled token"""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    job_id: str
    rows: list[GenerateRequest]
    sampler: str = ""
    """name of the preferred sampler, used if enabled; "" = the engine's default"""
    timeout_s: float | None = None
    """seconds from submission; then unfinished rows end with FinishReason.TIMEOUT"""
    label: str = ""
    """route, for logs, metrics and `big_batch/clean`"""
    client: str = ""
    """name of the API key, or address; clients share the running slots evenly, "" counts as a client"""
    priority: Priority = Priority.AUTO
    was_admitted: bool = False
    """whether an engine that was lost had admitted it: its client has a reply, so no full queue refuses it"""
    return_token_ids: bool = False
    """whether deltas contain token ids, so that rows can continue on another engine"""
    must_confirm: bool = False
    """whether a turn is stored only after `confirm_turn`, which answers the report of its start (`session_history`)

    An engine may be lost before its report arrives. Then the turn runs on another engine, and must not be stored yet.
    The length of its session does not show whether a branch was stored, so its end is confirmed in place of its start.
    """
    limits: ClientLimits | None = None
    """of an API key, which the fleet enforces (`QuotaLedger`)"""
    tenant: str = ""
    """whose cached prefixes and grammars the job may use; "" for those of all clients without a key"""
    cache_salt: str = ""
    """jobs of one tenant with different salts share no cached prefixes"""

    @property
    def prefix_salt(self) -> str:
        """The salt that separates its cached prefixes from other tenants' and salts'."""
        return f"{self.tenant}\0{self.cache_salt}" if self.tenant or self.cache_salt else ""

    @property
    def num_rows(self) -> int:
        """Rows, with `n` and `candidates` expanded."""
        return sum(row.num_rows for row in self.rows)

    @property
    def usage(self) -> Usage | None:
        """What the job takes of its client's limits. None without limits."""
        if self.limits is None:
            return None
        rows = sum(row.num_rows * row.num_states for row in self.rows)
        # Continuations of a mixture do not share a prefill.
        reads = (len(row.mixture) * row.num_rows or 1 for row in self.rows)
        prompt_tokens = sum(row.num_prompt_tokens * times for row, times in zip(self.rows, reads, strict=True))
        states = max((row.num_states for row in self.rows), default=1)
        return Usage(self.job_id, self.client, self.limits, rows, prompt_tokens, states)

    @property
    def is_batch(self) -> bool:
        if self.priority is Priority.AUTO:
            return self.num_rows > INTERACTIVE_ROWS
        return self.priority is Priority.BATCH


class FinishReason(enum.StrEnum):
    """Why a row ended."""  # the schema's description in the OpenAPI document

    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    ERROR = "error"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a token and of the most likely tokens, before truncation."""

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]]
    logits: bytes = b""
    """[V] fp32, the model's logits; see `GenerateRequest.return_logits`"""


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    """sampled tokens, including the stop token"""
    cached_tokens: int = 0
    """prompt tokens that a session's state or a cached prefix already contained"""
    queue_s: float = 0.0
    """seconds from the job's arrival until the row got its slots; 0 if it never did"""
    prefill_s: float = 0.0
    """seconds from then until the step that sampled its first token was launched"""
    error: ErrorInfo | None = None
    session_id: str | None = None
    dialogue_idx: int | None = None
    """number of the dialogue that a branching turn created"""
    stop_string: bytes = b""
    """the stop string that ended the text; b"": something else did"""
    accepted_drafts: dict[str, int] = {}
    """tokens of the text that were drafted, by drafter"""
    rejected_drafts: dict[str, int] = {}
    """drafted tokens that sampling did not choose, by drafter; they are in no other count"""
    was_completed: bool = False
    """whether its `RequiredText` was incomplete when the model ended it, and the rest was added"""


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New output of one row: text that cannot be part of a stop, and possibly its end."""

    row: int
    text: bytes
    """UTF-8, possibly ending inside a character: decode incrementally per row"""
    num_tokens: int
    finish: Finish | None = None
    logprobs: list[TokenLogprob] | None = None
    """of the tokens of `text`, the last one as far as it is shown, and of the end token, which has no text"""
    prompt_logprobs: list[TokenLogprob] | None = None
    """of the prompt's next tokens (`GenerateRequest.prompt_logprobs`), before any text

    For a shared prompt, the first of its rows gets them.
    """
    token_ids: list[int] = []
    """the `num_tokens` tokens, with `Job.return_token_ids`"""
    session_history: tuple[int, int] | None = None
    """
    row and turns of the session before its turn, (0, 0) of a new one

    Sent when the turn begins, with `Job.return_token_ids`.
    """
    replayed_tokens: int = 0
    """sent with it: tokens of the session that are read again, because no stored state contains them"""
    is_complete_branch: bool = False
    """sent with `session_history` once more when a branch is complete: once confirmed, it may be stored"""


class JobEvents(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All events of one job from one engine step. `done` is set exactly once, on the last."""

    job_id: str
    deltas: list[Delta]
    done: bool = False
    error: ErrorInfo | None = None
    """failure of the whole job; unfinished rows get no Finish"""

    @property
    def num_sampled(self) -> int:
        return sum(delta.num_tokens for delta in self.deltas)

    @property
    def num_replayed(self) -> int:
        """Tokens of the session that are read again."""
        return sum(delta.replayed_tokens for delta in self.deltas)


def attempt_id(job_id: str, attempt: int) -> str:
    return f"{job_id}/{attempt}" if attempt else job_id


def original_id(job_id: str) -> str:
    return job_id.partition("/")[0]
