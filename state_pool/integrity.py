"""Consistency checks of the pool's bookkeeping, for tests and the simulation. Engine thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from state_pool.cache.prefix_cache import PrefixCache
from state_pool.cache.tiers import Tiers
from state_pool.cache.tuned_states import TunedStates
from state_pool.layout import ZERO_SLOT
from state_pool.sessions import SessionIndex


def integrity_faults(
    index: SessionIndex, tiers: Tiers, prefix: PrefixCache, tuned: TunedStates, rows: Iterable[int] | None
) -> list[str]:
    """Return slots with unknown holders, sessions and prefixes on no tier or two, and wrong counts.

    `rows`: slots from `allocate` that the caller holds. None: nothing runs, so no session may be busy.
    """
    faults = _slot_faults(index, tiers, [*prefix.slots, *tuned.slots], rows or ()) + prefix.faults()
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


def _slot_faults(index: SessionIndex, tiers: Tiers, others: list[int], rows: Iterable[int]) -> list[str]:
    """Compare each slot's reference count with its owners.

    An owner is an idle session, a reader, a copy, a turn being committed or a row. `others`: slots of cached prefixes
    and tuned states.
    """
    owners = Counter(session.slot for session in index.l1 if session.slot != ZERO_SLOT)
    owners.update(slot for session in index if session.pending is not None for slot in (session.pending.slot,) if slot)
    owners.update(others)
    owners.update(tiers.pins)
    owners.update(tiers.copying)
    owners.update(rows)
    ref_counts = tiers.slots.ref_counts()
    return [] if dict(owners) == ref_counts else [f"slots held: {ref_counts}, owned: {dict(owners)}"]
