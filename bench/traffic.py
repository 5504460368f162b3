"""Rows that start and end at different times: the engine alone with clients that send a request after each answer.

    python -m bench.traffic --clients 32,320 --model-path model.pth --wkv-state fp16

Each request has `--prompt-tokens` random tokens and samples a random number of tokens between the two of `--drawn`, so
in every step some rows end and others prefill. Prints tokens/s and the time to first token (p50, p99, chunks of one
token) for each number of clients. Bounds: decode steps; with few clients also the prefill between them, which delays
all decode rows.
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

from bench.tools.record import Arguments, commit, finish
from programs.settings import parse_settings
from programs.settings.model_file import with_default_model
from rwkv_batch.calls import CancelJobs
from rwkv_batch.engine import Engine
from rwkv_batch.ipc.process import freeze_garbage_collector
from rwkv_batch.request import GenerateRequest, Job, JobEvents
from sampling.params import SamplingParams

LABEL = "bench"
SETTLE_S = 1.0
"""Not counted, after every client got its first token."""
BEGIN_S = 15.0
"""Maximum wait for the first tokens."""
PENALTIES = SamplingParams(top_k=50, top_p=0.6, presence_penalty=2.0, frequency_penalty=0.2, penalty_decay=0.996)
FIRST_WORD, LAST_WORD = 300, 60000
"""Range of word tokens used in prompts, limited by the vocabulary."""


class Clients:
    """Clients that send one request after another. Tokens are counted while `is_counting` is set."""

    def __init__(self, engine: Engine, clients: int, prompt_tokens: int, new_tokens: tuple[int, int]) -> None:
        self._engine = engine
        self._clients = clients
        self._prompt_tokens = prompt_tokens
        self._new_tokens = new_tokens
        self._random = random.Random(clients)
        self._sent: dict[str, float] = {}
        self._ended = threading.Semaphore(0)
        self.is_counting = self.is_stopping = False
        self.tokens = 0
        self.seconds = 0.0
        """length of the counted time"""
        self._started_clients: set[str] = set()
        """clients that got a token"""
        self.ttft: list[float] = []

    def run(self, seconds: float, during: Callable[[], None] | None = None) -> None:
        """Start all clients, count for `seconds`, then cancel all jobs. `during` runs during the count."""
        for client in range(self._clients):
            self._send(client, 0)
        deadline = time.monotonic() + BEGIN_S
        while len(self._started_clients) < self._clients and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(SETTLE_S)
        self.is_counting = True
        started = time.perf_counter()
        if during is not None:
            during()
        time.sleep(max(0.0, started + seconds - time.perf_counter()))
        self.is_counting, self.is_stopping = False, True
        self.seconds = time.perf_counter() - started
        self._engine.call(CancelJobs(LABEL), lambda _: None)
        for _ in range(self._clients):
            self._ended.acquire()

    def _send(self, client: int, turn: int) -> None:
        last = min(LAST_WORD, self._engine.model_runner.vocab - 1)
        prompt = [self._random.randint(min(FIRST_WORD, last), last) for _ in range(self._prompt_tokens)]
        row = GenerateRequest(
            prompt=prompt,
            # The first answers have random lengths from 1 on. Otherwise all clients would end together.
            max_tokens=self._random.randint(*self._new_tokens)
            if turn
            else self._random.randint(1, self._new_tokens[1]),
            sampling=PENALTIES,
            ignore_eos=True,
            chunk_size=1,
        )
        name = f"{client}.{turn}"
        self._sent[name] = time.perf_counter()
        self._engine.submit(Job(job_id=name, rows=[row], sampler="", label=LABEL), self._sink, self._refused)

    def _refused(self, refusal: Any) -> None:
        if refusal is not None:
            raise RuntimeError(f"refused: {refusal}")

    def _sink(self, events: JobEvents) -> None:
        # Runs on the engine's thread for every row of every step, so it must be cheap.
        num_tokens = sum([delta.num_tokens for delta in events.deltas])
        sent = self._sent.pop(events.job_id, None) if num_tokens else None
        if sent is not None and len(self._started_clients) < self._clients:
            self._started_clients.add(events.job_id.partition(".")[0])
        if self.is_counting:
            self.tokens += num_tokens
            if sent is not None:
                self.ttft.append(time.perf_counter() - sent)
        if events.done:
            client, turn = map(int, events.job_id.split("."))
            if self.is_stopping:
                self._ended.release()
            else:
                self._send(client, turn + 1)


def measure(
    engine: Engine, clients: int, args: argparse.Namespace, during: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Return the figures of one number of clients; `during` is called while tokens are counted."""
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
    """Return this program's flags, and the service's."""
    parser = Arguments(__doc__)
    parser.add_argument("--clients", type=numbers, default=(32,))
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--prompt-tokens", type=int, default=20)
    parser.add_argument("--drawn", type=numbers, default=(64, 192))
    return parser.parse_known_args()


def main() -> None:
    args, service = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="rwkv-bench-") as folder:
        flags = [*service, "--state-db", str(Path(folder) / "traffic.db")]
        engine = Engine(with_default_model(parse_settings(flags, os.environ)).engine)
        engine.start()
        try:
            freeze_garbage_collector()  # as the service does
            device = engine.model_runner.device
            machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
            results = []
            for clients in args.clients:
                results.append(measure(engine, clients, args))
                print(json.dumps(results[-1]), flush=True)
            head = {"machine": machine, "torch": torch.__version__, "commit": commit(args.commit)}
            finish({**head, "prompt_tokens": args.prompt_tokens, "drawn": args.drawn, "results": results}, args.out)
        finally:
            engine.stop()


if __name__ == "__main__":
    main()
