"""Time to first token of interactive requests beside a batch that fills every seat, against an idle engine's.

    python -m bench.batch_ttft [--seats 64] [--requests 200] [--words 60,600] [flags of the service]
    python -m bench.batch_ttft --random 7.2b --folder /dev/shm --seats 320 --wkv-state fp16      # on a GPU

A service is started here. Single requests, streamed, come one after another, each 0 to `--pause` s after the last one's
end; in each of `--rounds` rounds first to the idle service, then as many while a batch of /openai/v1/batches, whose
lines do not end by themselves, has all places but those that are kept for interactive work. Measured at the client, for
each length of prompt: p50 and p99 of both, their ratio; and what the batch draws meanwhile, against what it draws when
no interactive request has come for as long as steps stay short behind one. What bounds the ratio: a piece of a step
that runs cannot be left, and on a CPU no part of one, so an interactive row waits for its rest; the shorter its prompt,
the more that is beside its own time. A line of JSON after each round; the last line is all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from bench.http_load import Load
from bench.origin import origin
from bench.serve import percentile, service
from bench.traffic import numbers
from bench.ttft import ask
from rwkv_batch.core.batch_share import LULL_S

ROUTE = "/v1/chat/completions"
FILES, BATCHES = "/openai/v1/files", "/openai/v1/batches"
TARGET = 1.3
WAIT_S = 120.0


class Client:
    """Requests to one service."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=60.0)
        self._max_tokens = options.max_tokens
        self._dice = random.Random(options.seed)
        self._pause_s = options.pause
        self._asked = 0

    def firsts(self, count: int, words: int) -> list[float]:
        """Seconds to the first token of so many requests with prompts of so many words, one after another."""
        single = Load(ROUTE, 1, 1, 1, self._max_tokens, words, 1, True, "")
        found = []
        for _ in range(count):
            time.sleep(self._dice.random() * self._pause_s)
            self._asked += 1
            found.append(ask(single, self.url, 1000 + self._asked))
        return found

    def status(self) -> dict[str, Any]:
        """What /status says."""
        value: dict[str, Any] = self._http.get("/status").raise_for_status().json()
        return value

    def drawn(self) -> float:
        """Tokens that the service has drawn."""
        return float(self.status()["generated_tokens"])

    def begin_batch(self, lines: int, words: int) -> str:
        """A batch whose lines do not end by themselves; returns its id."""
        body = {"max_tokens": 100_000, "temperature": 1.0, "ignore_eos": True, "stop_tokens": [], "stream": False}
        prompts = [Load(ROUTE, 1, 1, 1, 1, words, 1, False, "").prompts(number)[0] for number in range(lines)]
        entries = [
            {"custom_id": str(number), "method": "POST", "url": ROUTE, "body": {**body, "contents": [prompt]}}
            for number, prompt in enumerate(prompts)
        ]
        content = "\n".join(map(json.dumps, entries)).encode()
        upload = self._http.post(FILES, files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"})
        wanted = {"input_file_id": upload.raise_for_status().json()["id"], "endpoint": ROUTE}
        made = self._http.post(BATCHES, json={**wanted, "completion_window": "24h"}).raise_for_status()
        return str(made.json()["id"])

    def end_batch(self, batch: str) -> None:
        """Cancel it, and wait until its rows have gone."""
        self._http.post(f"{BATCHES}/{batch}/cancel").raise_for_status()
        self.wait_for(0, 0)

    def wait_for(self, least: int, most: int) -> int:
        """Until so many rows run; returns how many do."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            running = int(self.status()["running_rows"])
            if least <= running <= most:
                return running
            time.sleep(0.1)
        raise SystemExit(f"not {least} to {most} rows run within {WAIT_S:.0f} s: {self.status()['running_rows']}")


def speed(client: Client, seconds: float) -> float:
    """Tokens/s that are drawn in the next so many seconds."""
    before, started = client.drawn(), time.perf_counter()
    time.sleep(seconds)
    return round((client.drawn() - before) / (time.perf_counter() - started), 1)


def measured(client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    part, rows, alone = -(-options.requests // options.rounds), [], 0.0
    lengths: list[dict[str, Any]] = []
    idle: dict[int, list[float]] = {words: [] for words in options.words}
    beside: dict[int, list[float]] = {words: [] for words in options.words}
    left: dict[int, list[float]] = {words: [] for words in options.words}
    client.firsts(8, options.words[0])
    for number in range(options.rounds):
        for words in options.words:
            idle[words] += client.firsts(part, words)
        batch = client.begin_batch(2 * options.seats, options.batch_words)
        rows.append(client.wait_for(options.seats - options.seats // 16 - 1, options.seats))
        for words in options.words:
            before, started = client.drawn(), time.perf_counter()
            beside[words] += client.firsts(part, words)
            drawn = client.drawn() - before - part * options.max_tokens
            left[words].append(drawn / (time.perf_counter() - started))
        lengths = [
            compared(words, idle[words], beside[words]) | {"batch_tokens_per_s": round(fmean(left[words]), 1)}
            for words in options.words
        ]
        print(json.dumps({"rounds": number + 1, "prompts": lengths}), flush=True)
        if number == options.rounds - 1:
            time.sleep(options.lull)
            alone = speed(client, options.settle)
        client.end_batch(batch)
    return {"rows_of_the_batch": rows, "batch_alone_tokens_per_s": alone, "prompts": lengths}


def compared(words: int, idle: Sequence[float], beside: Sequence[float]) -> dict[str, Any]:
    """Figures of one length of prompt."""
    return {
        "words": words,
        "idle_ms": {"p50": percentile(idle, 0.5), "p99": percentile(idle, 0.99)},
        "beside_ms": {"p50": percentile(beside, 0.5), "p99": percentile(beside, 0.99)},
        "p50_ratio": round(_of(beside, 0.5) / _of(idle, 0.5), 3),
        "p99_ratio": round(_of(beside, 0.99) / _of(idle, 0.99), 3),
        "failed": sum(not first for first in (*idle, *beside)),
    }


def _of(values: Sequence[float], part: float) -> float:
    return percentile(values, part) or 1e-9


def model_flags(options: argparse.Namespace) -> list[str]:
    """--model-path of a random model of a released shape, if one is wanted."""
    if not options.random:
        return []
    import torch

    from bench.gpu_model import write_random_file

    path = options.folder / f"random-{options.random}.safetensors"
    if not path.exists():
        write_random_file(options.random, path, torch.device("cuda"))
    return ["--model-path", str(path)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seats", type=int, default=64)
    parser.add_argument("--requests", type=int, default=200, help="of each kind and length")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--words", type=numbers, default=(60, 600), help="of a request's prompt")
    parser.add_argument("--max-tokens", type=int, default=4, help="of a request")
    parser.add_argument("--batch-words", type=int, default=16, help="of a line's prompt")
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--settle", type=float, default=3.0)
    parser.add_argument(
        "--lull", type=float, default=LULL_S, help="seconds without requests before what it draws alone"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random", default="", help="size of a random model instead of --model-path")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where it is kept")
    parser.add_argument("--commit", default="", help="of the code, where git does not tell it")
    options, flags = parser.parse_known_args()
    flags = [*model_flags(options), "--max-running", str(options.seats), "--log-level", "warning", *flags]
    with service(flags) as url:
        client = Client(url, options)
        figures = measured(client, options)
    about = {**origin(options.commit), "seats": options.seats, "requests": options.requests, "rounds": options.rounds}
    print(json.dumps({"bench": "batch_ttft", **about, "flags": flags, **figures, "target": TARGET}))


if __name__ == "__main__":
    sys.exit(main())
