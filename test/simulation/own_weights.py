"""A world's tuned states, mixtures and adapters: loaded, named, removed and loaded again.

A tuned state is the initial number of a prompt. An adapter changes the effect of every token on a state.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from rwkv_batch.request import GenerateRequest
from state_pool.origins import Origin
from test.pool_fakes import FakeHost
from test.simulation.history import Beginning

if TYPE_CHECKING:
    from test.simulation.world import World

NUMBER = 3
"""Number of tuned states, and of adapters."""
LAST = "xy"
"""Name suffixes. Both names of a weight have the same numbers."""


class OwnWeights:
    """Loads the weights into the pool, as --state and requests do. Adds their names to requests."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self.state_slots = rng.choice((1, 1, 2, 4))
        self.more_sessions = rng.choice((0, 3, 6))
        """slots for sessions beyond those of every world: members of mixtures take several"""
        self._shared_slots = [rng.getrandbits(120) for _ in range(NUMBER)]

    def open(self) -> None:
        """Start a new process with all of them."""
        for number in range(NUMBER):
            self._load_state(number)
            self._load_adapter(number)
        self._world.pool.adapters.on_unused = self._world.device.marks.pop

    def act(self) -> None:
        """Perhaps remove one, or load a missing one again."""
        number, pool = self._rng.randrange(NUMBER), self._world.pool
        if self._rng.random() < 0.5:
            self._change([name for name in pool.tuned.names if _number(name) == number], pool.tuned.remove)
        else:
            self._change([name for name in pool.adapters._by_name if _number(name) == number], pool.adapters.remove)
        for missing in range(NUMBER):
            if self._rng.random() < 0.3:
                self._load_missing(missing)

    def _change(self, loaded: list[str], remove: Callable[[str], None]) -> None:
        if loaded and self._rng.random() < 0.05:
            remove(loaded[0])
            self._world.faults.met("unload")

    def _load_missing(self, number: int) -> None:
        pool = self._world.pool
        if number not in map(_number, pool.tuned.names):
            self._load_state(number)
        if number not in map(_number, pool.adapters._by_name):
            self._load_adapter(number)

    def _load_state(self, number: int) -> None:
        data = self._shared_slots[number].to_bytes(16, "little")
        name = f"state{number}{self._rng.choice(LAST)}"
        host = FakeHost({"a.wkv": data[:12], "a.shift": data[12:]})
        self._world.pool.tuned.add(Origin(name, f"d{number}"), host)

    def _load_adapter(self, number: int) -> None:
        name = f"adapter{number}{self._rng.choice(LAST)}"
        held = self._world.pool.adapters.add(Origin(name, f"a{number}"))
        self._world.device.marks[held.slot_index] = _mark(name)

    # Requests ------------------------------------------------------------------------------------------------

    def add_weights(self, request: GenerateRequest, session: str = "") -> GenerateRequest:
        """Add weights to a request. Most turns of a session name the same ones."""
        rng = self._rng
        fixed = random.Random(f"{zlib.crc32(session.encode())} {self._shared_slots[0]}") if session else rng
        kind, changes = fixed.random(), {}
        has_token_log = not session or self._world.pool.has_token_log
        if kind < 0.25 and has_token_log:
            changes["mixture"] = self._mixture(fixed)
        elif kind < 0.6:
            changes["state"] = self._name("state", fixed.randrange(NUMBER))
        if fixed.random() < 0.3:
            changes["adapter"] = self._name("adapter", fixed.randrange(NUMBER))
        if session and rng.random() < 0.2:
            changes.pop(rng.choice(("state", "mixture", "adapter")), None)
        return msgspec.structs.replace(request, **changes)

    def _mixture(self, fixed: random.Random) -> list[tuple[str, float]]:
        members = [fixed.choice((None, *range(NUMBER))) for _ in range(fixed.choice((2, 2, 3)))]
        weights = [self._rng.choice((1.0, 2.0, 0.5)) for _ in members]
        if self._rng.random() < 0.3:
            weights[0], weights[1] = 3.0, -1.0
        return [("" if one is None else self._name("state", one), w) for one, w in zip(members, weights, strict=True)]

    def _name(self, kind: str, number: int) -> str:
        """A name under which it is or was loaded."""
        pool = self._world.pool
        names: Any = pool.tuned.names if kind == "state" else pool.adapters._by_name
        return next((name for name in names if _number(name) == number), f"{kind}{number}{LAST[0]}")

    # Queries -------------------------------------------------------------------------------------------------

    def beginning(self, request: GenerateRequest) -> Beginning:
        """Return the initial state of a new row of this request."""
        names = [name for name, _ in request.mixture] or [request.state]
        return Beginning(tuple(self._base(name) for name in names), _mark(request.adapter))

    def _base(self, name: str) -> int:
        return self._shared_slots[_number(name)] if name else 0

    def is_missing(self, request: GenerateRequest) -> bool:
        """Return whether it names a state or adapter that is not loaded."""
        pool: Any = self._world.pool
        states = {name for name, _ in request.mixture} | {request.state}
        return bool(states - {"", *pool.tuned.names} or {request.adapter} - {"", *pool.adapters._by_name})

    def is_other(self, request: GenerateRequest, known: Iterable[Beginning]) -> bool:
        """Return whether an initial state of `known` differs from the request's.

        `known` is from a session's histories.
        """
        submission = self.beginning(request)
        return any(began != submission for began in known)


def _number(name: str) -> int:
    return int(name[-2])


def _mark(adapter: str) -> int:
    return (_number(adapter) + 1) << 40 if adapter else 0
