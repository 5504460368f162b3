"""Addresses of a cluster's engines, as one line of text."""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "actor:"
_SEPARATOR = "|"


class ClusterAddress(NamedTuple):
    """A Ray cluster as seen from one machine."""

    head: str
    """`HOST:PORT` of its head, or "auto": the cluster that this machine belongs to"""
    node: str
    """IP address of this machine's Ray node, if it has several addresses; else """ ""
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
