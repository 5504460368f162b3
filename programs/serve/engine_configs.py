"""The settings of each engine: the service's own, and what another model's has from them and from its wish."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from native.cores import cores
from programs.settings import FLAGS
from rwkv_batch.config import EngineConfig
from rwkv_batch.ipc.served_model import ModelSpec
from rwkv_batch.models_folder import relative_to_folder

SPARE_CORES = 4
"""That compute threads have to leave: on fewer, whatever else runs may want all of them for a long time."""


def replica_config(config: EngineConfig, name: str) -> EngineConfig:
    """The settings of one of several engines that share a database, under its name."""
    if not config.pool.service:
        return config
    return msgspec.structs.replace(config, pool=msgspec.structs.replace(config.pool, engine=name))


def model_config(base: EngineConfig, spec: ModelSpec, own_engines: int = 1) -> EngineConfig:
    """The settings of a model's engine, which may have other layers and devices than the service's own; its sessions
    are in a database of its own beside the service's. `own_engines`: how many serve the service's own model."""
    database = base.pool.state_db
    if database != base.pool.files_stem:
        database = f"{database}#{spec.name}"  # on a server: a schema of its own
    elif database:
        path = Path(database)
        database = str(path.with_name(f"{path.stem}-{spec.name}{path.suffix}"))
    return msgspec.structs.replace(
        base,
        model_path=spec.file,
        model_name=spec.name,
        dtype=spec.dtype or base.dtype,
        wkv_state=spec.wkv_state or base.wkv_state,
        kernels=spec.kernels or base.kernels,
        auto_fallback_fields=tuple(name for name in ("wkv_state", "kernels") if not getattr(spec, name)),
        adapters=spec.adapters,
        states=(),
        served_adapters=(),
        loads_at_low_priority=True,
        only_idle_cores=_leaves_cores(base, own_engines),
        strategy="",
        layers=(),  # those of --pp-layers are the service's own model's
        resident=() if spec.devices else base.resident,
        batch_step_layers=min(0, base.batch_step_layers),  # a number is for the service's own model and devices
        devices=spec.devices or base.devices,
        gpu_memory_utilization=spec.gpu_memory_utilization or base.gpu_memory_utilization,
        max_running=base.max_running if spec.max_running is None else spec.max_running,
        pool=msgspec.structs.replace(base.pool, state_db=database, engine="", service=""),
    )


def reason_for_request(reason: str, models_dir: str, is_own: bool) -> str:
    """Why an engine that a request asked for cannot start, in words of the request: its fields where the reason speaks
    of their flags, files by their paths within --models-dir.

    `is_own`: it was to serve the service's own model, of which a request says the devices alone.
    """
    fields = {flag.option: "file" if flag.field == "model_path" else flag.field for flag in FLAGS[EngineConfig]}
    said = {"devices"} if is_own else set(ModelSpec.__struct_fields__)

    def named(option: re.Match[str]) -> str:
        field = fields.get(option[0], "")
        return f"`{field}`" if field in said else option[0]

    return re.sub("--[a-z0-9-]+", named, relative_to_folder(models_dir, reason))


def _leaves_cores(config: EngineConfig, engines: int) -> bool:
    """Whether so many engines that compute leave some cores to more than HTTP workers and what else a machine does.

    What takes idle cores alone comes to no end where there are none. Where nothing is said engines take all.
    """
    is_on_gpus = all(device.startswith("cuda") for device in config.devices)
    taken = (1 if is_on_gpus else config.threads) * engines
    return taken > 0 and cores() - taken >= SPARE_CORES
