"""Origins of sessions: tuned states, mixtures and adapters as they are stored. Engine thread only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from state_pool.layout import HostState

NO_BASE = 0
"""Number of the zero state among the bases of rows."""
_MIXTURE = "mixture-"
"""Prefix of a mixture's digest. Digests of files are hexadecimal, so they differ."""


class Origin(NamedTuple):
    """The tuned state or adapter that a session started with, as it is stored."""

    name: str
    """Its name at that time; for people."""
    digest: str
    """Hash of its numbers: identifies it under any name."""


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
    """Join a session's tuned state and adapter into one stored name and digest."""
    if adapter is None:
        return (None, None) if state is None else (state.name, state.digest)
    name, digest = ("", "") if state is None else state
    return f"{name}{_SEPARATOR}{adapter.name}", f"{digest}{_SEPARATOR}{adapter.digest}"


def parse_origin(name: str | None, digest: str | None) -> tuple[Origin | None, Origin | None]:
    """Split a stored name and digest into (tuned state, adapter)."""
    if name is None or digest is None:
        return None, None
    state, separator, adapter = name.partition(_SEPARATOR)
    state_digest, _, adapter_digest = digest.partition(_SEPARATOR)
    origin = Origin(state, state_digest) if state_digest else None
    return origin, (Origin(adapter, adapter_digest) if separator else None)


def join_fingerprint(fingerprint: str, adapter: Origin | None) -> str:
    """Return the fingerprint of a state computed under an adapter."""
    return fingerprint if adapter is None else f"{fingerprint}{_SEPARATOR}{adapter.digest}"


def split_fingerprint(fingerprint: str) -> tuple[str, str]:
    """Split a fingerprint into the model's fingerprint and the adapter's digest or ""."""
    model, _, digest = fingerprint.partition(_SEPARATOR)
    return model, digest


@dataclass(slots=True, eq=False)
class TunedState:
    """A loaded tuned state. Host memory always has it; a slot has it while rows often start from it."""

    origin: Origin
    host: HostState
    number: int
    """Not NO_BASE, and never reused in this process."""
    slot: int | None = None
    used: float = 0.0
    """Unix time"""
    waiting: int = 0
    """Admitted rows and turns that have not yet read it."""
    removed: bool = False

    @property
    def name(self) -> str:
        return self.origin.name
