"""What a service wants of a cluster: which one, how many engines, of what."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rwkv_batch.config import EngineConfig
from rwkv_batch.fleet.actors.address import ClusterAddress

ALL = "all"
"""In place of an engine's name: each, one after the other."""


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """See above."""

    cluster: ClusterAddress
    replicas: int
    """Engines that there are to be at least; 0: those that are there, else one."""
    replica_devices: tuple[tuple[str, ...], ...] = ()
    """The devices of each where they are named; their numbers do not matter, only how many there are."""
    config: EngineConfig
    factory: str
    """The engine's class as "module:Class"."""

    def with_absolute_paths(self) -> ClusterPlan:
        """The same for engines that do not run in this process's folder."""
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
        """What all machines of the service must mean: the model, and where sessions are kept."""
        return f"{self.config.model_path} (sessions in {self.config.pool.database_display_name or 'memory'})"

    def devices_of(self, number: int) -> tuple[str, ...]:
        """Of the engine of that number."""
        named = self.replica_devices
        return named[number % len(named)] if named else self.config.devices

    def config_of(self, name: str, devices: tuple[str, ...]) -> EngineConfig:
        """Of the engine of that name."""
        pool = msgspec.structs.replace(self.config.pool, engine=name) if self.config.pool.service else self.config.pool
        return msgspec.structs.replace(self.config, devices=devices, pool=pool)
