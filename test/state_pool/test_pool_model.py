"""Order and isolation: many sessions over small tiers, compared with a dict of token lists."""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from state_pool.config import PoolConfig
from state_pool.errors import PoolError, SessionNotFound
from state_pool.session_key import LINEAR
from state_pool.sessions import Lease, LeaseState
from test.conftest import IS_LONG
from test.pool_fakes import Driver, FakeArena, Outcome, config_in, expected_state, fold
from test.pool_integrity import integrity_faults
from test.state_pool.prefix_model import MAX_ROWS, Prompts

TOKENS = st.lists(st.integers(0, 65535), min_size=1, max_size=12)
MAX_OPEN = 5
Key = tuple[str, int]


@dataclass
class Open:
    """A running turn with its expected history."""

    lease: Lease
    key: Key
    parent: int | None
    slot: int | None = None
    started: bool = False


@dataclass
class Committing:
    """A recorded turn without a reported outcome."""

    key: Key
    outcome: Outcome


class World:
    """A pool, its model, and the steps that drive both. Used by hypothesis and by the soak test."""

    def __init__(self, durability: str, delay: int, num_slots: int = 24, **changes: object) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pool-model-"))
        limits: dict[str, object] = {"checkpoint_tokens": 40, "checkpoint_idle_s": 0.2, "transfer_states": 2}
        self.config = config_in(self.folder, durability=durability, **(limits | changes))
        self.num_slots = num_slots
        self.delay = delay
        self.model: dict[Key, list[int]] = {}
        self.seen_numbers: set[Key] = set()
        self.open: list[Open] = []
        self.committing: list[Committing] = []
        self.start()

    def start(self) -> None:
        """Open a new pool on the same database."""
        self.driver = Driver(FakeArena(num_slots=self.num_slots, delay=self.delay), self.config)
        self.pool = self.driver.pool
        self.prompts = Prompts(self.driver)

    def begin(self, name: str, parent: int | None) -> None:
        """Check out a session. An unknown parent must be refused."""
        if len(self.open) >= MAX_OPEN:
            return
        try:
            lease = self.pool.turns.checkout(name, parent)
        except SessionNotFound:
            assert parent is not None and parent != 0
            assert (name, parent) not in self.model or self.is_committing((name, parent))
            return
        if parent not in (None, 0):
            assert (name, parent) in self.model
        self.open.append(Open(lease, (name, LINEAR if parent is None else parent), parent))

    def is_committing(self, key: Key) -> bool:
        """Whether the turn is not yet reported durable. Its new dialogue's number is unknown then."""
        return any(committing.key == key for committing in self.committing)

    def step(self) -> None:
        """One engine step: start ready turns, record reported outcomes."""
        self.pool.poll()
        for turn in self.open:
            if turn.lease.state is LeaseState.READY and not turn.started:
                self.check_start(turn)
                turn.started = True
        for done in [c for c in self.committing if c.outcome.known]:
            self.committing.remove(done)
            assert done.outcome.ok, done.outcome.calls
        assert integrity_faults(self.pool, rows=self.prompts.slots) == []
        self.prompts.check()

    def check_start(self, turn: Open) -> None:
        """A turn must read its whole history, from any tier."""
        lease = turn.lease
        history = [] if turn.parent == 0 else self.history(turn.key)
        assert lease.exists == bool(history)
        assert lease.num_tokens == len(history)
        state = fold(self.driver.arena.memory[lease.read_slot], lease.replay)
        assert np.array_equal(state, expected_state(history)), f"{turn.key} does not hold its history"

    def history(self, key: Key) -> list[int]:
        """Return the model's tokens. The pool starts a turn only after the previous one is durable."""
        return self.model.get(key, [])

    def finish(self, at: int, tokens: list[int]) -> None:
        """Compute, record and check in one ready turn."""
        ready = [turn for turn in self.open if turn.started and turn.lease.state is LeaseState.READY]
        if not ready:
            return
        turn = ready[at % len(ready)]
        lease = turn.lease
        slot = self.pool.tiers.allocate()
        if slot is None:
            return
        self.open.remove(turn)
        self.driver.arena.run(lease.read_slot, slot, [*lease.replay, *tokens])
        outcome = Outcome()
        self.pool.turns.record(lease, tokens, outcome)
        new = turn.key
        if turn.parent is not None:
            assert lease.dialogue_idx is not None
            new = (turn.key[0], lease.dialogue_idx)
            assert new not in self.seen_numbers, "a dialogue's number is given once"
            self.seen_numbers.add(new)
        self.model[new] = ([] if turn.parent == 0 else self.history(turn.key)) + tokens
        self.committing.append(Committing(new, outcome))
        self.pool.turns.checkin(lease, slot)

    def cancel(self, at: int) -> None:
        """Release one turn, ready or waiting."""
        if self.open:
            turn = self.open.pop(at % len(self.open))
            self.pool.turns.release(turn.lease)

    def delete(self, name: str, prefix: bool) -> None:
        """Delete a session, also during turns; these fail."""
        self.drain_commits()
        gone = [key for key in self.model if (key[0].startswith(name) if prefix else key[0] == name)]
        if not prefix and not gone:
            return
        for key in gone:
            del self.model[key]
        outcome = Outcome()
        assert self.pool.turns.delete(name, prefix, outcome) >= len(gone)
        for turn in [t for t in self.open if t.key[0] == name or (prefix and t.key[0].startswith(name))]:
            assert turn.lease.state is LeaseState.FAILED
            assert isinstance(turn.lease.error, SessionNotFound)
            self.pool.turns.release(turn.lease)
            self.open.remove(turn)
        self.driver.until(lambda: outcome.known)
        assert outcome.ok

    def drain_commits(self) -> None:
        """Wait until every recorded turn is durable."""
        while self.committing:
            self.step()

    def restart(self, orderly: bool = True) -> None:
        """Restart the pool. A disorderly end stores no states, so turns are replayed from the log."""
        while self.open:
            self.cancel(0)
        self.prompts.cancel_all()
        self.drain_commits()
        self.check_rest()
        if not orderly and self.config.durability == "log":
            self.pool._flush = lambda store: None  # type: ignore[method-assign]
        self.pool.close()
        self.start()
        assert self.driver.list_sessions().total == len(self.model)

    def check_rest(self) -> None:
        """With nothing running: check slot owners, tiers and counts."""
        self.driver.settle()
        assert integrity_faults(self.pool) == []
        status = self.driver.list_sessions(limit=10_000)
        names = sorted(session.session_id for session in status.sessions)
        assert names == sorted(name if n == LINEAR else f"{name}:{n}" for name, n in self.model)
        stamps = [session.updated for session in status.sessions]
        assert stamps == sorted(stamps, reverse=True)
        tiers = [status.in_slots, status.in_host_memory, status.on_disk]
        assert sum(tiers) == status.total == len(self.model)
        assert tiers[1] <= self.config.l2_sessions + self.config.transfer_states

    def check_all(self) -> None:
        for (name, dialogue), history in self.model.items():
            state = self.driver.state(name, None if dialogue == LINEAR else dialogue)
            assert np.array_equal(state, expected_state(history)), (name, dialogue)

    def end(self) -> None:
        """Check everything, then repeat after a restart."""
        self.restart()
        self.check_all()
        self.check_rest()
        self.pool.close()
        shutil.rmtree(self.folder)


BLOCKS = st.lists(st.integers(0, 2), min_size=1, max_size=3)
NAMES = st.sampled_from(["a", "b", "a:1", "ab", "ünï\n'; --", "c"])


class PoolMachine(RuleBasedStateMachine):
    """Hypothesis searches for a short failing run."""

    durability = "log"
    limits: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.durability, delay=1, **self.limits)

    @rule(name=NAMES)
    def begin(self, name: str) -> None:
        self.world.begin(name, None)

    @rule(name=NAMES, parent=st.integers(0, 4))
    def branch(self, name: str, parent: int) -> None:
        self.world.begin(name, parent)

    @rule(at=st.integers(0, MAX_OPEN), tokens=TOKENS)
    def finish(self, at: int, tokens: list[int]) -> None:
        self.world.finish(at, tokens)

    @rule(at=st.integers(0, MAX_OPEN))
    def cancel(self, at: int) -> None:
        self.world.cancel(at)

    @rule(name=NAMES, prefix=st.booleans())
    def delete(self, name: str, prefix: bool) -> None:
        self.world.delete(name, prefix)

    @rule(blocks=BLOCKS, tail=st.integers(0, 2), announced=st.booleans())
    def prompt(self, blocks: list[int], tail: int, announced: bool) -> None:
        self.world.prompts.begin(blocks, 60_000 + tail, announced)

    @rule(at=st.integers(0, MAX_ROWS))
    def read_on(self, at: int) -> None:
        self.world.prompts.advance(at)

    @rule(at=st.integers(0, MAX_ROWS))
    def drop_prompt(self, at: int) -> None:
        self.world.prompts.cancel(at)

    @rule()
    def keep_house(self) -> None:
        self.world.pool._next_housekeeping = 0.0

    @rule(orderly=st.booleans())
    def restart(self, orderly: bool) -> None:
        self.world.restart(orderly)

    @invariant()
    def step(self) -> None:
        self.world.step()

    def teardown(self) -> None:
        self.world.end()


class TurnMachine(PoolMachine):
    """The same with durability "turn"."""

    durability = "turn"


class LazyMachine(PoolMachine):
    """The same with durability "lazy"."""

    durability = "lazy"


class TightMachine(PoolMachine):
    """The same with very few slots. Each tier holds one session and one prefix."""

    limits: ClassVar[dict[str, int]] = {
        "num_slots": 8,
        "l1_sessions": 1,
        "l2_sessions": 1,
        "prefix_cache_slots": 1,
        "prefix_cache_l2": 1,
    }


class PrefixMachine(RuleBasedStateMachine):
    """Only the prefix cache, without a disk: short runs with one or two prefixes per tier."""

    @initialize(num_slots=st.integers(5, 7), delay=st.integers(0, 2), l1=st.integers(1, 2), l2=st.integers(0, 2))
    def start(self, num_slots: int, delay: int, l1: int, l2: int) -> None:
        config = PoolConfig(state_db="", prefix_cache_slots=l1, prefix_cache_l2=l2, l1_sessions=1, l2_sessions=1)
        self.driver = Driver(FakeArena(num_slots=num_slots, delay=delay), config)
        self.pool = self.driver.pool
        self.prompts = Prompts(self.driver)
        self.held: list[int] = []

    @rule(blocks=BLOCKS, tail=st.integers(0, 2), announced=st.booleans())
    def prompt(self, blocks: list[int], tail: int, announced: bool) -> None:
        self.prompts.begin(blocks, 60_000 + tail, announced)

    @rule(at=st.integers(0, MAX_ROWS))
    def read_on(self, at: int) -> None:
        self.prompts.advance(at)

    @rule(at=st.integers(0, MAX_ROWS))
    def drop_prompt(self, at: int) -> None:
        self.prompts.cancel(at)

    @rule(blocks=BLOCKS, tail=st.integers(0, 2))
    def read_whole(self, blocks: list[int], tail: int) -> None:
        self.prompts.read_whole(blocks, 60_000 + tail)

    @rule(left=st.integers(0, 2))
    def press(self, left: int) -> None:
        """Other rows take all but some slots, so cached prefixes are evicted."""
        for _ in range(max(1, self.pool.tiers.slots.num_free - left)):
            slot = self.pool.tiers.allocate()
            if slot is not None:
                self.held.append(slot)

    @rule()
    def relieve(self) -> None:
        if self.held:
            self.pool.tiers.free(self.held.pop())

    @rule()
    def step(self) -> None:
        self.pool._next_housekeeping = 0.0
        self.pool.poll()

    @invariant()
    def check(self) -> None:
        if hasattr(self, "pool"):
            assert integrity_faults(self.pool, rows=[*self.prompts.slots, *self.held]) == []
            self.prompts.check()

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.prompts.cancel_all()
            while self.held:
                self.pool.tiers.free(self.held.pop())
            for _ in range(8):
                self.step()
            assert integrity_faults(self.pool) == []
            sizes, config = self.pool.prefixes.sizes, self.pool.config
            assert sizes[0] <= config.prefix_cache_slots
            assert sizes[1] <= config.prefix_cache_l2
            self.pool.close()


_SETTINGS = settings(
    max_examples=25 if IS_LONG else 15,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking a run of 50 steps takes minutes; the run is printed anyway
)
TestLog = PoolMachine.TestCase
TestLog.settings = _SETTINGS
TestTurn = TurnMachine.TestCase
TestTurn.settings = settings(_SETTINGS, max_examples=15)
TestLazy = LazyMachine.TestCase
TestLazy.settings = settings(_SETTINGS, max_examples=15)
TestTight = TightMachine.TestCase
TestTight.settings = settings(_SETTINGS, max_examples=20 if IS_LONG else 15)
TestPrefixes = pytest.mark.slow(PrefixMachine.TestCase)
TestPrefixes.settings = settings(_SETTINGS, max_examples=90 if IS_LONG else 50, stateful_step_count=50)


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["log", "turn", "lazy"] if IS_LONG else ["log"])
def test_a_thousand_sessions_over_small_tiers(durability: str) -> None:
    """1,000 sessions, 4 in slots and 8 in host memory. Forks, cancels, deletes and restarts are random."""
    rng = random.Random(7)
    world = World(durability, delay=2)
    for step in range(3000):
        name = f"s{rng.randrange(1000)}"
        action = rng.random()
        tokens = [rng.randrange(65536) for _ in range(rng.randrange(1, 24))]
        if action < 0.35:
            world.begin(name, None)
        elif action < 0.45:
            name = f"s{rng.randrange(40)}"
            world.begin(name, rng.choice([0, 0, 1, 2, 3]))
        elif action < 0.9:
            world.finish(rng.randrange(MAX_OPEN), tokens)
        elif action < 0.95:
            world.cancel(rng.randrange(MAX_OPEN))
        elif action < 0.97:
            world.delete(name, rng.random() < 0.1)
        world.step()
        if step % 1000 == 999:
            world.restart(orderly=step > 2000)
    # Check the amount of work. Under "lazy" a crash loses unwritten turns, so only later ones count.
    assert len(world.model) > (100 if durability == "lazy" else 250)
    world.end()


def test_the_model_notices_a_wrong_state() -> None:
    """Tests the test: a changed slot of an idle session is found."""
    world = World("log", delay=0)
    world.driver.turn("a", [1, 2, 3])
    world.model[("a", LINEAR)] = [1, 2, 3]
    world.driver.arena.memory[2:] ^= 1
    with pytest.raises((AssertionError, PoolError)):
        world.check_all()
    world.pool.close()
    shutil.rmtree(world.folder)
