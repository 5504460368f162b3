"""A job's rows: tokens, state slots, progress.

Plain data of the engine's thread. `job_table.py`, `scheduler.py` and `state_manager.py` act on it.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rwkv_batch.core.drafters import Draft, RowDrafter
from rwkv_batch.core.grammar_compile_queue import Grammars
from rwkv_batch.core.output import RowOutput
from rwkv_batch.errors import ErrorInfo
from rwkv_batch.protocol import Sink
from rwkv_batch.request import Delta, Finish, FinishReason, GenerateRequest, Job
from sampling.grammar.required_text import AnyMatcher
from state_pool.layout import ZERO_SLOT
from state_pool.origins import NO_PREFIX_BASE, LoadedAdapter, TunedState
from state_pool.sessions import Lease


class Phase(enum.Enum):
    WAITING = enum.auto()
    """has no slot yet"""
    RUNNING = enum.auto()
    """reads its prompt or decodes"""
    CLOSING = enum.auto()
    """has answered; reads the last tokens that its session's state must contain"""
    ANSWERED = enum.auto()
    """has answered and left the steps; waits until its turn is confirmed and stored"""
    DONE = enum.auto()
    """has ended; nothing of it remains"""


NO_SLOT = -1
NO_REQ_SLOT = -1
PENDING = -1
"""In `Sequence.token_ids`: a sampled token that the host has not read yet."""
NOTHING_SCORED = range(0)


class SharedSlot:
    """A slot that several rows read and none writes. The last reader releases it."""

    def __init__(self, slot: int, release: Callable[[], None], readers: int = 1) -> None:
        self.slot = slot
        self._release = release
        self._readers = readers

    def drop(self) -> None:
        self._readers -= 1
        if self._readers == 0:
            self._release()


@dataclass(slots=True)
class RollbackState:
    """A state after `count` sampled tokens. It is kept while later text may be a stop."""

    slot: int
    count: int


@dataclass(slots=True, eq=False)
class Member:
    """A mixture's member other than the row itself. It reads the same tokens from another state."""

    weight: float
    """weight of its logits in the mix"""
    tuned: TunedState | None = None
    slot: int = NO_SLOT
    shared: SharedSlot | None = None
    """its initial state, until it has read a token; None: the zero state"""

    def read_slot(self, num_computed_tokens: int) -> int:
        """Return the slot of the state after `num_computed_tokens` tokens of the row."""
        if self.shared is not None:
            return self.shared.slot
        return self.slot if num_computed_tokens else ZERO_SLOT


@dataclass(slots=True, eq=False)
class RunningJob:
    """An admitted job. Owned by the engine's thread."""

    spec: Job
    sink: Sink
    grammars: Grammars
    unfinished: int
    """number of rows without a Finish"""
    submitted_at: float = field(default_factory=time.monotonic)
    waiting: deque[Sequence] = field(default_factory=deque)
    """rows without a slot, in order"""
    live: dict[Sequence, None] = field(default_factory=dict)
    """rows without a Finish, including waiting ones (an ordered set)"""
    num_running: int = 0
    deltas: list[Delta] = field(default_factory=list)
    job_id: str = field(init=False)
    is_batch: bool = field(init=False)
    is_confirmed: bool = field(init=False)
    """whether its turn may be stored (`Job.must_confirm`)"""
    held_reason: FinishReason | None = None
    """why its turn ended, while the turn is complete and not confirmed"""

    def __post_init__(self) -> None:
        self.job_id, self.is_batch = self.spec.job_id, self.spec.is_batch
        self.is_confirmed = not self.spec.must_confirm

    @property
    def client(self) -> str:
        return self.spec.client

    @property
    def deadline(self) -> float | None:
        """The time.monotonic() at which the job times out."""
        return None if self.spec.timeout_s is None else self.submitted_at + self.spec.timeout_s


@dataclass(slots=True, eq=False)
class Sequence:
    """A row of a job.

    `token_ids[num_computed_tokens:]` are the tokens that no launched step has read. After the last token is read, the
    row samples.

    The state after `token_ids[:num_computed_tokens]` is in `shared.slot` while `shared` is set, else in `slot`. The row
    never writes to `shared`: it belongs to a session, a cached prefix or a shared prompt.
    """

    job: RunningJob
    row: int
    request: GenerateRequest
    token_ids: list[int]
    output: RowOutput
    num_computed_tokens: int = 0
    phase: Phase = Phase.WAITING
    slot: int = NO_SLOT
    spare_slot: int = NO_SLOT
    """second slot of a session's row, with overlap on: holds the state before the last read token"""
    req_slot: int = NO_REQ_SLOT
    queue_s: float = 0.0
    """seconds that it waited for its request slot"""
    prefill_s: float = 0.0
    """seconds from then until the step that samples its first token was launched"""
    last_sample_step: int = 0
    """number of the step that samples its last token"""
    shared: SharedSlot | None = None
    may_sample: bool = True
    """False: reads its tokens and never samples (the shared prompt of `n` continuations)"""
    fork_count: int = 1
    """rows of the job that end if this one ends before it is forked"""
    tuned: TunedState | None = None
    """its initial tuned state, until that state's slot is pinned; None: the zero state, or its session's"""
    tuned_slot: SharedSlot | None = None
    """the pinned slot of that state, until the row starts"""
    members: list[Member] = field(default_factory=list)
    """the other members, if it is a mixture"""
    weight: float = 1.0
    adapter: LoadedAdapter | None = None
    """its adapter; None: none, or not known until its session's lease is ready"""
    base: bytes = NO_PREFIX_BASE
    """identifies its initial state and adapter: only rows with the same value may share a prefix"""
    lease: Lease | None = None
    session_reported: bool = False
    """whether the start of its turn was reported, with its session's length"""
    rollback_state: RollbackState | None = None
    prompt_end: int = 0
    """index of the first sampled token in `token_ids`"""
    sampled_start: int = 0
    """index of the first token that this engine sampled; another engine sampled those before
    (`GenerateRequest.resumed`)"""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    scored: range = NOTHING_SCORED
    """positions of the request's prompt that it scores"""
    cache_points: list[int] = field(default_factory=list)
    """positions in `token_ids`, ascending, at which the prefix cache gets its state: a prefill chunk ends there"""
    dialogue_idx: int | None = None
    """number of the dialogue that a branching turn created"""
    matcher: AnyMatcher | None = None
    """its grammar's matcher, which has taken all tokens that the host knows"""
    uncounted_ids: list[int] = field(default_factory=list)
    """tokens appended without sampling that its sampler has not counted yet"""
    mask_time_debt_s: float = 0.0
    """seconds by which its grammar delayed steps, not repaid yet (`MaskTimeBalancer`)"""
    skipped_steps: int = 0
    """consecutive steps that it skipped to repay"""
    discarded_sample_step: int = -1
    """number of the last step whose sampled token is discarded because jump-forward appended it first"""
    drafters: list[RowDrafter] | None = None
    """they guess its next tokens, the preferred one first; None: no step has tried to"""
    draft: Draft | None = None
    """guessed tokens that a step in flight verifies"""
    replayed_tokens: int = 0
    """tokens of its session that it reads again, because no stored state contains them"""
    turn_start: int = 0
    """index of this turn's first token in `token_ids`; the tokens before it replay the session"""

    @property
    def read_slot(self) -> int:
        if self.shared is not None:
            return self.shared.slot
        return self.slot if self.num_computed_tokens else ZERO_SLOT

    @property
    def lowest_slot(self) -> int:
        return self.slot if self.spare_slot == NO_SLOT else min(self.slot, self.spare_slot)

    @property
    def write_slot(self) -> int:
        """The slot that the next step writes. It keeps the old state while a rollback is possible."""
        return self.spare_slot if self.keeps_last_state else self.slot

    @property
    def keeps_last_state(self) -> bool:
        """Whether the next token may be a stop. A session's state must not contain a stop."""
        return (
            self.spare_slot != NO_SLOT and self.shared is None and self.token_ids[self.num_computed_tokens] == PENDING
        )

    @property
    def awaits_earlier_tokens(self) -> bool:
        """Whether tokens before the one being sampled are unknown to the host."""
        return len(self.token_ids) - self.prompt_end - len(self.output.tokens) > 1

    def may_sample_in(self, step: int) -> bool:
        return self.phase is Phase.RUNNING and step != self.discarded_sample_step

    @property
    def has_answered(self) -> bool:
        """Whether its turn is complete: it samples no more."""
        return self.phase in (Phase.CLOSING, Phase.ANSWERED)

    @property
    def is_recorded(self) -> bool:
        """Whether its turn is complete and given to the pool. It may be kept whatever happens to the job."""
        return self.has_answered and self.job.held_reason is None

    @property
    def is_in_steps(self) -> bool:
        return self.phase in (Phase.RUNNING, Phase.CLOSING)

    @property
    def sampler(self) -> str:
        """Name of the sampler that its job prefers, or ""."""
        return self.job.spec.sampler

    @property
    def is_prefill_only(self) -> bool:
        return self.may_sample and self.request.max_tokens == 0

    @property
    def reusable_ids(self) -> list[int]:
        """Tokens whose state a cached prefix may replace.

        Scored tokens are excluded: a token is scored when the one before it is read.
        """
        return self.token_ids[: self.scored.start] if self.scored else self.token_ids

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_next_token_pending(self) -> bool:
        return self.num_uncomputed_tokens == 1 and self.token_ids[-1] == PENDING

    @property
    def has_sampled(self) -> bool:
        return len(self.token_ids) > self.sampled_start

    @property
    def req_slot_holds_last_token(self) -> bool:
        """Whether its request slot on the device holds its last token. False after a jump forward."""
        return len(self.token_ids) > self.sampled_start and (not self.uncounted_ids or self.token_ids[-1] == PENDING)

    @property
    def reads_sampled_token(self) -> bool:
        """Whether a step in flight reads the host's last known token."""
        return self.token_ids[-1] == PENDING or self.discarded_sample_step == self.last_sample_step

    @property
    def lacks_spare_slot(self) -> bool:
        """Whether it could run in the next step with a second slot."""
        return (
            self.lease is not None
            and self.spare_slot == NO_SLOT
            and self.may_sample
            and self.is_next_token_pending
            and not self.members
        )

    @property
    def is_plain(self) -> bool:
        """Whether it uses one slot, the default sampler and no other feature.

        If a row is plain after its first token, it stays plain and keeps its slots while it is in the steps.
        """
        is_alone = self.lease is None and self.shared is None and not self.members and not self.cache_points
        samples_freely = self.matcher is None and self.request.sampling.is_fused and not self.sampler
        return is_alone and samples_freely and self.adapter is None and self.spare_slot == NO_SLOT

    def assign_slots(self, slot: int, req_slot: int) -> None:
        self.slot, self.req_slot, self.phase = slot, req_slot, Phase.RUNNING
        self.queue_s = time.monotonic() - self.job.submitted_at

    def may_run(self, oldest: int) -> bool:
        """Return whether a step may include the row.

        False if its last sampling is launched, a draft is being verified, or a launch could not be rolled back.

        oldest: see `Scheduler.schedule`
        """
        if len(self.token_ids) - self.num_computed_tokens != 1 or self.draft is not None:
            return False
        if self.token_ids[-1] != PENDING:
            return True
        if self.last_sample_step > oldest or len(self.token_ids) - self.prompt_end >= self.request.max_tokens:
            return False
        return self.lease is None or self.spare_slot != NO_SLOT

    def finish(self, reason: FinishReason, error: ErrorInfo | None = None) -> Finish:
        drafters = [one for one in self.drafters or () if one.num_drafted]
        return Finish(
            accepted_drafts={one.name: one.num_accepted for one in drafters},
            rejected_drafts={one.name: one.num_drafted - one.num_accepted for one in drafters},
            was_completed=self.matcher is not None and self.matcher.was_completed,
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.output.tokens),
            cached_tokens=self.cached_tokens,
            queue_s=self.queue_s,
            prefill_s=self.prefill_s,
            error=error,
            session_id=self.request.session.session_id if self.request.session else None,
            dialogue_idx=self.dialogue_idx,
            stop_string=self.output.matched_stop(self.request.stop_strings) if reason is FinishReason.STOP else b"",
        )
