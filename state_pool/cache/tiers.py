"""Places of states: slots (L1), host memory (L2), disk (L3), and the copies between them. Engine thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from state_pool.cache.checkpoints import Checkpoints, StateQueue
from state_pool.cache.slots import Slots
from state_pool.config import PoolConfig
from state_pool.crash_points import reach
from state_pool.disk.operations import Loaded
from state_pool.layout import ZERO_SLOT, Arena, Copy, HostState
from state_pool.sessions import Session, SessionIndex

logger = logging.getLogger(__name__)


class Evictable(Protocol):
    """Another owner of slots that can free some: the prefix cache, the tuned states."""

    def oldest(self) -> float | None:
        """Return when its least recently used freeable slot was last used. None: it can free none."""

    def evict(self) -> None:
        """Start to free the slot of `oldest`."""


@dataclass(slots=True, eq=False)
class _Transfer:
    copy: Copy
    finish: Callable[[HostState], None]
    slot: int


@dataclass(slots=True)
class TierCounters:
    demotions: int = 0
    promotions: int = 0
    loads: int = 0
    lost: int = 0
    left_to_log: int = 0
    """States dropped because the log can rebuild them, while the disk was behind."""
    stale_turns: int = 0
    """Turns refused because another engine had taken the session."""
    expired: int = 0
    """Sessions deleted because no turn used them for `session_ttl`."""
    evicted: int = 0
    """Sessions deleted because the database exceeded `state_db_max_gb`."""
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    bytes_from_disk: int = 0

    def count_removed(self, count: int, last_use: float | None, *, is_expired: bool) -> None:
        """Count and log sessions that the pool deletes by itself. `last_use`: the latest of them, Unix time."""
        if is_expired:
            self.expired += count
        else:
            self.evicted += count
        logger.info(
            "%d sessions deleted%s: %s; %d since this start",
            count,
            "" if last_use is None else f" that no turn used since {time.strftime('%F %T UTC', time.gmtime(last_use))}",
            "they expired (--session-ttl)" if is_expired else "the database is over its limit (--state-db-max-gb)",
            self.expired if is_expired else self.evicted,
        )


class Tiers:
    """Moves states between the tiers, only when a tier is full."""

    def __init__(self, arena: Arena, config: PoolConfig, index: SessionIndex, store: StateQueue | None) -> None:
        self.arena = arena
        self.slots = Slots(arena.num_slots)
        self.counters = TierCounters()
        self.evictables: list[Evictable] = []
        self._config = config
        self._index = index
        self._store = store
        self._transfers: list[_Transfer] = []
        self._pins: dict[int, int] = {}
        self.num_loading = 0
        """from disk or from a file to host memory"""
        self._slots_being_freed = 0
        """Slots that become free when a running copy ends."""
        self.checkpoints = Checkpoints(config, store, self.save, self._forget_stale)

    # -- slots -----------------------------------------------------------------------------------------

    def allocate(self) -> int | None:
        """Return a slot for the caller to write to.

        None if there is none: room is being made, so try again at a later step.
        """
        slot = self.slots.allocate()
        if slot is not None:
            return slot
        self.finish_copies()
        if self.slots.num_free == 0 and self._slots_being_freed == 0:
            self._make_room()
            self.finish_copies()
        return self.slots.allocate()

    def free(self, slot: int) -> None:
        """Free a slot from `allocate` that neither `Turns.checkin` nor `PrefixCache.offer` took."""
        self.slots.drop_ref(slot)

    @property
    def can_pin(self) -> bool:
        """Whether one more slot may be pinned. Half are reserved for rows, so waiting turns cannot hold all."""
        return len(self._pins) < max(1, self.slots.num_usable // 2)

    def pin(self, slot: int) -> bool:
        """Hold a slot for a reader. Returns False if too few slots would be left for rows to write to."""
        if slot == ZERO_SLOT:
            return True
        if slot not in self._pins and not self.can_pin:
            return False
        self._pins[slot] = self._pins.get(slot, 0) + 1
        self.slots.add_ref(slot)
        return True

    def unpin(self, slot: int) -> None:
        if slot == ZERO_SLOT:
            return
        self._pins[slot] -= 1
        if self._pins[slot] == 0:
            del self._pins[slot]
        self.slots.drop_ref(slot)

    def park(self, session: Session, slot: int) -> None:
        """Make the caller's slot the session's state."""
        self.forget(session)
        session.slot = slot
        self._index.l1[session] = None

    def forget(self, session: Session) -> None:
        if session.slot is not None:
            self.slots.drop_ref(session.slot)
            session.slot = None
        session.host = None
        session.replay = ()
        self._index.l1.pop(session, None)
        self._index.l2.pop(session, None)

    def _forget_stale(self, session: Session) -> None:
        """Drop the state of a session taken by another engine. A running turn keeps it; its commit is refused."""
        if not session.busy:
            self.forget(session)

    def _make_room(self) -> None:
        parked = [s for s in self._index.l1 if s.slot != ZERO_SLOT and self._can_evict(s)]
        # If nothing more can be pinned, also evict a state that a lease waits for. Otherwise it blocks leases that
        # could start.
        evictable = [s for s in parked if not s.readers] or ([] if self.can_pin else parked[-1:])
        other_owners = [(used, other) for other in self.evictables if (used := other.oldest()) is not None]
        used, other = min(other_owners, key=lambda owner: owner[0], default=(0.0, None))
        if other is not None and (not evictable or used <= evictable[0].updated):
            other.evict()
            return
        for session in evictable:  # the oldest may have to wait for the disk; then the next is tried
            if self.demote(session):
                return

    def _can_evict(self, session: Session) -> bool:
        if session.slot is None or session.pending is not None or self.slots.ref_count(session.slot) > 1:
            return False
        return not session.moving or self.checkpoints.can_replay(session)

    # -- between the tiers -----------------------------------------------------------------------------

    def demote(self, session: Session) -> bool:
        """Start to move a session to host memory. Returns False if there is no room yet."""
        slot = session.slot
        assert slot is not None
        if session.reloadable and (slot == ZERO_SLOT or self._config.l2_sessions == 0):
            self.forget(session)
            return True
        # Without a disk, host memory may exceed its size: waiting states must not block evictions.
        if session.moving or not (self.host_has_room() or (self._store is None and not self._slots_being_freed)):
            return self._store is not None and self._evict(session)
        reach("before_demotion")
        session.moving = True

        def arrived(host: HostState) -> None:
            session.moving = False
            if session.slot != slot or not self._can_evict(session):
                return
            self.slots.drop_ref(slot)
            session.slot = None
            session.host = host
            self._index.l1.pop(session, None)
            self._index.l2[session] = None
            self.counters.demotions += 1
            reach("after_demotion")
            if self.host_nearly_full and not self.checkpoints.busy:
                self.checkpoints.begin(session)

        self.save(slot, arrived)
        return True

    def promote(self, session: Session) -> bool:
        """Start to copy a session to a slot. Returns False if no slot is free.

        Rows may be scheduled at once: the device orders them after the copy.
        """
        host = session.host
        assert host is not None
        slot = self.load(host)
        if slot is None:
            return False
        replay = session.replay
        self.park(session, slot)
        session.replay = replay
        self.counters.promotions += 1
        reach("after_promotion")
        return True

    def add_loaded(self, session: Session, loaded: Loaded) -> None:
        """Add a session's state read from disk. Without a state, it is the zero state and a replay."""
        self.forget(session)
        self.counters.loads += 1
        self.counters.bytes_from_disk += loaded.bytes_read
        if loaded.host is None:
            session.slot = ZERO_SLOT
            self._index.l1[session] = None
        else:
            session.host = loaded.host
            self._index.l2[session] = None
        session.replay = loaded.replay

    def save(self, slot: int, finish: Callable[[HostState], None], *, frees_slot: bool = True) -> None:
        """Start to copy a slot to host memory. The copy holds the slot; `finish` is called at the end."""
        self.slots.add_ref(slot)
        self._slots_being_freed += frees_slot
        self.counters.bytes_to_host += self.arena.state_bytes

        def done(host: HostState) -> None:
            self._slots_being_freed -= frees_slot
            self.slots.drop_ref(slot)
            finish(host)

        self._transfers.append(_Transfer(self.arena.save(slot), done, slot))

    def load(self, host: HostState) -> int | None:
        """Start to copy a host state to a slot. Returns the slot, or None if no slot is free."""
        slot = self.allocate()
        if slot is not None:
            self.slots.add_ref(slot)
            self.counters.bytes_to_device += self.arena.state_bytes
            self._transfers.append(_Transfer(self.arena.load(slot, host), lambda _: self.slots.drop_ref(slot), slot))
        return slot

    # -- housekeeping ----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._transfers)

    def finish_copies(self) -> None:
        """Call the callbacks of the finished copies. Never blocks."""
        if not self._transfers:
            return
        done = [t for t in self._transfers if t.copy.is_done()]
        if done:
            self._transfers = [t for t in self._transfers if t not in done]
        for transfer in done:
            transfer.finish(transfer.copy.host)

    def wait_copies(self) -> None:
        """Block until all copies are done. Called at shutdown."""
        while self._transfers:
            for transfer in self._transfers:
                transfer.copy.wait()
            self.finish_copies()

    def trim(self) -> None:
        """Shrink L1 and L2 to their sizes. Stops where the writer does not keep up."""
        index = self._index
        excess = len(index.l1) - self._slots_being_freed - self._config.l1_sessions
        for session in list(index.l1) if excess > 0 else ():
            if excess > 0 and self._can_evict(session) and not session.readers:
                excess -= self.demote(session)
        self._trim_host()

    def _trim_host(self) -> None:
        excess = len(self._index.l2) - self._config.l2_sessions
        for session in list(self._index.l2) if excess > 0 else ():
            if excess > 0 and not session.busy:  # busy sessions are on their way to a slot
                excess -= self._evict(session)

    def _evict(self, session: Session) -> bool:
        """Drop the session from memory. Returns False if its state must be stored first.

        A state is stored even if the log can rebuild it, unless another is being stored: a later load then replays
        less. If the disk is behind, the state is dropped and its tokens are replayed.
        """
        if session.moving and not self.checkpoints.can_replay(session):
            return False
        if self._store is None:
            self.counters.lost += 1
            self.forget(session)
            self._index.remove(session)
        elif session.reloadable:
            self.forget(session)
        elif self._store.degraded is not None:
            self._evict_without_disk(session, self._store.degraded)
        elif self.checkpoints.can_replay(session) and self.checkpoints.busy:
            self.counters.left_to_log += 1
            self.forget(session)
        else:
            self.checkpoints.begin(session)
        return session.slot is None and session.host is None

    def _evict_without_disk(self, session: Session, fault: str) -> None:
        """Drop the state without storing it: the disk takes none, and host memory is bounded."""
        if session.unlogged == 0 and not session.log_broken:
            self.forget(session)
        elif session.log_broken:
            self.counters.lost += 1
            self.forget(session)
            self._index.mark_unusable(
                session,
                f"its last turns were lost: durability is {self._config.durability!r} and {fault}; "
                "delete the session to start a new one",
            )

    @property
    def host_nearly_full(self) -> bool:
        """Whether states will soon have to leave host memory.

        If so, they should be stored now. Before that they stay unwritten. Most are used again, and a state is a
        thousand times the size of its turn's log.
        """
        return 4 * len(self._index.l2) >= 3 * self._config.l2_sessions

    def host_has_room(self) -> bool:
        """Whether host memory has room for another state. Evicts some if that is possible at once."""
        limit = self._config.l2_sessions + self._config.transfer_states - self.num_loading - self._slots_being_freed
        if len(self._index.l2) >= limit:
            self._trim_host()
        return len(self._index.l2) < limit
