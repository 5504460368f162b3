"""Removes an engine from the cluster."""

from __future__ import annotations

import contextlib

from rwkv_batch.fleet.actors.driver import load_ray


def remove_engine_actor(name: str) -> None:
    """End an engine for good and free its placement group."""
    ray = load_ray()
    from ray.util import get_placement_group, remove_placement_group

    with contextlib.suppress(ValueError):
        actor = ray.get_actor(name)
        with contextlib.suppress(ValueError):
            remove_placement_group(get_placement_group(name))
        ray.kill(actor, no_restart=True)
