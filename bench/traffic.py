"""Rows that come and go: the engine alone under clients who ask again as soon as they are answered.

    python -m bench.traffic --clients 32,320 --model-path model.pth --wkv-state fp16

Each request has `--prompt-tokens` random tokens and samples a number of tokens between the two of `--drawn`, so that in
every step some rows end and others are read. Printed for each number of clients: tokens/s, and the time to the first
token (chunks of one token) at the median and the 99th of a hundred. What binds: decode steps, and with few clients the
prompts read between them, each of which holds up every row that decodes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.tools.origin import commit
from programs.settings import parse_settings
from programs.settings.model_file import with_default_model
from rwkv_batch.calls import CancelJobs
from rwkv_batch.engine import Engine
from rwkv_batch.ipc.process import freeze_garbage_collector
from rwkv_batch.request import GenerateRequest, Job, JobEvents
from sampling.params import SamplingParams

SAMPLING = SamplingParams(top_k=50, top_p=0.6, presence_penalty=2.0, frequency_penalty=0.2, penalty_decay=0.996)
LABEL = "bench"
SETTLE_S = 1.0
"""Not counted after every client has had its first token."""
BEGIN_S = 15.0
"""At most until then."""
FIRST_WORD, LAST_WORD = 300, 60000
"""Ids of tokens that stand for words in a prompt, where the vocabulary has so many."""


class Clients:
    """So many that ask one request after the other; counts what is answered while `counts`."""

    def __init__(self, engine: Engine, clients: int, prompt_tokens: int, drawn: tuple[int, int]) -> None:
        self._engine = engine
        self._clients = clients
        self._prompt_tokens = prompt_tokens
        self._drawn = drawn
        self._random = random.Random(clients)
        self._asked: dict[str, float] = {}
        self._ended = threading.Semaphore(0)
        self.counts = self.stops = False
        self.tokens = 0
        self.seconds = 0.0
        """that were counted"""
        self._begun: set[str] = set()
        """clients that have had a token"""
        self.ttft: list[float] = []

    def run(self, seconds: float, during: Callable[[], None] | None = None) -> None:
        """Ask until all have begun, count for that long (`during` is called meanwhile), then cancel what runs."""
        for client in range(self._clients):
            self._ask(client, 0)
        deadline = time.monotonic() + BEGIN_S
        while len(self._begun) < self._clients and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(SETTLE_S)
        self.counts = True
        started = time.perf_counter()
        if during is not None:
            during()
        time.sleep(max(0.0, started + seconds - time.perf_counter()))
        self.counts, self.stops = False, True
        self.seconds = time.perf_counter() - started
        self._engine.call(CancelJobs(LABEL), lambda _: None)
        for _ in range(self._clients):
            self._ended.acquire()

    def _ask(self, client: int, turn: int) -> None:
        last = min(LAST_WORD, self._engine.model_runner.vocab - 1)
        prompt = [self._random.randint(min(FIRST_WORD, last), last) for _ in range(self._prompt_tokens)]
        row = GenerateRequest(
            prompt=prompt,
            # A client's first answer is cut as if it had been at it for a while: else all would end together.
            max_tokens=self._random.randint(*self._drawn) if turn else self._random.randint(1, self._drawn[1]),
            sampling=SAMPLING,
            ignore_eos=True,
            chunk_size=1,
        )
        name = f"{client}.{turn}"
        self._asked[name] = time.perf_counter()
        self._engine.submit(Job(job_id=name, rows=[row], sampler="", label=LABEL), self._sink, self._refused)

    def _refused(self, refusal: Any) -> None:
        if refusal is not None:
            raise RuntimeError(f"refused: {refusal}")

    def _sink(self, events: JobEvents) -> None:
        # For every row of every step, on the engine's thread: what this takes is not the engine's.
        drawn = sum([delta.num_tokens for delta in events.deltas])
        asked = self._asked.pop(events.job_id, None) if drawn else None
        if asked is not None and len(self._begun) < self._clients:
            self._begun.add(events.job_id.partition(".")[0])
        if self.counts:
            self.tokens += drawn
            if asked is not None:
                self.ttft.append(time.perf_counter() - asked)
        if events.done:
            client, turn = map(int, events.job_id.split("."))
            if self.stops:
                self._ended.release()
            else:
                self._ask(client, turn + 1)


def measure(
    engine: Engine, clients: int, args: argparse.Namespace, during: Callable[[], None] | None = None
) -> dict[str, Any]:
    """One line; `during` is called while tokens are counted."""
    load = Clients(engine, clients, args.prompt_tokens, args.drawn)
    load.run(args.seconds, during)
    ttft = load.ttft or [float("nan")]
    percentiles = statistics.quantiles(ttft, n=100) if len(ttft) > 1 else ttft * 99
    return {
        "clients": clients,
        "tokens_per_s": round(load.tokens / load.seconds),
        "requests": len(load.ttft),
        "ttft_ms_p50": round(percentiles[49] * 1e3, 1),
        "ttft_ms_p99": round(percentiles[98] * 1e3, 1),
    }


def numbers(text: str) -> tuple[int, ...]:
    """ "32,320" -> (32, 320); "" -> ()."""
    return tuple(int(number) for number in text.split(",") if number)


def parse_arguments() -> tuple[argparse.Namespace, Sequence[str]]:
    """Own flags, and the service's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=numbers, default=(32,))
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--prompt-tokens", type=int, default=20)
    parser.add_argument("--drawn", type=numbers, default=(64, 192))
    parser.add_argument("--commit", default="", help="to be written down where git is not at hand")
    return parser.parse_known_args()


def main() -> None:
    """Measure and print."""
    args, service = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="rwkv-bench-") as folder:
        flags = [*service, "--state-db", str(Path(folder) / "traffic.db")]
        engine = Engine(with_default_model(parse_settings(flags, os.environ)).engine)
        engine.start()
        try:
            freeze_garbage_collector()  # as the service does
            device = engine.model_runner.device
            model_runner = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
            results = []
            for clients in args.clients:
                results.append(measure(engine, clients, args))
                print(json.dumps(results[-1]), flush=True)
            head = {"machine": model_runner, "torch": torch.__version__, "commit": args.commit or commit()}
            print(json.dumps({**head, "prompt_tokens": args.prompt_tokens, "drawn": args.drawn, "results": results}))
        finally:
            engine.stop()


if __name__ == "__main__":
    main()
