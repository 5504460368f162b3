"""Invariants of the engine's bookkeeping after every step, recomputed from its parts."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

from rwkv_batch.core.sequence import NO_REQ_SLOT, NO_SLOT, Phase, Sequence
from rwkv_batch.engine import Engine
from state_pool.layout import FIRST_FREE_SLOT, ZERO_SLOT
from state_pool.pool import StatePool
from state_pool.sessions import LeaseState
from test.harness import has_rows_without_job
from test.pool_integrity import integrity_faults, ref_counts
from test.simulation.violation import Violation, demand

MAX_READY_STEPS = 10
"""Steps until a turn starts whose session's state is in a slot."""


def check_step(engine: Engine) -> None:
    pool: Any = engine.model_runner.pool
    clients = _clients(engine)
    paused = [row for rows in clients for row in rows.paused]
    rows = list(dict.fromkeys([*engine.scheduler._running, *paused]))
    """those that hold slots: running and paused ones"""
    _check_scheduler(engine, clients, paused, rows)
    _check_jobs(engine)
    _check_slots(engine, pool, rows)
    _check_prefixes(pool)
    _check_tiers(pool)


class HeadOfLine:
    """Checks that no turn waits behind those of other sessions. An older one may start first."""

    def __init__(self) -> None:
        self._waited: dict[Any, int] = {}
        """leases that could start -> steps in which neither they nor older ones did"""
        self._numbers: dict[Any, int] = {}
        """waiting leases -> their numbers, in the order in which they came"""
        self._next_number = itertools.count(1)

    def check(self, pool: Any) -> None:
        """Call after every step. Raises Violation."""
        tiers, waiting, before = pool.tiers, pool.turns.lease_queue._waiting, self._numbers
        started = [number for lease, number in before.items() if lease.state is LeaseState.READY]
        # A lease that has waited before keeps its number: the queue's order changes.
        self._numbers = {lease: before.get(lease) or next(self._next_number) for lease in waiting}
        able = [lease for lease in waiting if _could_start(lease, tiers)]
        oldest_started = min(started, default=math.inf)
        self._waited = {
            lease: 0 if oldest_started < self._numbers[lease] else self._waited.get(lease, 0) + 1 for lease in able
        }
        late = [lease.session.key for lease, steps in self._waited.items() if steps > MAX_READY_STEPS]
        demand(not late, f"turns wait although their sessions are in memory and slots are free: {late}")


def _could_start(lease: Any, tiers: Any) -> bool:
    """Return whether a waiting turn could start. Then its state is in memory, and a slot is free for it."""
    source = lease.source
    if lease.state is not LeaseState.WAITING or source is None:
        return False
    if source.slot is not None:
        return source.slot in tiers._pins or tiers.can_pin
    return source.host is not None and tiers.can_pin and tiers.slots.num_free > 0


def _clients(engine: Engine) -> list[Any]:
    admission: Any = engine.scheduler.admission
    return [rows for queue in (admission.interactive, admission.batch) for rows in queue._clients.values()]


def _check_scheduler(engine: Engine, clients: list[Any], paused: list[Sequence], rows: list[Sequence]) -> None:
    scheduler: Any = engine.scheduler
    admission, limits = scheduler.admission, scheduler.limits
    req_slots = [row.req_slot for row in rows if row.req_slot != NO_REQ_SLOT] + list(admission.free_req_slots)
    demand(sorted(req_slots) == list(range(limits.num_req_slots)), "a request slot has no owner, or two")
    demand(all(row.phase in (Phase.RUNNING, Phase.CLOSING) for row in rows), "a running row has ended")
    demand(not set(paused) & set(scheduler._running), "a row that gave way is in the steps")
    placed = [row for client in clients for row in client.running]
    demand(set(placed) <= set(scheduler._running) and len(set(placed)) == len(placed), "a place without a row")
    demand(all(row in placed for row in scheduler._running if row.phase is Phase.RUNNING), "a row without a place")
    demand(len(placed) <= limits.max_running, f"{len(placed)} rows have a place")
    demand(admission.paused_rows == len(paused) <= limits.max_paused, f"{admission.paused_rows} rows gave way")
    _check_waiting(engine, clients, placed)


def _check_waiting(engine: Engine, clients: list[Any], placed: list[Sequence]) -> None:
    admission: Any = engine.scheduler.admission
    jobs = list(engine.jobs._jobs.values())
    waiting = [row for job in jobs for row in job.waiting]
    demand(admission.waiting_rows == len(waiting), f"{admission.waiting_rows} rows are counted, {len(waiting)} wait")
    demand(len(set(waiting)) == len(waiting), "a row waits twice")
    demand(all(row.phase is Phase.WAITING for row in waiting), "a waiting row has begun or ended")
    listed = [job for client in clients for job in client.jobs]
    demand(len(set(listed)) == len(listed), "a job waits twice")
    demand(
        set(listed) == {job for job in jobs if job.waiting},
        "a job with waiting rows is not in the line, or one without",
    )
    demand({*admission.interactive.forked, *admission.batch.forked} <= set(waiting), "a forked row waits nowhere")
    places = Counter(id(row.job) for row in placed)
    for job in jobs:
        if job.num_running != (count := places[id(job)]):
            raise Violation(f"{job.job_id} is counted with {job.num_running} places and has {count}")


def _check_jobs(engine: Engine) -> None:
    for job in engine.jobs._jobs.values():
        live = sum(row.fork_count for row in job.live)
        if not live == job.unfinished > 0:
            raise Violation(f"{job.job_id}: {live} rows live, {job.unfinished} unfinished")
        demand(not job.deltas, "deltas were not delivered")


def _check_slots(engine: Engine, pool: Any, running: list[Sequence]) -> None:
    """Each slot has one owner, and each holder is known."""
    tiers = pool.tiers
    everyone = list(dict.fromkeys([*running, *(row for job in engine.jobs._jobs.values() for row in job.live)]))
    members = [member for row in everyone for member in row.members]
    sessions = {*pool._index, *pool._index.l1}
    pending = [session.pending for session in sessions if session.pending is not None]
    owners = Counter(  # once for all: each update takes microseconds, and this runs after every step
        [
            *(slot for row in everyone for slot in (row.slot, row.spare_slot) if slot != NO_SLOT),
            *(row.rollback_state.slot for row in everyone if row.rollback_state is not None),
            *(slot for row in everyone if row.draft is not None for slot in row.draft.slots),
            *(member.slot for member in members if member.slot != NO_SLOT),
            *engine.speculation._slots._free,
            *pool.tuned.slots,
            *engine.state_manager.parked.slots,
            *(session.slot for session in sessions if session.slot not in (None, ZERO_SLOT)),
            *(turn.slot for turn in pending if turn.slot is not None),
            *pool.prefixes.slots,
        ]
    )
    twice = {slot: count for slot, count in owners.items() if count > 1 or slot < FIRST_FREE_SLOT}
    demand(not twice, f"slots with more than one owner, or without a permitted owner: {twice}")
    expected = owners
    expected.update(tiers._pins)
    expected.update(transfer.slot for transfer in tiers._transfers)
    readers = [*[one.shared for one in [*running, *_forked(engine), *members]], *(row.tuned_slot for row in everyone)]
    shared = Counter(base.slot for base in set(readers) if base is not None)
    held = ref_counts(tiers.slots)
    unsettled = 1 if pool.pending else 0
    """slots that a deleted session's turn may hold until its end is reported"""
    for slot in {*held, *expected}:
        minimum, maximum = expected[slot], expected[slot] + shared[slot] + unsettled
        if not minimum <= held.get(slot, 0) <= maximum:
            raise Violation(f"slot {slot} is held {held.get(slot, 0)} times, not {minimum}..{maximum}")
    free = sorted(tiers.slots._free)
    if free != [slot for slot in range(FIRST_FREE_SLOT, len(tiers.slots._ref_counts)) if slot not in held]:
        raise Violation(f"free {free}")


def _forked(engine: Engine) -> list[Sequence]:
    admission: Any = engine.scheduler.admission
    return [*admission.interactive.forked, *admission.batch.forked]


def _check_prefixes(pool: Any) -> None:
    cache = pool.prefixes
    filed = [entry for bucket in cache._buckets.values() for entry in bucket]
    listed = [*cache._l1, *cache._l2]
    demand(len(set(filed)) == len(filed) == len(listed), f"{len(filed)} prefixes can be found, {len(listed)} are kept")
    demand(set(filed) == set(listed), "a prefix is kept that cannot be found")
    for entry in filed:
        expected_counts = (entry in cache._l1, entry in cache._l2)
        demand((entry.slot is not None, entry.host is not None) == expected_counts, "a prefix is on the wrong tier")
    keys = [entry.ids for entry in filed]
    demand(len(set(keys)) == len(keys), "a prefix is cached twice")


def _check_tiers(pool: Any) -> None:
    index = pool._index
    for session in index:
        found = [session in index.l1, session in index.l2]
        if found != [session.slot is not None, session.host is not None] or all(found):
            raise Violation(f"{session.key} is on the wrong tier")
    demand({*index.l1, *index.l2} <= set(index), "a session that was forgotten is on a tier")
    existing = sum(session.exists for session in index)
    demand(index.num_existing == existing, f"{index.num_existing} sessions are counted, {existing} exist")
    config = pool.config
    maximum = config.l2_sessions + config.transfer_states
    demand(
        pool._store is None or len(index.l2) <= maximum + 1, f"{len(index.l2)} sessions in host memory, limit {maximum}"
    )


def check_rest(engine: Engine, pool: StatePool) -> None:
    engine.state_manager.parked.clear()
    demand(not pool.adapters.num_refs, f"{pool.adapters.num_refs} adapters are held at rest")
    faults = integrity_faults(pool, drafts=engine.speculation._slots._free)
    demand(not faults, f"at rest: {faults}")
    demand(not has_rows_without_job(engine), "at rest: rows are left without a job")
    demand(not engine.scheduler.has_work and not _clients(engine), "rows are left")
    pins: Any = pool.tiers._pins
    demand(not pins, f"pinned at rest: {pins}")
    coming: Any = pool.prefixes._in_progress
    demand(not coming, "rows wait for prefixes that no row computes")
