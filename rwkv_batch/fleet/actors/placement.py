"""Places engines in the cluster: a placement group on one node, and a named actor in it."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import msgspec

from rwkv_batch.config import EngineConfig
from rwkv_batch.fleet.actors.driver import load_ray
from rwkv_batch.ipc.process import LogConfig

logger = logging.getLogger(__name__)


def bundle_of(config: EngineConfig, has_gpus: bool) -> dict[str, float]:
    """Return the resources of an engine: its pipeline's GPUs, else its CPU threads."""
    names = config.devices
    gpus = sum(name.startswith("cuda") for name in names) + (names.count("auto") if has_gpus else 0)
    return {"GPU": float(gpus)} if gpus else {"CPU": float(config.threads or 1)}


def placed_config(config: EngineConfig, bundle: dict[str, float]) -> EngineConfig:
    """Return the config inside the bundle: GPUs numbered from 0, one replica."""
    numbers = iter(range(len(config.devices)))
    devices = tuple(
        f"cuda:{next(numbers)}" if name.startswith("cuda") or (name == "auto" and "GPU" in bundle) else "cpu"
        for name in config.devices
    )
    threads = int(bundle["CPU"]) if "CPU" in bundle else config.threads
    return msgspec.structs.replace(config, devices=devices, threads=threads, replica=0, replicas=1)


def place(name: str, config: EngineConfig, factory: str, log_config: LogConfig, serves: str) -> bool:
    """Create the engine's actor. It waits for a node with room. Returns False if it exists. Raises RayError."""
    ray = load_ray()
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from rwkv_batch.fleet.actors.engine_actor import CONCURRENCY_GROUPS, EngineActor

    bundle = bundle_of(config, ray.cluster_resources().get("GPU", 0) >= 1)
    if "auto" in config.devices and "GPU" not in bundle:
        message = "the cluster has no GPU: %s is placed on %.0f CPUs; to wait for a GPU, use --pp-devices cuda:0"
        logger.warning(message, name, bundle["CPU"])
    strategy = PlacementGroupSchedulingStrategy(_group(name, bundle), placement_group_bundle_index=0)
    actor = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(EngineActor).options(
        name=name,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=bundle.get("CPU", 0.0),
        num_gpus=bundle.get("GPU", 0.0),
        scheduling_strategy=strategy,
    )
    try:
        actor.remote(name, placed_config(config, bundle), factory, log_config, serves)
    except ray.exceptions.ActorAlreadyExistsError:
        return False
    return True


def _group(name: str, bundle: dict[str, float]) -> Any:
    from ray.util import get_placement_group, placement_group

    with contextlib.suppress(ValueError):
        return get_placement_group(name)
    try:
        return placement_group([bundle], strategy="STRICT_PACK", name=name, lifetime="detached")
    except load_ray().exceptions.RaySystemError:  # another machine has just created it
        return get_placement_group(name)


def has_room(name: str) -> bool:
    """Return whether the engine's placement group has a node. Calls the cluster's head."""
    from ray.util import get_placement_group, placement_group_table

    with contextlib.suppress(ValueError):
        return bool(placement_group_table(get_placement_group(name))["state"] == "CREATED")
    return True
