"""The slots of a mixture's members: all or none, and parked ones are continued or freed. No model."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from rwkv_batch.core.mixtures import (
    ParkedMixtures,
    allocate_members,
    begin_from,
    check_members,
    check_mixture,
    prepare_members,
    release_members,
    write_slots_of,
)
from rwkv_batch.core.sequence import NO_SLOT, Sequence
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.request import PromptLogprobs, SessionTurn
from test.engine.test_scheduler import job
from test.harness import make_request


class Pool:
    """Slots, pins and references to tuned states, all counted."""

    def __init__(self, slots: int = 9) -> None:
        self.free = list(range(100, 100 + slots))
        self.pins: Counter[int] = Counter()
        self.refs: Counter[str] = Counter()
        self.missing: set[str] = set()
        """states in no slot"""
        self.has_token_log = True
        self.config = SimpleNamespace(l1_sessions=4)
        self.tiers = SimpleNamespace(
            allocate=lambda: self.free.pop(0) if self.free else None,
            free=self.free.append,
            unpin=lambda slot: self.pins.subtract([slot]),
            slots=SimpleNamespace(num_usable=slots),
        )
        self.tuned = SimpleNamespace(acquire=self._acquire, drop_ref=self._drop, pin=self._pin, get=self._get)

    def _get(self, name: str) -> Any:
        if name == "unknown":
            raise KeyError(name)
        return name

    def _acquire(self, name: str) -> str:
        self.refs[name] += 1
        return name

    def _drop(self, name: str) -> None:
        self.refs[name] -= 1

    def _pin(self, name: str) -> int | None:
        if name in self.missing:
            return None
        slot = len(name)
        self.pins[slot] += 1
        return slot

    def check_idle(self, slots: int = 9) -> None:
        assert sorted(self.free) == list(range(100, 100 + slots))
        assert not any(self.pins.values()) and not any(self.refs.values())


MIX = [("poet", 3.0), ("", -1.0), ("clerk", 2.0)]


def row(pool: Pool, mixture: list[tuple[str, float]] | None = None) -> Sequence:
    sequence = job(1)[1][0]
    sequence.request = make_request([1], mixture=MIX if mixture is None else mixture)
    prepare_members(sequence, pool)  # type: ignore[arg-type]
    return sequence


def test_a_row_has_a_member_for_each_further_state() -> None:
    pool = Pool()
    sequence = row(pool)
    assert (sequence.tuned, sequence.weight) == ("poet", 0.75)
    assert [(member.tuned, member.weight) for member in sequence.members] == [(None, -0.25), ("clerk", 0.5)]
    assert pool.refs == {"poet": 1, "clerk": 1}
    release_members(sequence, pool)  # type: ignore[arg-type]
    pool.check_idle()


def test_all_members_get_slots_at_once() -> None:
    pool = Pool()
    sequence = row(pool)
    assert allocate_members(sequence, pool)  # type: ignore[arg-type]
    assert [member.slot for member in sequence.members] == [101, 102] and sorted(pool.free) == [100, *range(103, 109)]
    assert sequence.tuned_slot is not None and sequence.tuned_slot.slot == 4
    assert [member.shared and member.shared.slot for member in sequence.members] == [None, 5]
    assert pool.pins == {4: 1, 5: 1} and not any(pool.refs.values())
    assert allocate_members(sequence, pool) and len(pool.free) == 7, "it has them already"  # type: ignore[arg-type]
    sequence.slot = 100
    assert write_slots_of(sequence) == [100, 101, 102]
    sequence.tuned_slot.drop()
    release_members(sequence, pool)  # type: ignore[arg-type]
    pool.check_idle()


@pytest.mark.parametrize("missing", ["poet", "clerk", "a slot"])
def test_a_row_that_misses_something_holds_nothing(missing: str) -> None:
    pool = Pool(2 if missing == "a slot" else 9)
    pool.missing = {missing}
    sequence = row(pool)
    assert not allocate_members(sequence, pool)  # type: ignore[arg-type]
    assert len(pool.free) == (2 if missing == "a slot" else 9) and not any(pool.pins.values())
    assert [member.slot for member in sequence.members] == [NO_SLOT] * 2 and sequence.tuned_slot is None
    assert pool.refs == {"poet": 1, "clerk": 1}, "the states stay loaded until it starts"


@pytest.mark.parametrize(
    ("mixture", "message", "given"),
    [
        ([("", 1.0)] * 17, "states: has 17 states, the limit is 16", 17),
        ([("", 1.0), ("", -1.0)], "states: the weights must add up to more than 0", [1.0, -1.0]),
        ([("", math.inf)], "states: the weights must add up to more than 0", [math.inf]),
        ([("", math.nan)], "states: the weights must add up to more than 0", None),
    ],
)
def test_an_impossible_mixture_is_refused(mixture: list[tuple[str, float]], message: str, given: Any) -> None:
    with pytest.raises(ServiceError) as caught:
        check_members(mixture, Pool(40))  # type: ignore[arg-type]
    info = caught.value.info
    assert (info.kind, info.field, info.message) == (ErrorKind.INVALID_FIELD, "states", message)
    assert given is None or info.given == given


def test_a_mixture_may_have_half_the_slots() -> None:
    check_members([("", 1.0)] * 16, Pool(32))  # type: ignore[arg-type]
    check_members([("", 1.0)] * 4, Pool(9))  # type: ignore[arg-type]
    with pytest.raises(ServiceError, match="has 5 states, the limit is 4, half of this server's slots"):
        check_members([("", 1.0)] * 5, Pool(9))  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        check_members([("", 1.0), ("unknown", 1.0)], Pool())  # type: ignore[arg-type]


def test_what_cannot_be_combined_with_a_mixture() -> None:
    pool, two = Pool(), [("", 1.0), ("poet", 1.0)]
    turn = make_request([1], mixture=two, session=SessionTurn(session_id="s", resume_prompt=[1]))
    check_mixture(turn, pool)  # type: ignore[arg-type]
    check_mixture(make_request([1]), pool)  # type: ignore[arg-type]
    for scored in (make_request([1], mixture=two, prompt_logprobs=PromptLogprobs()),
                   make_request([1], mixture=two, candidates=[[1]])):  # fmt: skip
        with pytest.raises(
            ServiceError, match="states: a mixture cannot be combined with prompt_logprobs or candidates"
        ):
            check_mixture(scored, pool)  # type: ignore[arg-type]
    pool.has_token_log = False
    with pytest.raises(ServiceError, match="Set state_db, and durability to log or lazy") as caught:
        check_mixture(turn, pool)  # type: ignore[arg-type]
    assert caught.value.info.given == "s"


def lease(name: str = "s", replay: list[int] | None = None, *, exists: bool = True, branch: bool = False) -> Any:
    key = SimpleNamespace(session_id=name)
    return SimpleNamespace(session=SimpleNamespace(key=key), replay=replay or [7, 8], exists=exists, branch=branch)


def parked(pool: Pool, mixtures: ParkedMixtures, name: str = "s", *, branch: bool = False) -> Sequence:
    """Park a row that has read one of its two tokens."""
    sequence = row(pool, [("", 1.0)] * 3)
    assert allocate_members(sequence, pool)  # type: ignore[arg-type]
    sequence.slot, sequence.lease = pool.tiers.allocate(), lease(name, branch=branch)
    sequence.token_ids, sequence.num_computed_tokens = [7, 8], 1
    mixtures.park(sequence)
    return sequence


def test_the_next_turn_continues_from_parked_slots() -> None:
    pool = Pool()
    mixtures = ParkedMixtures(pool)  # type: ignore[arg-type]
    sequence = parked(pool, mixtures)
    slots = mixtures.slots
    assert write_slots_of(sequence) == [NO_SLOT] * 3 and len(slots) == 3 and len(pool.free) == 6
    assert mixtures.num_computed_tokens(lease(), 3) == 1
    for other in (lease(replay=[7]), lease(exists=False), lease("t"), lease(branch=True)):
        assert mixtures.num_computed_tokens(other, 3) == 0
    assert mixtures.num_computed_tokens(lease(), 2) == 0
    assert mixtures.take(lease(branch=True), 3) is None and mixtures.slots == slots
    found = mixtures.take(lease(), 3)
    assert found is not None and (found.slots, found.num_computed_tokens) == (slots, 1)
    following = row(pool, [("poet", 1.0), ("", 1.0), ("clerk", 1.0)])
    assert allocate_members(following, pool)  # type: ignore[arg-type]
    begin_from(following, found, pool)  # type: ignore[arg-type]
    assert (following.num_computed_tokens, following.cached_tokens) == (1, 1)
    assert following.tuned_slot is not None
    read = [following.tuned_slot.slot, *(member.shared and member.shared.slot for member in following.members)]
    assert read == slots and not any(pool.pins.values())
    following.tuned_slot.drop()
    release_members(following, pool)  # type: ignore[arg-type]
    pool.check_idle()


def test_parked_slots_of_another_history_are_freed() -> None:
    for other, members in ((lease(replay=[7]), 3), (lease(exists=False), 3), (lease(), 2)):
        pool = Pool()
        mixtures = ParkedMixtures(pool)  # type: ignore[arg-type]
        parked(pool, mixtures)
        assert mixtures.take(other, members) is None and mixtures.slots == []
        pool.check_idle()


def test_few_mixtures_stay_parked() -> None:
    """As many slots as sessions in slots: four, so one mixture of three. The oldest is freed first."""
    pool = Pool()
    mixtures = ParkedMixtures(pool)  # type: ignore[arg-type]
    parked(pool, mixtures, "a")
    first = mixtures.slots
    parked(pool, mixtures, "b")
    assert set(mixtures.slots).isdisjoint(first) and len(mixtures.slots) == 3
    parked(pool, mixtures, "b")
    assert len(mixtures.slots) == 3, "a session has one set"
    pool.config.l1_sessions = 6
    parked(pool, mixtures, "c")
    assert len(mixtures.slots) == 6
    branch = parked(pool, mixtures, "d", branch=True)
    assert len(mixtures.slots) == 6 and NO_SLOT not in write_slots_of(branch), "the next turn reads another dialogue"
    for slot in write_slots_of(branch):
        pool.tiers.free(slot)
    assert mixtures.drop_oldest() and len(mixtures.slots) == 3
    mixtures.clear()
    assert not mixtures.drop_oldest() and mixtures.slots == []
    pool.check_idle()
