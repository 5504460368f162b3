"""Adapters by name, as far as rows and sessions are concerned: who has which. Their weights are the engine's.

Engine thread only. A state that an adapter's weights have read belongs to it: sessions remember whose they are, and
cached prefixes are told apart.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from state_pool.errors import AdapterMismatch, AdapterNotFound, NameTaken, PoolFull
from state_pool.tuned_state import NO_BASE, Origin


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter that is loaded."""

    origin: Origin
    """its name and the digest of its numbers"""
    slot_index: int
    """from 1: where devices have it; free for another when it has gone"""
    number: int
    """among all that rows begin from; never used again for another in this process"""
    ref_count: int = 0
    """rows and turns that were admitted with it and have not ended"""
    removed: bool = False
    bases: dict[int, int] = field(default_factory=dict)
    """number of a tuned state -> number of that state read under this adapter"""

    @property
    def name(self) -> str:
        """What requests call it."""
        return self.origin.name


class Adapters:
    """Those that are loaded. One that was removed serves on for the rows that have it; then its place is free."""

    def __init__(self, limit: int, new_number: Callable[[], int]) -> None:
        """`new_number`: see `TunedStates.new_number`."""
        self._limit = limit
        self._new_number = new_number
        self._by_name: dict[str, LoadedAdapter] = {}
        self._removed_in_use: list[LoadedAdapter] = []
        """removed, with rows that have them"""
        self._free = list(range(1, limit + 1))
        self.num_refs = 0
        """rows and turns that have one, those that were removed among them"""
        self.on_unused: Callable[[int], None] = lambda slot_index: None
        """called with a place when no row has the adapter there any more"""

    def __len__(self) -> int:
        return len(self._by_name)

    def check_new(self, name: str) -> None:
        """Raises NameTaken or PoolFull if no adapter of that name could be added."""
        if name in self._by_name:
            raise NameTaken("an adapter", name)
        if not self._free:
            leaving = f", {len(self._removed_in_use)} of them removed and still in use" if self._removed_in_use else ""
            raise PoolFull(
                f"{len(self._by_name) + len(self._removed_in_use)} adapters are loaded{leaving}, the limit is {self._limit} "
                "(--max-adapters); delete some"
            )

    def add(self, origin: Origin) -> LoadedAdapter:
        """Take an adapter in. Raises NameTaken or PoolFull."""
        self.check_new(origin.name)
        adapter = self._by_name[origin.name] = LoadedAdapter(origin, heapq.heappop(self._free), self._new_number())
        return adapter

    def remove(self, name: str) -> None:
        """Forget an adapter; rows that have it keep it. Raises AdapterNotFound."""
        adapter = self.get(name)
        del self._by_name[name]
        adapter.removed = True
        self._removed_in_use.append(adapter)
        self._free_slot_if_unused(adapter)

    def get(self, name: str) -> LoadedAdapter:
        """The adapter of that name. Raises AdapterNotFound, with the names that there are."""
        found = self._by_name.get(name)
        if found is None:
            names = ", ".join(map(repr, self._by_name)) or "none"
            raise AdapterNotFound(f"no adapter {name!r} is loaded (loaded: {names}); see GET /v1/adapters", name)
        return found

    def acquire(self, name: str) -> LoadedAdapter:
        """The adapter of that name for a row; `drop_ref` of it when that has ended. Raises AdapterNotFound."""
        return self.add_ref(self.get(name))

    def add_ref(self, adapter: LoadedAdapter) -> LoadedAdapter:
        """The same for one more row."""
        adapter.ref_count += 1
        self.num_refs += 1
        return adapter

    def acquire_for_session(self, session: str, origin: Origin) -> LoadedAdapter:
        """The adapter that a session was begun with, under whatever name. Raises AdapterNotFound if there is none."""
        return self.add_ref(self.find_by_digest(origin.digest, f"session {session!r}", origin.name))

    def find_by_digest(self, digest: str, whose: str, name: str = "") -> LoadedAdapter:
        """The adapter of these numbers. Raises AdapterNotFound in the words of what was read under it."""
        found = next((one for one in self._by_name.values() if one.origin.digest == digest), None)
        if found is None:
            raise AdapterNotFound(
                f"the {whose} was begun with the adapter {f'{name!r} ' if name else ''}of digest {digest}, which "
                "is not loaded; load it again (--adapter-serve, POST /v1/adapters)"
            )
        return found

    def drop_ref(self, adapter: LoadedAdapter) -> None:
        """A row that had it has ended."""
        adapter.ref_count -= 1
        self.num_refs -= 1
        self._free_slot_if_unused(adapter)

    def base(self, state: int, adapter: LoadedAdapter | None) -> int:
        """Number of what a row begins from: a tuned state's (or NO_BASE), read under an adapter or none."""
        if adapter is None:
            return state
        if state == NO_BASE:
            return adapter.number
        if state not in adapter.bases:
            adapter.bases[state] = self._new_number()
        return adapter.bases[state]

    def _free_slot_if_unused(self, adapter: LoadedAdapter) -> None:
        if adapter.removed and not adapter.ref_count:
            self._removed_in_use.remove(adapter)
            heapq.heappush(self._free, adapter.slot_index)
            self.on_unused(adapter.slot_index)


def adapter_mismatch(session: str, begun: Origin | None, asked: LoadedAdapter | None) -> AdapterMismatch | None:
    """What to tell who names an adapter that an existing session was not begun with."""
    if asked is None or (begun is not None and begun.digest == asked.origin.digest):
        return None
    what = "without an adapter" if begun is None else f"with the adapter {begun.name!r} (digest {begun.digest})"
    return AdapterMismatch(
        f"session {session!r} was begun {what}, not with {asked.name!r}; leave `adapter` out to continue it, "
        "or begin another session",
        asked.name,
    )
