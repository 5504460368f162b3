"""A state that rows begin from instead of the zero state. Plain data of the engine's thread."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from state_pool.arena import HostState

NO_BASE = 0
"""Number of the zero state among the states that rows begin from."""
_MIXTURE = "mixture-"
"""What the digest of a mixture begins with: no file's does, these are hexadecimal."""


class Origin(NamedTuple):
    """What a session began from, as it is remembered with it."""

    name: str
    """As the tuned state, or the adapter, was called then; for people."""
    digest: str
    """Of its numbers: a state is the same under another name."""


def mixed_origin(members: Sequence[Origin | None]) -> Origin:
    """What a session of a mixture began from, by its members in order; None: the zero state. Weights are not part."""
    names = ", ".join("empty" if member is None else member.name for member in members)
    digests = " ".join("" if member is None else member.digest for member in members)
    return Origin(names, _MIXTURE + hashlib.blake2b(digests.encode(), digest_size=8).hexdigest())


def is_mixture(origin: Origin | None) -> bool:
    """Whether a session began from several states: it is kept by its tokens, which each of these has to read."""
    return origin is not None and origin.digest.startswith(_MIXTURE)


_SEPARATOR = "+"
"""Between a state's and an adapter's name or digest as they are stored; in none of these."""


def format_origin(state: Origin | None, adapter: Origin | None) -> tuple[str, str] | tuple[None, None]:
    """What a session began from, and the adapter it was begun with, as one name and one digest."""
    if adapter is None:
        return (None, None) if state is None else (state.name, state.digest)
    name, digest = ("", "") if state is None else state
    return f"{name}{_SEPARATOR}{adapter.name}", f"{digest}{_SEPARATOR}{adapter.digest}"


def parse_origin(name: str | None, digest: str | None) -> tuple[Origin | None, Origin | None]:
    """The same read back: (tuned state, adapter)."""
    if name is None or digest is None:
        return None, None
    (state, join_fingerprint, adapter), (of_state, _, of_adapter) = (
        name.partition(_SEPARATOR),
        digest.partition(_SEPARATOR),
    )
    return (Origin(state, of_state) if of_state else None), (Origin(adapter, of_adapter) if join_fingerprint else None)


def join_fingerprint(fingerprint: str, adapter: Origin | None) -> str:
    """The model's fingerprint as a state that was read under an adapter has it."""
    return fingerprint if adapter is None else f"{fingerprint}{_SEPARATOR}{adapter.digest}"


def split_fingerprint(fingerprint: str) -> tuple[str, str]:
    """The same read back: the model's fingerprint, and the adapter's digest or ""."""
    model, _, digest = fingerprint.partition(_SEPARATOR)
    return model, digest


@dataclass(slots=True, eq=False)
class TunedState:
    """A tuned state that is loaded. Host memory always has it; a slot has it while rows begin from it often enough."""

    origin: Origin
    host: HostState
    number: int
    """Not NO_BASE, and never used again for another in this process."""
    slot: int | None = None
    used: float = 0.0
    """Unix time"""
    waiting: int = 0
    """Rows and turns that were admitted and have not begun to read it."""
    removed: bool = False

    @property
    def name(self) -> str:
        """What requests call it."""
        return self.origin.name
