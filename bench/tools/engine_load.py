"""Load on an engine, or a fleet of them, without HTTP: jobs of one row, all at once. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from rwkv_batch.errors import ServiceError
from rwkv_batch.protocol import EngineProtocol
from rwkv_batch.request import FinishReason, GenerateRequest, Job, JobEvents
from rwkv_batch.tokenizer import Tokenizer
from sampling.params import SamplingParams

SAMPLING = SamplingParams(top_k=50, top_p=0.6, presence_penalty=2.0, frequency_penalty=0.2, penalty_decay=0.996)
"""As the routes have it where a request says nothing."""


@dataclass(frozen=True)
class Streams:
    """What is asked for."""

    count: int
    max_tokens: int
    chunk_size: int

    @property
    def tokens(self) -> int:
        """That all of them draw together."""
        return self.count * self.max_tokens


@dataclass
class Run:
    """What came of it; seconds."""

    seconds: float
    first_s: list[float]
    """until each stream's first token"""


def run_streams(engine: EngineProtocol, streams: Streams, name: str) -> Run:
    """One run of the streams; `name` is another one each time. Raises SystemExit if one is refused or fails."""
    encode = Tokenizer().encode
    ended = threading.Semaphore(0)
    first: dict[str, float] = {}
    refused: list[ServiceError] = []
    failed: list[str] = []

    def admitted(refusal: ServiceError | None) -> None:
        if refusal is not None:
            refused.append(refusal)
            ended.release()

    def sink(events: JobEvents) -> None:
        first.setdefault(events.job_id, time.perf_counter() - begun)
        failed.extend(_faults(events))
        if events.done:
            ended.release()

    prompts = [encode(f"User: {name}.{number} what is new?\n\nAssistant:") for number in range(streams.count)]
    begun = time.perf_counter()
    for number, prompt in enumerate(prompts):
        row = GenerateRequest(
            prompt=prompt,
            max_tokens=streams.max_tokens,
            sampling=replace(SAMPLING, seed=number),
            ignore_eos=True,
            chunk_size=streams.chunk_size,
        )
        engine.submit(Job(job_id=f"{name}.{number}", rows=[row], sampler="rapid"), sink, admitted)
    for _ in range(streams.count):
        ended.acquire()
    seconds = time.perf_counter() - begun
    if refused:
        raise SystemExit(f"{len(refused)} streams were refused: {refused[0]}")
    if failed:
        raise SystemExit(f"{len(failed)} streams did not draw all of their tokens: {failed[0]}")
    return Run(seconds, list(first.values()))


def _faults(events: JobEvents) -> Iterator[str]:
    """Why a stream has ended too soon, if it has."""
    if events.error is not None:
        yield events.error.message
    for delta in events.deltas:
        finish = delta.finish
        if finish is not None and finish.reason is not FinishReason.LENGTH:
            yield finish.reason if finish.error is None else finish.error.message
