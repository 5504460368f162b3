"""The whole configuration, and the part of it that concerns the supervisor alone. Plain data."""

from __future__ import annotations

import msgspec

from routes.config import HttpConfig
from rwkv_batch.config import EngineConfig


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What concerns the supervisor alone."""

    http_workers: int = 0
    """0: by the number of CPUs."""
    replicas: int = 0
    """Engines of the service's own model, which share the database; 0: one that has it for itself."""
    replica_devices: tuple[tuple[str, ...], ...] = ()
    """The devices of each, where they are named."""
    cluster: str = ""
    """Address of the Ray cluster whose nodes have the engines, "auto": of the one that this machine belongs to."""
    cluster_service: str = "rwkv-batch"
    """What machines have in common that serve with the same engines."""
    cluster_node: str = ""
    """IP address of this machine's Ray node, where it has several."""
    front: str = "auto"
    """"nginx" | "none" | "auto": nginx where it is installed and the host is not loopback."""
    max_models: int = 4
    """Loaded while serving, beside the service's own."""
    model_idle_s: float = 0.0
    """0: a model that is not used stays."""
    log_format: str = "text"
    log_level: str = "info"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration."""

    service: ServiceConfig
    http: HttpConfig
    engine: EngineConfig
