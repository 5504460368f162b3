"""How an engine is reached: by a Unix socket within a machine, as an actor in a cluster."""

from __future__ import annotations

from cluster.actors.address import PREFIX, parsed
from rwkv_batch.ipc.client import Connect, at_socket


def dial(address: str) -> Connect:
    """Links to the engine at a `ServedModel`'s address."""
    if not address.startswith(PREFIX):
        return at_socket(address)
    from cluster.actors.link import to_actor

    return to_actor(parsed(address))
