"""Models loaded while the service runs: specification, status and commands. Plain data."""

from __future__ import annotations

import enum
import re

import msgspec

from rwkv_batch.calls import DecodeDefaults

DEFAULT_MODEL_NAME = "rwkv7"
"""Name that clients use if they know only one model. It is always the service's own model."""
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Valid names. They are part of file names and of requests' `model`."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    file: str
    """absolute"""
    adapters: tuple[str, ...] = ()
    dtype: str = ""
    """"": as the service's own model, also for the fields below"""
    wkv_state: str = ""
    kernels: str = ""
    devices: tuple[str, ...] = ()
    gpu_memory_utilization: float | None = None
    max_running: int | None = None
    defaults: DecodeDefaults = DecodeDefaults()
    """of requests that name it"""


class ModelStatus(enum.StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    UNLOADING = "unloading"


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    spec: ModelSpec
    status: ModelStatus
    address: str
    since: int
    """Unix time of the last change of `status`"""
    error: str = ""
    """one line"""
    loaded: float = 0.0
    """share of the layers"""
    has_served: bool = False
    """whether it was ready once; then a lost engine is restarted"""
    engine: str = ""
    """kept through restarts"""
    is_own: bool = False
    """whether it serves the service's own model, which may have several engines"""
    pid: int = 0
    """0: no process runs"""
    node: str = ""
    """IP address, in a cluster"""

    @property
    def is_draining(self) -> bool:
        return self.status is ModelStatus.UNLOADING


class ModelCommand(msgspec.Struct, frozen=True):
    """A command from an HTTP worker to the supervisor. The answer repeats `number`."""

    number: int
    spec: ModelSpec | None = None
    unload: str = ""
    add_engine: tuple[str, ...] | None = None
    """devices of a further engine for the service's own model; (): as its others"""
    remove_engine: str = ""
    """drained, then ended"""
    restart_engine: str = ""
    """drained, then restarted; "all": one after the other"""
    is_barrier: bool = False
    """no action: the answer comes after all earlier messages to the workers"""
