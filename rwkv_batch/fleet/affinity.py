"""Which engine has had a session, or a prompt's beginning, before."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from rwkv_batch.request import Job

PREFIX_TOKENS = 64
"""A prompt's beginning, by which the engine is remembered that has read it."""
MAX_REMEMBERED = 16_384
"""Sessions and prompts' beginnings, each."""


class EngineLru(OrderedDict[str, str]):
    """The engines of so many sessions or prompts, those named last."""

    def put(self, key: str, engine: str) -> None:
        """Note it; the oldest one goes."""
        self[key] = engine
        self.move_to_end(key)
        if len(self) > MAX_REMEMBERED:
            self.popitem(last=False)


def rendezvous_weight(session: str, engine: str) -> bytes:
    """The engine with the largest one has a session of which nothing is remembered: the same in every process."""
    return hashlib.blake2b(f"{session}\0{engine}".encode(), digest_size=8).digest()


def prefix_key(job: Job) -> str:
    """Names the beginning of a job's first prompt, if it is long enough to matter; else empty."""
    row = job.rows[0]
    if len(row.prompt) < PREFIX_TOKENS:
        return ""
    beginning = f"{row.state}\0{row.prompt[:PREFIX_TOKENS]}"
    return hashlib.blake2b(beginning.encode(), digest_size=12).hexdigest()
