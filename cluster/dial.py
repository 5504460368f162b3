"""How an engine is reached: a Unix socket within a machine."""

from __future__ import annotations

from rwkv_batch.ipc.client import Connect, at_socket


def dial(address: str) -> Connect:
    """Links to the engine at a `ServedModel`'s address."""
    return at_socket(address)
