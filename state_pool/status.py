"""The pool's section of /status. Engine thread only."""

from __future__ import annotations

from itertools import islice
from typing import Any

import msgspec

from state_pool.cache.prefix_cache import PrefixCache
from state_pool.cache.tiers import Tiers
from state_pool.config import PoolConfig
from state_pool.disk.store import Store
from state_pool.sessions import SessionIndex


def pool_stats(
    config: PoolConfig, index: SessionIndex, tiers: Tiers, prefix: PrefixCache, store: Store | None
) -> dict[str, Any]:
    state_bytes = tiers.arena.state_bytes
    prefix_l1, prefix_l2 = prefix.sizes
    return {
        "durability": config.durability if store is not None else "memory",
        "sessions": index.num_existing,
        "slots": {"total": tiers.slots.num_usable, "free": tiers.slots.num_free},
        "l1": {"sessions": len(index.l1), "limit": config.l1_sessions, "bytes": len(index.l1) * state_bytes},
        "l2": {"sessions": len(index.l2), "limit": config.l2_sessions, "bytes": len(index.l2) * state_bytes},
        "database": _database(store),
        "prefix_cache": {
            "enabled": prefix.enabled,
            "l1": prefix_l1,
            "l2": prefix_l2,
            **_fields(prefix.counters),
        },
        "counters": _fields(tiers.counters),
        "quarantined": [{"session_id": s.key.display_name, "reason": s.unusable} for s in islice(index.unusable, 20)],
        "quarantined_count": len(index.unusable),
        "degraded": None if store is None else store.degraded,
    }


def _database(store: Store | None) -> dict[str, Any] | None:
    if store is None:
        return None
    small, states = store.writer.queued
    return {
        "path": store.path,
        "other_models": store.other_models,
        "queued_turns": small,
        "queued_states": states,
        "engines": store.engines,
        "checkpoint_store": store.checkpoint_store,
        **_fields(store.writer.stats),
    }


def _fields(counters: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(counters)
    return found
