"""A model that is loaded while the service runs: what is asked for, and what the supervisor tells of it. Plain data."""

from __future__ import annotations

import enum
import re

import msgspec

from rwkv_batch.decode_defaults import DecodeDefaults

DEFAULT_MODEL_NAME = "rwkv7"
"""What clients send that know of one model only: always the service's own, whatever that is called."""
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""It is part of file names, and of what requests send as `model`."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model to be loaded beside the others, in an engine of its own."""

    name: str
    file: str
    """Absolute path of the weights."""
    adapters: tuple[str, ...] = ()
    """As --adapter."""
    dtype: str = ""
    """"": as the service's own model; likewise below."""
    wkv_state: str = ""
    kernels: str = ""
    devices: tuple[str, ...] = ()
    gpu_memory_utilization: float | None = None
    max_running: int | None = None
    defaults: DecodeDefaults = DecodeDefaults()
    """Of requests that name it."""


class ModelStatus(enum.StrEnum):
    """Where a model stands."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    UNLOADING = "unloading"


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, and the model that it was asked to serve."""

    spec: ModelSpec
    status: ModelStatus
    address: str
    """Of its engine's socket."""
    since: int
    """Unix time of the last change of `status`."""
    error: str = ""
    """Why it failed, one line."""
    has_served: bool = False
    """It has been ready once: an engine that is lost is being restarted."""
    engine: str = ""
    """Name of the engine, which it keeps through restarts."""
    is_own: bool = False
    """It serves the service's own model, as all that do; else a model has one engine."""
    pid: int = 0
    """0: no process runs."""
    node: str = ""
    """IP address of the machine that it runs on, where engines are on several."""

    @property
    def is_draining(self) -> bool:
        """It takes no new work."""
        return self.status is ModelStatus.UNLOADING


class ModelCommand(msgspec.Struct, frozen=True):
    """What an HTTP worker asks of the supervisor; `number` returns with the answer."""

    number: int
    spec: ModelSpec | None = None
    """To load."""
    unload: str = ""
    """The name of one to unload, where there is no wish."""
    add_engine: tuple[str, ...] | None = None
    """Devices of one more engine for the service's own model; (): as its others."""
    remove_engine: str = ""
    """Name of one to drain and end."""
    restart_engine: str = ""
    """Name of one to drain and start anew; "all": one after the other."""
    is_barrier: bool = False
    """Nothing is to be done: when the answer comes, all has come that any worker was told before."""
