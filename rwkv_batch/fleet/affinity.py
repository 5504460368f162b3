"""Remembers which engine served a session or a prompt prefix."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from rwkv_batch.request import Job

PREFIX_TOKENS = 64
"""Length of the prompt prefix that identifies an engine with a cached state."""
MAX_REMEMBERED = 16_384


class EngineLru(OrderedDict[str, str]):
    def put(self, key: str, engine: str) -> None:
        """Drops the oldest entry if there are too many."""
        self[key] = engine
        self.move_to_end(key)
        if len(self) > MAX_REMEMBERED:
            self.popitem(last=False)


def rendezvous_weight(session: str, engine: str) -> bytes:
    """Return a hash. The engine with the largest one serves an unknown session: the same in every process."""
    return hashlib.blake2b(f"{session}\0{engine}".encode(), digest_size=8).digest()


def prefix_key(job: Job) -> str:
    """ "" for a short prompt."""
    row = job.rows[0]
    if len(row.prompt) < PREFIX_TOKENS:
        return ""
    beginning = f"{job.prefix_salt}\0{row.state}\0{row.prompt[:PREFIX_TOKENS]}"
    return hashlib.blake2b(beginning.encode(), digest_size=12).hexdigest()
