"""Consistency checks of the state pool's bookkeeping. Engine thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from state_pool.cache.prefix_cache import PrefixCache
from state_pool.cache.slots import Slots
from state_pool.layout import ZERO_SLOT
from state_pool.pool import StatePool
from state_pool.sessions import SessionIndex


def integrity_faults(pool: StatePool, rows: Iterable[int] | None = None, drafts: Iterable[int] = ()) -> list[str]:
    """Return the inconsistencies of slots, sessions, prefixes and counts; empty if there are none.

    `rows`: slots from `allocate` that the caller holds. None: nothing runs, so no session may be busy.
    drafts: slots that are kept for drafts
    """
    index: SessionIndex = pool._index
    faults = _slot_faults(pool, [*(rows or ()), *drafts]) + _prefix_faults(pool.prefixes)
    for session in index:
        tiers_of_it = [session.slot is not None, session.host is not None]
        if tiers_of_it != [session in index.l1, session in index.l2] or all(tiers_of_it):
            faults.append(f"{session.key.display_name!r} has slot {session.slot} and is on the wrong list")
        if rows is None and (session.busy or session.moving or session.loading):
            faults.append(f"{session.key.display_name!r} is busy: {session.readers} readers, moving {session.moving}")
    for session in [*index.l1, *index.l2]:
        if index.get(session.key) is not session:
            faults.append(f"{session.key.display_name!r} is on a tier's list and was removed")
    if [s for s in index if s.unusable is not None] != [s for s in index if s in index.unusable]:
        faults.append(f"{len(index.unusable)} sessions are counted as unusable")
    if sum(session.exists for session in index) != index.num_existing:
        faults.append(f"{index.num_existing} sessions are counted as existing")
    return faults


def _slot_faults(pool: StatePool, rows: Iterable[int]) -> list[str]:
    """Compare each slot's reference count with its owners.

    An owner is an idle session, a reader, a copy, a turn being committed, a row, a cached prefix or a tuned state.
    """
    index, tiers = pool._index, pool.tiers
    owners = Counter(session.slot for session in index.l1 if session.slot != ZERO_SLOT)
    owners.update(slot for session in index if session.pending is not None for slot in (session.pending.slot,) if slot)
    owners.update([*pool.prefixes.slots, *pool.tuned.slots])
    owners.update(tiers._pins)
    owners.update(transfer.slot for transfer in tiers._transfers if transfer.slot != ZERO_SLOT)
    owners.update(rows)
    held = ref_counts(tiers.slots)
    return [] if dict(owners) == held else [f"slots held: {held}, owned: {dict(owners)}"]


def ref_counts(slots: Slots) -> dict[int, int]:
    """Return slot -> number of references, for held slots."""
    return {slot: count for slot, count in enumerate(slots._ref_counts) if count}


def _prefix_faults(cache: PrefixCache) -> list[str]:
    """Return the faults of a prefix cache.

    Faults are entries on no tier or two, unreachable or duplicate entries, and unsorted buckets.
    """
    known = [entry for bucket in cache._buckets.values() for entry in bucket]
    faults: list[str] = []
    if sorted(map(id, known)) != sorted(map(id, [*cache._l1, *cache._l2])):
        faults.append(f"{len(known)} prefixes can be found, {len(cache._l1)} + {len(cache._l2)} are on the tiers")
    if len({entry.ids for entry in known}) != len(known):
        faults.append("a prefix is cached twice")
    for entry in known:
        tiers_of_it = [entry.slot is not None, entry.host is not None]
        if tiers_of_it != [entry in cache._l1, entry in cache._l2] or all(tiers_of_it):
            faults.append(f"a prefix of {entry.num_tokens} tokens has slot {entry.slot} and is on the wrong list")
    lengths = [[len(entry.ids) for entry in bucket] for bucket in cache._buckets.values()]
    if any(found != sorted(found, reverse=True) for found in lengths):
        faults.append("entries of one bucket are not sorted by length")
    return faults
