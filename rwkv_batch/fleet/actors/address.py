"""Addresses of a cluster's engines, as one line of text."""

from __future__ import annotations

from typing import NamedTuple

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
    """Invert `str(EngineAddress)`."""
    head, node, namespace, engine = text.removeprefix(PREFIX).split(_SEPARATOR)
    return EngineAddress(ClusterAddress(head, node, namespace), engine)
