"""A service's plan for a cluster: address, number of engines and their config."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from rwkv_batch.config import EngineConfig

PREFIX = "actor:"
_SEPARATOR = "|"


class ClusterAddress(NamedTuple):
    head: str
    """`HOST:PORT` of its head, or "auto": the cluster that this machine belongs to"""
    node: str
    """needed if the machine has several addresses"""
    namespace: str


class EngineAddress(NamedTuple):
    cluster: ClusterAddress
    engine: str

    def __str__(self) -> str:
        return PREFIX + _SEPARATOR.join((*self.cluster, self.engine))


def parse_address(text: str) -> EngineAddress:
    """Parse the text that `str(EngineAddress)` returns."""
    head, node, namespace, engine = text.removeprefix(PREFIX).split(_SEPARATOR)
    return EngineAddress(ClusterAddress(head, node, namespace), engine)


ALL = "all"
"""Used in place of an engine's name: all, one after the other."""


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    cluster: ClusterAddress
    replicas: int
    """minimum number of engines; 0: the existing ones, else one"""
    replica_devices: tuple[tuple[str, ...], ...] = ()
    """devices of each replica, if configured; only their count matters"""
    config: EngineConfig
    factory: str
    """the engine's class ("module:Class")"""

    def with_absolute_paths(self) -> ClusterPlan:
        """Return the plan with absolute paths. The engines may run in another folder."""
        config = self.config
        named = {
            field: tuple(f"{name}={Path(file).absolute()}" for name, _, file in (one.partition("=") for one in entries))
            for field, entries in (("states", config.states), ("served_adapters", config.served_adapters))
        }
        config = msgspec.structs.replace(
            config,
            model_path=str(Path(config.model_path).absolute()),
            adapters=tuple(str(Path(file).absolute()) for file in config.adapters),
            **named,
        )
        return msgspec.structs.replace(self, config=config)

    @property
    def serves(self) -> str:
        """The model and the session database. They must be the same on all machines of the service."""
        return f"{self.config.model_path} (sessions in {self.config.pool.database_display_name or 'memory'})"

    def devices_of(self, number: int) -> tuple[str, ...]:
        named = self.replica_devices
        return named[number % len(named)] if named else self.config.devices

    def config_of(self, name: str, devices: tuple[str, ...]) -> EngineConfig:
        pool = msgspec.structs.replace(self.config.pool, engine=name) if self.config.pool.service else self.config.pool
        return msgspec.structs.replace(self.config, devices=devices, pool=pool)
