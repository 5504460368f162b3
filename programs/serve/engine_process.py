"""One engine's settings, its process, and the status that HTTP workers see."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from native.priority import cores
from programs.serve.child import Child
from programs.settings import FLAGS
from rwkv_batch.config import EngineConfig
from rwkv_batch.ipc.served_model import ModelSpec, ModelStatus, ServedModel
from rwkv_batch.models_folder import relative_to_folder

SPARE_CORES = 4
"""Cores that must be free of compute threads for work that runs on idle cores only."""


def replica_config(config: EngineConfig, name: str) -> EngineConfig:
    """Returns the settings of one named engine. It needs the name only if engines share a database."""
    if not config.pool.service:  # the service's engines do not share one
        return config
    return msgspec.structs.replace(config, pool=msgspec.structs.replace(config.pool, engine=name))


def model_config(base: EngineConfig, spec: ModelSpec, own_engines: int = 1) -> EngineConfig:
    """Returns the settings of a loaded model's engine.

    The model may have other layers and devices than the service's own. Its sessions have a database of their own.
    `own_engines`: number of engines of the service's own model.
    """
    database = base.pool.state_db
    if base.pool.on_server:
        database = f"{database}#{spec.name}"  # on a server each model has its own schema
    elif database:
        path = Path(database)
        database = str(path.with_name(f"{path.stem}-{spec.name}{path.suffix}"))
    return msgspec.structs.replace(
        base,
        model_path=spec.file,
        model_name=spec.name,
        dtype=spec.dtype or base.dtype,
        activation_bits=base.activation_bits if spec.dtype in ("", base.dtype) else 8,
        wkv_state=spec.wkv_state or base.wkv_state,
        kernels=spec.kernels or base.kernels,
        auto_fallback_fields=tuple(name for name in ("wkv_state", "kernels") if not getattr(spec, name)),
        adapters=spec.adapters,
        states=(),
        served_adapters=(),
        loads_at_low_priority=True,
        only_idle_cores=_has_idle_cores(base, own_engines),
        strategy="",
        layers=(),  # --pp-layers holds for the service's own model only
        resident=() if spec.devices else base.resident,
        batch_step_layers=min(0, base.batch_step_layers),  # a number holds for the service's own model only
        devices=spec.devices or base.devices,
        gpu_memory_utilization=spec.gpu_memory_utilization or base.gpu_memory_utilization,
        max_running=base.max_running if spec.max_running is None else spec.max_running,
        pool=msgspec.structs.replace(base.pool, state_db=database, engine="", service=""),
    )


def reason_for_request(reason: str, models_dir: str, is_own: bool) -> str:
    """Rewrites a start failure in terms of the request for the engine.

    Flags become the request's fields. Paths become relative to --models-dir. `is_own`: the engine serves the
    service's own model, for which a request names the devices only.
    """
    fields = {flag.option: "file" if flag.field == "model_path" else flag.field for flag in FLAGS[EngineConfig]}
    request_fields = {"devices"} if is_own else set(ModelSpec.__struct_fields__)

    def named(option: re.Match[str]) -> str:
        field = fields.get(option[0], "")
        return f"`{field}`" if field in request_fields else option[0]

    return re.sub("--[a-z0-9-]+", named, relative_to_folder(models_dir, reason))


def _has_idle_cores(config: EngineConfig, engines: int) -> bool:
    """Return whether the service's engines leave idle cores to load another model.

    Loading on idle cores would never end without any. Without --threads, an engine on a CPU uses all cores.
    """
    is_on_gpus = all(device.startswith("cuda") for device in config.devices)
    used_cores = (1 if is_on_gpus else config.threads) * engines
    return used_cores > 0 and cores() - used_cores >= SPARE_CORES


logger = logging.getLogger("supervisor")


@dataclass(eq=False)
class EngineProcess:
    """An engine's process and its restarts."""

    info: ServedModel
    child: Child
    last_used: float
    deadline: float = 0.0
    """Time at which a draining engine is killed."""
    restarts: bool = False
    """The engine drains in order to restart."""

    @property
    def status(self) -> ModelStatus:
        return self.info.status

    @property
    def needs_start(self) -> bool:
        """Whether the process should run but does not."""
        return self.child.process is None and self.status is ModelStatus.LOADING

    @property
    def is_active(self) -> bool:
        """Whether the engine serves or is starting."""
        return self.status in (ModelStatus.LOADING, ModelStatus.READY)

    def set_status(self, status: ModelStatus, error: str = "", has_served: bool = False) -> None:
        self.info = msgspec.structs.replace(
            self.info,
            status=status,
            error=error,
            loaded={ModelStatus.LOADING: 0.0, ModelStatus.READY: 1.0}.get(status, self.info.loaded),
            since=int(time.time()),
            has_served=has_served or self.info.has_served,
        )

    def start(self) -> None:
        """Starts the process. If the fork fails, an engine that has served is retried."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.info.address)
        try:
            self.child.start()
        except (EOFError, OSError) as error:
            self.child.process = None
            delay = self.child.schedule_restart()
            logger.error("process %s cannot be started (%r)", self.child.name, error)
            if self.info.has_served:
                logger.error("%s: retry in %.1f s", self.child.name, delay)
            else:
                self.set_status(ModelStatus.FAILED, error=f"its process cannot be started: {error}; load it again")
            return
        self.update_pid()

    def update_pid(self) -> None:
        """Reports the process id. A forked process has it some time after its start."""
        process = self.child.process
        number = (process.is_alive() and process.pid) or 0 if process is not None else 0
        if number != self.info.pid:
            self.info = msgspec.structs.replace(self.info, pid=number)

    def restart(self, timeout_s: float) -> None:
        """Starts the engine again. If it serves, drains it first, for at most `timeout_s`."""
        if self.status is ModelStatus.READY:
            self.drain(timeout_s, restarts=True)
            return
        if self.child.process is not None:
            self.child.kill()  # it reported a failure and may still run
            self.child.reap()
        self.set_status(ModelStatus.LOADING)

    def drain(self, timeout_s: float, restarts: bool = False) -> None:
        """Lets running answers end for at most `timeout_s`, then ends the engine."""
        self.restarts = restarts
        self.set_status(ModelStatus.UNLOADING)
        self.deadline = time.monotonic() + timeout_s
        self.child.send_command("drain")

    def schedule_restart(self, cause: str) -> None:
        self.child.restart_later(cause)
        self.set_status(ModelStatus.LOADING)
