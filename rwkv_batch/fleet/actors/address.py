"""Where an engine of a cluster is, as one line of text: what processes tell each other of it."""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "actor:"
_SEPARATOR = "|"


class ClusterAddress(NamedTuple):
    """A Ray cluster as one machine sees it."""

    head: str
    """`HOST:PORT` of its head, or "auto": the cluster that this machine belongs to."""
    node: str
    """IP address of this machine's Ray node, where it has several; else ""."""
    namespace: str
    """Of the service's actors."""


class EngineAddress(NamedTuple):
    """A named actor."""

    cluster: ClusterAddress
    engine: str

    def __str__(self) -> str:
        return PREFIX + _SEPARATOR.join((*self.cluster, self.engine))


def parse_address(text: str) -> EngineAddress:
    """The address that `str` wrote."""
    head, node, namespace, engine = text.removeprefix(PREFIX).split(_SEPARATOR)
    return EngineAddress(ClusterAddress(head, node, namespace), engine)
