"""The configuration of the whole service, as plain data."""

from __future__ import annotations

import msgspec

from routes.config import HttpConfig
from rwkv_batch.config import EngineConfig


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the supervisor."""

    http_workers: int = 0
    """0: chosen by the number of CPUs."""
    replicas: int = 0
    """Engines of the service's own model. 0: one engine, which does not share the database."""
    replica_devices: tuple[tuple[str, ...], ...] = ()
    """Devices per engine, if they are named."""
    cluster: str = ""
    """Address of the Ray cluster that runs the engines. "auto": this machine's cluster."""
    cluster_service: str = "rwkv-batch"
    """Machines with the same name share their engines."""
    cluster_node: str = ""
    """IP address of this machine's Ray node, if the machine has several."""
    front: str = "auto"
    """"nginx" | "none" | "auto". auto: nginx if it is installed and the host is not loopback."""
    max_models: int = 4
    """Models that clients may load in addition to the service's own."""
    model_idle_s: float = 0.0
    """Seconds without a request until a loaded model is unloaded. 0: never."""
    log_format: str = "text"
    log_level: str = "info"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    service: ServiceConfig
    http: HttpConfig
    engine: EngineConfig
