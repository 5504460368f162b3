"""A device with states that tests can check: a state is a hash of every token read, in order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rwkv_batch.core.job_table import JobTable
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import PENDING, Sequence
from rwkv_batch.core.shares import Limits
from rwkv_batch.core.speculation import Speculation
from rwkv_batch.request import GenerateRequest, TokenLogprob
from rwkv_batch.tokenizer import END_OF_TEXT, VOCAB_SIZE, Tokenizer
from state_pool.layout import DUMMY_SLOT, ZERO_SLOT
from test.pool_fakes import FakeCopy, FakeHost
from test.simulation.violation import demand

TOKENIZER = Tokenizer()
_PRIME = (1 << 127) - 1
_FACTOR = 0x5851F42D4C957F2D14057B7EF767814F
_TEXTS = [b"a", b"b", b"ab", b"ba", b" a", b"\n", b"\n\n", b"aa", b"\xc3", b"\xa9", "é".encode(), b"stop", b" b"]
ALPHABET = [TOKENIZER.byte_table.index(text) for text in _TEXTS if text in TOKENIZER.byte_table]
"""The model's tokens: few that join in many ways, so that stops often begin and fail."""
PIECES = 4
"""Pieces per step, if steps have pieces."""


def fold(state: int, tokens: Iterable[int], mark: int = 0) -> int:
    """Return the state after more tokens, read with the adapter `mark`."""
    for token in tokens:
        state = (state * _FACTOR + token + 1 + mark) % _PRIME
    return state


def mixed(states: Iterable[int], shares: Iterable[float]) -> int:
    """Return the combined state that a mixture samples from; of another row, its state."""
    of_each = tuple(zip(states, shares, strict=True))
    return of_each[0][0] if len(of_each) == 1 else hash(of_each)


def sample_token(state: int, seed: int, step: int, ignore_eos: bool) -> int:
    """Return the token sampled in a state as sample number `step`. Depends only on the arguments."""
    number = hash((state, seed, step)) & 0xFFFFFFFF
    if number % 31 == 0 and not ignore_eos:
        return END_OF_TEXT
    return ALPHABET[(number >> 8) % len(ALPHABET)]


def score_of(state: int, token: int) -> float:
    """Return the log-probability of a token after a state."""
    return -float(hash((state, token)) & 0xFFFFF)


def bans_end(request: GenerateRequest) -> bool:
    """Return whether the end token is banned, as a sampler sees `ignore_eos`."""
    return request.sampling.logit_bias.get(END_OF_TEXT, 0.0) == float("-inf")


class Device:
    """Implements the state pool's arena with slots of 16 bytes."""

    state_bytes = 16
    vocab = VOCAB_SIZE
    layout: dict[str, tuple[str, tuple[int, ...]]] = {"a.wkv": ("int32", (3,)), "a.shift": ("int32", (1,))}  # noqa: RUF012
    fingerprint = "model-a"

    def __init__(self, num_slots: int, delays: list[int], rng: random.Random) -> None:
        self.num_slots = num_slots
        self.memory = [(1 << 126) + slot for slot in range(num_slots)]
        """a value of no computed state"""
        self.memory[ZERO_SLOT] = 0
        self.marks: dict[int, int] = {}
        """marks of adapters, by their slot"""
        self._delays = delays
        self._rng = rng

    def mark_of(self, sequence: Sequence) -> int:
        """Return the mark of a row's adapter."""
        return 0 if sequence.adapter is None else self.marks[sequence.adapter.slot_index]

    def _looks(self) -> int:
        return self._rng.choice(self._delays)

    def save(self, slot: int) -> FakeCopy:
        """Copy out. Reads the slot only at the end, so that a write meanwhile shows."""
        host = FakeHost({})

        def finish() -> None:
            data = self.memory[slot].to_bytes(16, "little")
            host.data = {"a.wkv": data[:12], "a.shift": data[12:]}

        return FakeCopy(host, self._looks(), finish)

    def load(self, slot: int, host: FakeHost) -> FakeCopy:
        """Copy in at once, because a device orders later reads after it."""
        self.memory[slot] = int.from_bytes(host.data["a.wkv"] + host.data["a.shift"], "little")
        return FakeCopy(host, self._looks())

    def host_state(self, parts: dict[str, bytes]) -> FakeHost:
        if {name: len(data) for name, data in parts.items()} != {"a.wkv": 12, "a.shift": 4}:
            raise ValueError(f"parts of {[len(data) for data in parts.values()]} bytes")
        return FakeHost({name: bytes(data) for name, data in parts.items()})


def read_slots(sequence: Sequence) -> list[int]:
    """The read slots of all members of a row's mixture."""
    return [sequence.read_slot, *(member.read_slot(sequence.num_computed_tokens) for member in sequence.members)]


def write_slots(sequence: Sequence) -> list[int]:
    return [sequence.write_slot, *(member.slot for member in sequence.members)]


def shares(sequence: Sequence) -> list[float]:
    return [sequence.weight, *(member.weight for member in sequence.members)] if sequence.members else [1.0]


@dataclass
class Step:
    rows: list[ScheduledRow]
    tokens: list[int]
    started: float = 0.0
    launched: float = 0.0
    host_s: float = 0.0
    awaits_masks: bool = False
    number: int = -1
    draft_states: dict[Sequence, list[int]] = field(default_factory=dict)
    """of rows with drafts: the states after each drafted token"""
    scores: list[tuple[Sequence, list[TokenLogprob]]] = field(default_factory=list)

    @property
    def num_drafted(self) -> int:
        return sum(map(len, self.draft_states.values()))


@dataclass
class Runner:
    """Replaces `ModelRunner` over such a device."""

    limits: Limits
    device: Device
    pool: Any
    overlaps: bool
    splits: bool
    """whether decoding rows are a separate part, as with graphs"""
    before_launch: Callable[[list[ScheduledRow]], None]
    """may raise a device error"""
    before_read: Callable[[Step], None]
    within: Callable[[], None] | None = None
    """called between two pieces of a step; None: no pieces"""
    tokenizer: Tokenizer = TOKENIZER
    vocab: int = VOCAB_SIZE
    _req_slots: dict[int, list[Any]] = field(default_factory=dict)
    """request slot -> [seed, samples, end banned, last sampled token]"""

    @property
    def step_sampler(self) -> Runner:
        """This runner: see `admit`."""
        return self

    def admit(self, rows: list[ScheduledRow], started: dict[Sequence, None]) -> None:
        for sequence in [row.sequence for row in rows if row.sequence in started]:
            del started[sequence]
            step, end = sequence.sampled_start - sequence.prompt_end, bans_end(sequence.request)
            self._req_slots[sequence.req_slot] = [sequence.request.sampling.seed, step, end, PENDING]

    @property
    def steps_in_flight(self) -> int:
        return self.limits.groups + self.overlaps

    @property
    def has_pieces(self) -> bool:
        return self.within is not None

    def split(self, rows: list[ScheduledRow], mixes: bool = True) -> list[list[ScheduledRow]]:
        """See `ModelRunner.split`. Runs the interleaving callback before the first part."""
        if self.within is not None:
            self.within()
        if not self.splits:
            return [rows] if rows else []
        decode, scored = [row for row in rows if row.uses_device_token], [row for row in rows if row.scored]
        rest = [row for row in rows if row not in decode and row not in scored]
        return [part for part in (rest, decode, scored) if part]

    def launch(
        self,
        rows: list[ScheduledRow],
        started: dict[Sequence, None],
        after: Iterable[Step] = (),
        between: Callable[[], None] | None = None,
    ) -> Step:
        """Compute a step: all rows read, then all write. Overtaking steps see states not written yet."""
        self.before_launch(rows)
        self.step_sampler.admit(rows, started)
        states = [self._computed(row) for row in rows]
        scores = [(row.sequence, self._score(row)) for row in rows if row.scored]
        self._check_slots(rows)
        draft_states = {row.sequence: self._drafted(row.sequence, states[i][0]) for i, row in enumerate(rows)}
        targets = [write_slots(row.sequence) for row in rows]
        if between is not None and self.within is not None:
            for _ in range(PIECES - 1):
                self.within()
                between()
        for slots, found in zip(targets, states, strict=True):
            for slot, state in zip(slots, found, strict=True):
                self.device.memory[slot] = state
        for sequence, drafted in draft_states.items():
            if sequence.draft is not None:
                for slot, state in zip(sequence.draft.slots, drafted, strict=True):
                    self.device.memory[slot] = state
        sampled = [
            self._sample(row, mixed(found, shares(row.sequence)))
            for row, found in zip(rows, states, strict=True)
            if row.samples_token
        ]
        return Step(
            rows, sampled, draft_states={one: of_row for one, of_row in draft_states.items() if of_row}, scores=scores
        )

    def _drafted(self, sequence: Sequence, state: int) -> list[int]:
        """Return the states after each drafted token of a row, from the one after its known tokens."""
        tokens, mark = [] if sequence.draft is None else sequence.draft.tokens, self.device.mark_of(sequence)
        return [fold(state, tokens[: i + 1], mark) for i in range(len(tokens))]

    @property
    def drafts(self) -> Runner:
        """This runner: see `verify`."""
        return self

    def guess_next(self, *_: object) -> None:
        """See `DraftSampler.guess_next`: there is no draft model."""

    def verify(self, step: Step, speculation: Speculation, jobs: JobTable, _: object) -> int:
        num_accepted = 0
        while rows := speculation.accepted_rows(step.rows):
            num_accepted += len(rows)
            drafts = [(row, row.draft) for row in rows]
            states = [step.draft_states[row.sequence][one.num_accepted - 1] for row, one in drafts if one is not None]
            sampled = [(self._sample(row, state), None) for row, state in zip(rows, states, strict=True)]
            jobs.commit(rows, sampled, step.number)  # type: ignore[arg-type]
        return num_accepted

    def next_tokens(self, sequence: Sequence, length: int, count: int) -> list[int]:
        """Return the tokens that a row will sample after its first `length`, if no step in flight samples for it."""
        if (known := self._req_slots.get(sequence.req_slot)) is None:
            return []
        seed, step, end, _ = known
        unread = sequence.token_ids[sequence.num_computed_tokens : length]
        state, mark, tokens = self.device.memory[sequence.read_slot], self.device.mark_of(sequence), list[int]()
        state = fold(state, unread, mark)
        for i in range(count):
            tokens.append(sample_token(state, seed, step + i, end))
            state = fold(state, tokens[-1:], mark)
        return tokens

    def _computed(self, row: ScheduledRow) -> list[int]:
        """Return each member's state after the row's tokens."""
        tokens, mark = self._tokens_of(row), self.device.mark_of(row.sequence)
        return [fold(self.device.memory[slot], tokens, mark) for slot in read_slots(row.sequence)]

    def _score(self, row: ScheduledRow) -> list[TokenLogprob]:
        """Return the scores that the row's tokens give."""
        sequence, prompt = row.sequence, row.sequence.request.prompt
        state, reported = self.device.memory[sequence.read_slot], []
        for i, token in enumerate(self._tokens_of(row), sequence.num_computed_tokens + 1):
            state = fold(state, [token], self.device.mark_of(sequence))
            if i in row.scored:
                reported.append(TokenLogprob(TOKENIZER.byte_table[prompt[i]], score_of(state, prompt[i]), []))
        return reported

    def _tokens_of(self, row: ScheduledRow) -> list[int]:
        sequence = row.sequence
        tokens = sequence.token_ids[sequence.num_computed_tokens :][: row.num_tokens]
        if sequence.is_next_token_pending:
            tokens = [self._req_slots[sequence.req_slot][3]]
        if len(tokens) != row.num_tokens or not tokens or not 0 <= min(tokens) <= max(tokens) < self.vocab:
            raise IndexError(f"token ids {tokens} of {row.num_tokens}")
        return tokens

    def _check_slots(self, rows: list[ScheduledRow]) -> None:
        sequences = [row.sequence for row in rows]
        drafting = [one for one in sequences if one.draft is not None]
        writes = [slot for one in sequences for slot in write_slots(one)]
        writes += [slot for one in drafting if one.draft is not None for slot in one.draft.slots]
        demand(len(set(writes)) == len(writes), f"two rows of a step write to one slot: {writes}")
        reads = [slot for one in sequences for slot in read_slots(one)]
        for i, target in enumerate(writes):
            demand(target not in (ZERO_SLOT, DUMMY_SLOT, -1), f"a row writes to slot {target}")
            others = [*reads[:i], *reads[i + 1 :]]
            demand(target not in others, f"slot {target} is read and written by two rows of a step")

    def _sample(self, row: ScheduledRow, state: int) -> int:
        req_slot = self._req_slots[row.sequence.req_slot]
        req_slot[3] = sample_token(state, req_slot[0], req_slot[1], req_slot[2])
        req_slot[1] += 1
        return int(req_slot[3])

    def read(self, step: Step) -> list[tuple[int, TokenLogprob | None]]:
        self.before_read(step)
        if self.within is not None:
            self.within()
        return [(token, None) for token in step.tokens]

    def read_scores(self, step: Step) -> list[tuple[Sequence, list[TokenLogprob]]]:
        return step.scores

    def is_device_lost(self) -> bool:
        return False

    @staticmethod
    def is_out_of_memory(error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def status(self) -> dict[str, Any]:
        return {"pool": self.pool.stats()}
