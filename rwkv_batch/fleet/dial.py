"""Connects to an engine: by Unix socket on this machine, as a Ray actor in a cluster."""

from __future__ import annotations

from rwkv_batch.fleet.actors.address import PREFIX, parse_address
from rwkv_batch.ipc.client import Connect, unix_connector


def dial(address: str) -> Connect:
    """Return a connector to a `ServedModel`'s address."""
    if not address.startswith(PREFIX):
        return unix_connector(address)
    from rwkv_batch.fleet.actors.link import actor_connector

    return actor_connector(parse_address(address))
