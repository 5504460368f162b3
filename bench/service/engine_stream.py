"""One stream straight from an engine's socket: what its gaps show is the engine's, and not the HTTP workers'."""

from __future__ import annotations

import time
from pathlib import Path

from bench.service.gaps import Gap
from bench.tools.engine_load import SAMPLING
from rwkv_batch.errors import ServiceError
from rwkv_batch.ipc.client import EngineClient, at_socket
from rwkv_batch.request import GenerateRequest, Job, JobEvents

PROMPT = [33] * 16
"""Any tokens: so this process needs no tokenizer."""


class EngineStream:
    """A row that draws a token a step, next to those that HTTP workers have asked for. `gaps` grows as they come."""

    def __init__(self, engine: int, max_tokens: int) -> None:
        """`engine`: the process id of an engine of this machine that serves."""
        self.gaps: list[Gap] = []
        self._last = 0.0
        self._client = EngineClient(at_socket(listens_at(engine)))
        self._client.start("bench")
        while not self._client.is_connected:
            time.sleep(0.01)
        row = GenerateRequest(prompt=PROMPT, max_tokens=max_tokens, sampling=SAMPLING, ignore_eos=True, chunk_size=1)
        self._client.submit(Job(job_id="bench", rows=[row], sampler="rapid"), self._heard, self._answered)

    def close(self) -> None:
        """End the row."""
        self._client.stop()

    def _heard(self, events: JobEvents) -> None:
        now = time.monotonic()
        if events.deltas and self._last:
            self.gaps.append((0, now, now - self._last))
        self._last = now

    def _answered(self, refusal: ServiceError | None) -> None:
        if refusal is not None:
            raise refusal


def listens_at(engine: int) -> str:
    """The path of the socket on which an engine's process listens."""
    held = {str(entry.readlink()) for entry in Path(f"/proc/{engine}/fd").iterdir() if entry.is_symlink()}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == _WITH_PATH and f"socket:[{fields[_INODE]}]" in held and fields[_FLAGS] == _LISTENS:
            return fields[-1]
    raise SystemExit(f"process {engine} listens on no Unix socket")


_WITH_PATH, _INODE, _FLAGS = 8, 6, 3
"""Fields of a line of /proc/net/unix."""
_LISTENS = "00010000"
