"""How an engine is reached: by a Unix socket within a machine, as an actor in a cluster."""

from __future__ import annotations

from rwkv_batch.fleet.actors.address import PREFIX, parse_address
from rwkv_batch.ipc.client import Connect, unix_connector


def dial(address: str) -> Connect:
    """Links to the engine at a `ServedModel`'s address."""
    if not address.startswith(PREFIX):
        return unix_connector(address)
    from rwkv_batch.fleet.actors.link import actor_connector

    return actor_connector(parse_address(address))
