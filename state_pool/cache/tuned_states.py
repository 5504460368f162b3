"""Loaded tuned states by name: in host memory, and in a slot while rows start from them. Engine thread only."""

from __future__ import annotations

import dataclasses
import time

from state_pool.cache.tiers import Tiers
from state_pool.config import PoolConfig
from state_pool.disk.operations import Loaded, LoadResult
from state_pool.errors import NameTaken, PoolFull, SessionUnusable, StateNotFound, shown_names
from state_pool.layout import HostState
from state_pool.origins import Origin, TunedState, is_mixture
from state_pool.sessions import Session


class TunedStates:
    """The tuned states and their slots. A removed state stays for the rows admitted with it."""

    def __init__(self, tiers: Tiers, config: PoolConfig) -> None:
        self._tiers = tiers
        self._config = config
        self._by_name: dict[str, TunedState] = {}
        self._removed_in_use: list[TunedState] = []
        """Removed states that admitted rows have yet to read."""
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def names(self) -> list[str]:
        """Return the names in the order of loading."""
        return list(self._by_name)

    @property
    def slots(self) -> list[int]:
        return [state.slot for state in (*self._by_name.values(), *self._removed_in_use) if state.slot is not None]

    def check_new(self, name: str) -> None:
        """Check that a state of that name can be added. Raises NameTaken or PoolFull."""
        if name in self._by_name:
            raise NameTaken("a tuned state", name)
        if len(self._by_name) >= self._config.max_states:
            raise PoolFull(
                f"{len(self._by_name)} tuned states are loaded, the limit is {self._config.max_states} (--max-states); "
                "delete some"
            )

    def add(self, origin: Origin, host: HostState) -> TunedState:
        """Add a tuned state. Raises NameTaken or PoolFull."""
        self.check_new(origin.name)
        state = self._by_name[origin.name] = TunedState(origin, host, self.new_number())
        return state

    def new_number(self) -> int:
        """Return a number that no state and no adapter has had."""
        self._last_number += 1
        return self._last_number

    def remove(self, name: str) -> None:
        """Remove a state by name. Rows admitted with it still read it. Raises StateNotFound."""
        state = self.get(name)
        del self._by_name[name]
        state.removed = True
        if state.waiting:
            self._removed_in_use.append(state)
        else:
            self._drop_slot(state)

    def get(self, name: str) -> TunedState:
        """Return the state of that name. Raises StateNotFound, listing the loaded names."""
        found = self._by_name.get(name)
        if found is None:
            names = shown_names(self._by_name)
            raise StateNotFound(f"no tuned state {name!r} is loaded (loaded: {names}); see GET /v1/states", name)
        return found

    def acquire(self, name: str) -> TunedState:
        """Return the state for a new row. The row calls `drop_ref` once it has read it. Raises StateNotFound."""
        state = self.get(name)
        state.waiting += 1
        return state

    def drop_ref(self, state: TunedState) -> None:
        """Uncount a row that has read the state, or has ended."""
        state.waiting -= 1
        if state.removed and not state.waiting:
            self._removed_in_use.remove(state)
            self._drop_slot(state)

    def pin(self, state: TunedState) -> int | None:
        """Return the state's slot, pinned for a reader. None: no slot is free yet, try at a later step."""
        if state.slot is None and self._tiers.can_pin:
            state.slot = self._tiers.load(state.host)  # rows may be scheduled at once
        if state.slot is None or not self._tiers.pin(state.slot):
            return None
        state.used = time.time()
        return state.slot

    def with_origin_state(self, session: Session, result: LoadResult) -> LoadResult:
        """Add the tuned state that a session started from.

        Only for a session that is rebuilt from its first token. Returns SessionUnusable if that state is not loaded.
        """
        if (
            not isinstance(result, Loaded)
            or result.host is not None
            or session.origin is None
            or is_mixture(session.origin)
        ):
            return result
        origin = session.origin
        found = next((state for state in self._by_name.values() if state.origin.digest == origin.digest), None)
        if found is None:
            return SessionUnusable(
                f"it began with the tuned state {origin.name!r} (digest {origin.digest}), which is not loaded, and it "
                "must be rebuilt from its tokens; load that state again (--state, POST /v1/states), or delete the "
                "session"
            )
        return dataclasses.replace(result, host=found.host)

    # -- evictable, for the tiers ----------------------------------------------------------------------

    def oldest(self) -> float | None:
        state = self._oldest_idle()
        return None if state is None else state.used

    def evict(self) -> None:
        """See `Evictable.evict`. The slot is free at once, because host memory has the state."""
        state = self._oldest_idle()
        if state is not None:
            self._drop_slot(state)

    def trim(self) -> None:
        if len(self.slots) > self._config.state_slots:
            self.evict()

    def close(self) -> None:
        self._by_name, self._removed_in_use = {}, []

    # -- inside ----------------------------------------------------------------------------------------

    def _oldest_idle(self) -> TunedState | None:
        slots = self._tiers.slots
        idle = [
            state
            for state in (*self._by_name.values(), *self._removed_in_use)
            if state.slot is not None and slots.ref_count(state.slot) == 1
        ]
        return min(idle, key=lambda state: state.used, default=None)

    def _drop_slot(self, state: TunedState) -> None:
        if state.slot is not None:
            self._tiers.slots.drop_ref(state.slot)
            state.slot = None
