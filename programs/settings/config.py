"""The configuration of the whole service, as plain data."""

from __future__ import annotations

import msgspec

from routes.config import HttpConfig
from rwkv_batch.config import EngineConfig


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the supervisor. `flags.py` has the meanings."""

    http_workers: int = 0
    replicas: int = 0
    replica_devices: tuple[tuple[str, ...], ...] = ()
    """Devices per engine, if they are named."""
    cluster: str = ""
    cluster_service: str = "rwkv-batch"
    cluster_node: str = ""
    front: str = "auto"
    max_models: int = 4
    model_idle_s: float = 0.0
    log_format: str = "text"
    log_level: str = "info"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    service: ServiceConfig
    http: HttpConfig
    engine: EngineConfig
