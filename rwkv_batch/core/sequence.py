"""What runs inside the engine: a job's rows, what each still has to read, and where its state lies.

Plain data of the engine's thread; `job_table.py`, `scheduler.py` and `state_manager.py` act on it.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rwkv_batch.core.grammar_compile_queue import Grammars
from rwkv_batch.core.output import RowOutput
from rwkv_batch.protocol import Sink
from rwkv_batch.request import Delta, GenerateRequest, Job
from sampling.grammar.matcher import Matcher
from state_pool.adapters import LoadedAdapter
from state_pool.arena import ZERO_SLOT
from state_pool.sessions import Lease
from state_pool.tuned_state import NO_BASE, TunedState


class Phase(enum.Enum):
    """Where a sequence stands."""

    WAITING = enum.auto()
    """has no slot yet"""
    RUNNING = enum.auto()
    """reads its prompt or decodes"""
    CLOSING = enum.auto()
    """has answered; reads the last tokens that its session state must contain"""
    ANSWERED = enum.auto()
    """has answered and left the steps; tells of its end when its turn is stored"""
    DONE = enum.auto()
    """has ended and left nothing behind"""


NO_SLOT = -1
NO_REQ_SLOT = -1
PENDING = -1
"""Stands in `Sequence.token_ids` for a token that is drawn but not yet known to the host."""
NOTHING_SCORED = range(0)


class SharedSlot:
    """A slot that several rows read from and none writes; given back when the last has moved on."""

    def __init__(self, slot: int, release: Callable[[], None], readers: int = 1) -> None:
        self.slot = slot
        self._release = release
        self._readers = readers

    def drop(self) -> None:
        """One reader needs it no more."""
        self._readers -= 1
        if self._readers == 0:
            self._release()


@dataclass(slots=True)
class RollbackState:
    """A state kept because the text after it may turn out to be a stop: it holds `count` drawn tokens."""

    slot: int
    count: int


@dataclass(slots=True, eq=False)
class Member:
    """A member of a mixture beside the row itself: it reads the same tokens from another state."""

    weight: float
    """part of its logits in what the row draws from"""
    tuned: TunedState | None = None
    """as `Sequence.tuned`"""
    slot: int = NO_SLOT
    shared: SharedSlot | None = None
    """where it begins, until it has read something; None: the zero state"""

    def read_slot(self, num_computed_tokens: int) -> int:
        """Where the state after so many tokens of the row lies."""
        if self.shared is not None:
            return self.shared.slot
        return self.slot if num_computed_tokens else ZERO_SLOT


@dataclass(slots=True, eq=False)
class RunningJob:
    """A job that was admitted. Owned by the engine thread."""

    spec: Job
    """what was asked"""
    sink: Sink
    grammars: Grammars
    """of its constraints"""
    unfinished: int
    """rows that have not sent their finish"""
    submitted_at: float = field(default_factory=time.monotonic)
    waiting: deque[Sequence] = field(default_factory=deque)
    """rows without a slot, in order"""
    live: dict[Sequence, None] = field(default_factory=dict)
    """rows that have not sent their finish, waiting ones among them (an ordered set)"""
    num_running: int = 0
    """rows that hold a place in the steps"""
    deltas: list[Delta] = field(default_factory=list)
    """gathered in this step"""
    job_id: str = field(init=False)
    """see `Job.job_id`"""
    is_batch: bool = field(init=False)
    """see `Job.is_batch`"""

    def __post_init__(self) -> None:
        self.job_id, self.is_batch = self.spec.job_id, self.spec.is_batch

    @property
    def client(self) -> str:
        """See `Job.client`."""
        return self.spec.client

    @property
    def deadline(self) -> float | None:
        """Monotonic time at which it times out."""
        return None if self.spec.timeout_s is None else self.submitted_at + self.spec.timeout_s


@dataclass(slots=True, eq=False)
class Sequence:
    """A row. What no launched step has read yet is `token_ids[num_computed_tokens:]`; its last token, once read, yields
    a draw.

    The state after the tokens before that lies in `shared.slot` while `shared` is set (a session, a cached prefix, a
    fork's base: never written by this row), else in `slot`.
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
    """For a session's row in the overlapped loop: where the state before the last read token is kept."""
    req_slot: int = NO_REQ_SLOT
    queue_s: float = 0.0
    """how long it has waited for its seat"""
    last_sample_step: int = 0
    """number of the step in which its last token is drawn"""
    shared: SharedSlot | None = None
    samples: bool = True
    """False: reads its tokens and never draws (the shared prompt of `n` continuations)."""
    fork_count: int = 1
    """rows of the job that end if this one ends before it has been forked"""
    tuned: TunedState | None = None
    """what it begins from, until it has a slot to read that is held for it; None: the zero state, or its session's"""
    tuned_slot: SharedSlot | None = None
    """the slot that holds that, from when it may start until it does"""
    members: list[Member] = field(default_factory=list)
    """of a mixture, beside the row itself"""
    weight: float = 1.0
    """the row's own, in a mixture"""
    adapter: LoadedAdapter | None = None
    """what its layers add for it; None: nothing, or a session whose lease is not ready says it"""
    base: int = NO_BASE
    """number of what it begins from: only rows with the same may share a prefix"""
    lease: Lease | None = None
    session_reported: bool = False
    """whether its turn has begun and was told to have, with how long its session was"""
    rollback_state: RollbackState | None = None
    prompt_end: int = 0
    """where the drawn tokens begin in `token_ids`"""
    sampled_start: int = 0
    """where those drawn by this engine begin, behind what another one has drawn (`GenerateRequest.resumed`)"""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    scored: range = NOTHING_SCORED
    """positions of the request's prompt whose log-probabilities it tells while it reads"""
    cache_points: list[int] = field(default_factory=list)
    """positions in `token_ids`, ascending, at which the state is offered to the prefix cache"""
    dialogue_idx: int | None = None
    """number of the dialogue that a branching turn has made"""
    matcher: Matcher | None = None
    """what holds its text to a grammar; it has taken the tokens that the host knows"""
    uncounted_ids: list[int] = field(default_factory=list)
    """tokens that it has without a draw, and that its sampler has not counted yet"""
    mask_time_debt_s: float = 0.0
    """seconds that steps took longer because of its grammar, and that it has not given back (`MaskTimeBalancer`)"""
    skipped_steps: int = 0
    """in a row that it has left to others for that"""
    discarded_sample_step: int = -1
    """number of the last step whose draw for it does not count, since what that draws was known meanwhile"""
    turn_start: int = 0
    """where this turn's own tokens begin in `token_ids`; before it lies what a session had to replay"""

    @property
    def read_slot(self) -> int:
        """Where the state after token_ids[:num_computed_tokens] lies."""
        if self.shared is not None:
            return self.shared.slot
        return self.slot if self.num_computed_tokens else ZERO_SLOT

    @property
    def lowest_slot(self) -> int:
        """The lower of the slots it holds, whichever it writes next."""
        return self.slot if self.spare_slot == NO_SLOT else min(self.slot, self.spare_slot)

    @property
    def write_slot(self) -> int:
        """Where the next step leaves its state: not over the old one while it may have to be taken back."""
        return self.spare_slot if self.keeps_last_state else self.slot

    @property
    def keeps_last_state(self) -> bool:
        """Whether the next token may turn out to be a stop, which a session's state must not contain."""
        return (
            self.spare_slot != NO_SLOT and self.shared is None and self.token_ids[self.num_computed_tokens] == PENDING
        )

    @property
    def awaits_earlier_tokens(self) -> bool:
        """Whether the host does not know all that it drew before the draw that was launched last."""
        return len(self.token_ids) - self.prompt_end - len(self.output.tokens) > 1

    def may_sample_in(self, step: int) -> bool:
        """Whether what the step of this number draws for it counts: it has not ended, and that is not known yet."""
        return self.phase is Phase.RUNNING and step != self.discarded_sample_step

    @property
    def has_answered(self) -> bool:
        """Whether its turn is recorded: it draws no more, and what is left is to be told that the turn is stored."""
        return self.phase in (Phase.CLOSING, Phase.ANSWERED)

    @property
    def is_in_steps(self) -> bool:
        """Whether steps may hold it: it has begun and not ended."""
        return self.phase in (Phase.RUNNING, Phase.CLOSING)

    @property
    def sampler(self) -> str:
        """The sampler that its job prefers, by name; "" = none."""
        return self.job.spec.sampler

    @property
    def is_prefill_only(self) -> bool:
        """Whether it ends when it has read its prompt."""
        return self.samples and self.request.max_tokens == 0

    @property
    def reusable_ids(self) -> list[int]:
        """What it may begin behind, if a state that has read it (but the last token) is there.

        A token's log-probability is known when the one before it is read.
        """
        return self.token_ids[: self.scored.start] if self.scored else self.token_ids

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that no launched step has read."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_next_token_pending(self) -> bool:
        """Whether its next token is not known to the host yet."""
        return self.num_uncomputed_tokens == 1 and self.token_ids[-1] == PENDING

    @property
    def has_sampled(self) -> bool:
        """Whether it has a token that this engine drew, or took without a draw."""
        return len(self.token_ids) > self.sampled_start

    @property
    def req_slot_holds_last_token(self) -> bool:
        """Whether the device knows its last token as the one drawn last for its seat: not one taken without a draw."""
        return len(self.token_ids) > self.sampled_start and (not self.uncounted_ids or self.token_ids[-1] == PENDING)

    @property
    def reads_sampled_token(self) -> bool:
        """Whether a step under way reads the token that the host has come to know last."""
        return self.token_ids[-1] == PENDING or self.discarded_sample_step == self.last_sample_step

    @property
    def lacks_spare_slot(self) -> bool:
        """Whether it could be in the next step already, had it a second slot."""
        return (
            self.lease is not None
            and self.spare_slot == NO_SLOT
            and self.samples
            and self.is_next_token_pending
            and not self.members
        )

    @property
    def is_plain(self) -> bool:
        """Whether it is by itself, draws by the engine's first choice and tells nothing but tokens.

        A row of which that is so when it has drawn remains so, and keeps its slot and its seat, for as long as it is in
        the steps.
        """
        is_alone = self.lease is None and self.shared is None and not self.members and not self.cache_points
        samples_freely = self.matcher is None and self.request.sampling.top_logprobs is None and not self.sampler
        return is_alone and samples_freely and self.adapter is None and self.spare_slot == NO_SLOT

    def assign_slots(self, slot: int, req_slot: int) -> None:
        """It takes part in the steps from now on, and writes its state into `slot`."""
        self.slot, self.req_slot, self.phase = slot, req_slot, Phase.RUNNING
        self.queue_s = time.monotonic() - self.job.submitted_at

    def may_run(self, oldest: int) -> bool:
        """Whether it belongs into the next step: it has not launched its last draw, nor could it not be taken back.

        `oldest`: see `Scheduler.schedule`.
        """
        if len(self.token_ids) - self.num_computed_tokens != 1:
            return False
        if self.token_ids[-1] != PENDING:
            return True
        if self.last_sample_step > oldest or len(self.token_ids) - self.prompt_end >= self.request.max_tokens:
            return False
        return self.lease is None or self.spare_slot != NO_SLOT
