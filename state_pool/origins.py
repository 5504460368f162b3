"""Origins of sessions: tuned states, mixtures and adapters, as stored and as loaded. Engine thread only.

A state that was computed under an adapter belongs to it. Sessions store their adapter, and cached prefixes under
different adapters are separate. The engine has the adapters' weights.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from state_pool.errors import AdapterMismatch, AdapterNotFound, NameTaken, PoolFull, shown_names
from state_pool.layout import HostState

NO_PREFIX_BASE = b""
"""Base of prompts without a state, an adapter and a salt."""
_MIXTURE = "mixture-"
"""Prefix of a mixture's digest. Digests of files are hexadecimal, so they differ."""


class Origin(NamedTuple):
    """The tuned state or adapter that a session started with. This is its stored form."""

    name: str
    """name at that time, for people"""
    digest: str
    """Hash of the numbers: identifies the state under any name."""


def mixed_origin(members: Sequence[Origin | None]) -> Origin:
    """Return the origin of a mixture from its members in order; None is the zero state. Weights do not count."""
    names = ", ".join("empty" if member is None else member.name for member in members)
    digests = " ".join("" if member is None else member.digest for member in members)
    return Origin(names, _MIXTURE + hashlib.blake2b(digests.encode(), digest_size=8).hexdigest())


def is_mixture(origin: Origin | None) -> bool:
    """Whether a session started from several states. Such a session is kept only by its tokens."""
    return origin is not None and origin.digest.startswith(_MIXTURE)


_SEPARATOR = "+"
"""Joins the names or digests of a state and an adapter; neither contains it."""


def format_origin(state: Origin | None, adapter: Origin | None) -> tuple[str, str] | tuple[None, None]:
    """Join a session's tuned state and adapter into one name and digest. Both are stored in this form."""
    if adapter is None:
        return (None, None) if state is None else (state.name, state.digest)
    name, digest = ("", "") if state is None else state
    return f"{name}{_SEPARATOR}{adapter.name}", f"{digest}{_SEPARATOR}{adapter.digest}"


def parse_origin(name: str | None, digest: str | None) -> tuple[Origin | None, Origin | None]:
    if name is None or digest is None:
        return None, None
    state, separator, adapter = name.partition(_SEPARATOR)
    state_digest, _, adapter_digest = digest.partition(_SEPARATOR)
    origin = Origin(state, state_digest) if state_digest else None
    return origin, (Origin(adapter, adapter_digest) if separator else None)


FINGERPRINT_SEPARATOR = "."
"""Between the digest of a sample of the weights and the digest of all of them."""


def is_same_model(stored: str, own: str) -> bool:
    """Return whether a stored fingerprint is this model's. Earlier versions stored the sample's digest alone."""
    return stored == own or own.startswith(f"{stored}{FINGERPRINT_SEPARATOR}")


def join_fingerprint(fingerprint: str, adapter: Origin | None) -> str:
    return fingerprint if adapter is None else f"{fingerprint}{_SEPARATOR}{adapter.digest}"


def split_fingerprint(fingerprint: str) -> tuple[str, str]:
    """Returns the model's fingerprint, and the adapter's digest or ""."""
    model, _, digest = fingerprint.partition(_SEPARATOR)
    return model, digest


@dataclass(slots=True, eq=False)
class TunedState:
    """A loaded tuned state. Host memory always has it; a slot has it while rows often start from it."""

    origin: Origin
    host: HostState
    number: int
    """Never reused in this process, not for an adapter either."""
    slot: int | None = None
    used: float = 0.0
    """Unix time"""
    waiting: int = 0
    """Admitted rows and turns that have not yet read it."""
    removed: bool = False

    @property
    def name(self) -> str:
        return self.origin.name


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    origin: Origin
    """name and digest of its weights"""
    slot_index: int
    """index on the devices, from 1; reused after the adapter is unloaded"""
    number: int
    """never reused in this process, not for a tuned state either"""
    ref_count: int = 0
    """running rows and admitted turns that use it"""
    removed: bool = False

    @property
    def name(self) -> str:
        return self.origin.name


class Adapters:
    """The loaded adapters. A removed one stays for the rows that use it; then its slot index is free."""

    def __init__(self, limit: int, new_number: Callable[[], int]) -> None:
        """`new_number`: see `TunedStates.new_number`."""
        self._limit = limit
        self._new_number = new_number
        self._by_name: dict[str, LoadedAdapter] = {}
        self._removed_in_use: list[LoadedAdapter] = []
        """removed, but still used by rows"""
        self._free = list(range(1, limit + 1))
        self.num_refs = 0
        """rows and turns that use an adapter, removed ones included"""
        self.on_unused: Callable[[int], None] = lambda slot_index: None
        """called with a slot index when no row uses the removed adapter there"""

    def __len__(self) -> int:
        return len(self._by_name)

    def check_new(self, name: str) -> None:
        """Check that an adapter of that name can be added. Raises NameTaken or PoolFull."""
        if name in self._by_name:
            raise NameTaken("an adapter", name)
        if not self._free:
            removed = f", {len(self._removed_in_use)} of them removed and still in use" if self._removed_in_use else ""
            num_loaded = len(self._by_name) + len(self._removed_in_use)
            raise PoolFull(
                f"{num_loaded} adapters are loaded{removed}, the limit is {self._limit} (--max-adapters); delete some"
            )

    def add(self, origin: Origin) -> LoadedAdapter:
        """Add an adapter. Raises NameTaken or PoolFull."""
        self.check_new(origin.name)
        adapter = self._by_name[origin.name] = LoadedAdapter(origin, heapq.heappop(self._free), self._new_number())
        return adapter

    def remove(self, name: str) -> None:
        """Remove an adapter by name; rows that use it keep it. Raises AdapterNotFound."""
        adapter = self.get(name)
        del self._by_name[name]
        adapter.removed = True
        self._removed_in_use.append(adapter)
        self._free_slot_if_unused(adapter)

    def get(self, name: str) -> LoadedAdapter:
        """Return the adapter of that name. Raises AdapterNotFound, listing the loaded names."""
        found = self._by_name.get(name)
        if found is None:
            names = shown_names(self._by_name)
            raise AdapterNotFound(f"no adapter {name!r} is loaded (loaded: {names}); see GET /v1/adapters", name)
        return found

    def acquire(self, name: str) -> LoadedAdapter:
        """Return the adapter for a new row; the row calls `drop_ref` at its end. Raises AdapterNotFound."""
        return self.add_ref(self.get(name))

    def add_ref(self, adapter: LoadedAdapter) -> LoadedAdapter:
        """Count one more row."""
        adapter.ref_count += 1
        self.num_refs += 1
        return adapter

    def acquire_for_session(self, session: str, origin: Origin) -> LoadedAdapter:
        """Return the adapter that a session uses, under any name. Raises AdapterNotFound."""
        return self.add_ref(self.find_by_digest(origin.digest, f"session {session!r}", origin.name))

    def find_by_digest(self, digest: str, whose: str, name: str = "") -> LoadedAdapter:
        """Find an adapter by its weights' digest. Raises AdapterNotFound, naming `whose` it is."""
        found = next((one for one in self._by_name.values() if one.origin.digest == digest), None)
        if found is None:
            raise AdapterNotFound(
                f"the {whose} was begun with the adapter {f'{name!r} ' if name else ''}of digest {digest}, which "
                "is not loaded; load it again (--adapter-serve, POST /v1/adapters)"
            )
        return found

    def drop_ref(self, adapter: LoadedAdapter) -> None:
        """Uncount a row that used the adapter and has ended."""
        adapter.ref_count -= 1
        self.num_refs -= 1
        self._free_slot_if_unused(adapter)

    def _free_slot_if_unused(self, adapter: LoadedAdapter) -> None:
        if adapter.removed and not adapter.ref_count:
            self._removed_in_use.remove(adapter)
            heapq.heappush(self._free, adapter.slot_index)
            self.on_unused(adapter.slot_index)


def adapter_mismatch(session: str, current: Origin | None, requested: LoadedAdapter | None) -> AdapterMismatch | None:
    """Return the error for a request with another adapter than the session's. Otherwise None."""
    if requested is None or (current is not None and current.digest == requested.origin.digest):
        return None
    actual = "without an adapter" if current is None else f"with the adapter {current.name!r} (digest {current.digest})"
    return AdapterMismatch(
        f"session {session!r} was begun {actual}, not with {requested.name!r}; leave `adapter` out to continue it, "
        "or begin another session",
        requested.name,
    )
