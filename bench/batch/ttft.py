"""Time to first token of interactive requests beside a batch that fills every seat, against an idle engine's.

    python -m bench.batch.ttft [--seats 64] [--requests 200] [--words 60,600] [flags of the service]
    python -m bench.batch.ttft --random 7.2b --folder /dev/shm --seats 320 --wkv-state fp16      # on a GPU

A service is started here. Single requests, streamed, come one after another, each 0 to `--pause` s after the last one's
end; in each of `--rounds` rounds first to the idle service, then as many while a batch of /openai/v1/batches, whose
lines do not end by themselves, has all places but those that are kept for interactive work. Measured at the client, for
each length of prompt: p50 and p99 of both, their ratio; and what the batch draws meanwhile, against what it draws when
no interactive request has come for as long as steps stay short behind one. What bounds the ratio: a piece of a step
that runs cannot be left, and on a CPU no part of one, so an interactive row waits for its rest; the shorter its prompt,
the more that is beside its own time. `--line-tokens 100000,96` measures beside two kinds of batches, in turns: of the
second, lines end all the time, and prompts of others are read. A line of JSON after each round; the last line is all.

With `--slowest 10` the service logs at level debug, and of the ten slowest requests of each kind is told where the time
went, in ms: until the engine had the job, until its thread had taken it and it had a place (`seated`), until the step
that read the end of its prompt was launched and until that was read, and from there to the client; beside it the steps
that read prompts and the collections of garbage, in any process of the service, meanwhile.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from bench.tools.http_load import Load
from bench.tools.origin import origin
from bench.tools.service import percentile, service
from bench.traffic import numbers
from bench.ttft import ask
from rwkv_batch.core.batch_share import LULL_S

ROUTE, ASKED = "/v1/chat/completions", "/openai/v1/chat/completions"
"""of a batch's lines, and of interactive requests"""
LETTER = 98
"""A token that is a letter. Of random weights one token in 130 is a part of a character, which is only told with the
next: the time to the first text would be that to the second token."""
FILES, BATCHES = "/openai/v1/files", "/openai/v1/batches"
TARGET = 1.3
WAIT_S = 120.0
_TOLD = re.compile(r"(\S+) +DEBUG +(first token|prompts|collection) (\{.*\})")


@dataclass(slots=True)
class Asked:
    """One interactive request; times in seconds."""

    kind: str
    """"idle", or how many tokens the lines of the batch beside it have"""
    words: int
    sent_at: float
    """of time.monotonic"""
    first: float
    """0: it failed"""


class Client:
    """Requests to one service."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=60.0)
        self._max_tokens = options.max_tokens
        self._dice = random.Random(options.seed)
        self._pause_s = options.pause
        self._asked = 0
        self.requests: list[Asked] = []
        """all of `firsts`"""

    def firsts(self, count: int, words: int, kind: str = "idle") -> list[float]:
        """Seconds to the first token of so many requests with prompts of so many words, one after another."""
        single = Load(ASKED, 1, 1, 1, self._max_tokens, words, 1, True, "", only_token=LETTER)
        found = []
        for _ in range(count):
            time.sleep(self._dice.random() * self._pause_s)
            self._asked += 1
            sent_at = time.monotonic()
            found.append(ask(single, self.url, 1000 + self._asked))
            self.requests.append(Asked(kind, words, sent_at, found[-1]))
        return found

    def status(self) -> dict[str, Any]:
        """What /status says."""
        value: dict[str, Any] = self._http.get("/status").raise_for_status().json()
        return value

    def drawn(self) -> float:
        """Tokens that the service has drawn."""
        return float(self.status()["generated_tokens"])

    def begin_batch(self, lines: int, words: int, tokens: int) -> str:
        """A batch whose lines draw so many tokens on average, half to one and a half times; returns its id."""
        body = {"temperature": 1.0, "ignore_eos": True, "stop_tokens": [], "stream": False}
        prompts = [Load(ROUTE, 1, 1, 1, 1, words, 1, False, "").prompts(number)[0] for number in range(lines)]
        own = [
            {"contents": [prompt], "max_tokens": max(1, int(tokens * (0.5 + self._dice.random())))}
            for prompt in prompts
        ]
        entries = [
            {"custom_id": str(number), "method": "POST", "url": ROUTE, "body": {**body, **line}}
            for number, line in enumerate(own)
        ]
        content = "\n".join(map(json.dumps, entries)).encode()
        upload = self._http.post(FILES, files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"})
        wanted = {"input_file_id": upload.raise_for_status().json()["id"], "endpoint": ROUTE}
        made = self._http.post(BATCHES, json={**wanted, "completion_window": "24h"}).raise_for_status()
        return str(made.json()["id"])

    def end_batch(self, batch: str) -> None:
        """Cancel it, and wait until its rows have gone. Raises SystemExit if it had come to its end before."""
        status = self._http.get(f"{BATCHES}/{batch}").raise_for_status().json()["status"]
        if status != "in_progress":
            raise SystemExit(f"the batch is {status}: not all requests were beside it; give more --lines")
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


@dataclass(slots=True)
class Figures:
    """Of one length of prompt beside one kind of batch; seconds, and tokens/s that the batch draws meanwhile."""

    words: int
    line_tokens: int
    idle: list[float]
    beside: list[float]
    drawn: list[float]

    def told(self) -> dict[str, Any]:
        """Plain data."""
        figures = compared(self.words, self.idle, self.beside)
        return figures | {"line_tokens": self.line_tokens, "batch_tokens_per_s": round(fmean(self.drawn), 1)}


def measured(client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    part, rows, alone = -(-options.requests // options.rounds), [], {}
    idle: dict[int, list[float]] = {words: [] for words in options.words}
    kinds = [Figures(words, tokens, idle[words], [], []) for tokens in options.line_tokens for words in options.words]
    client.firsts(options.warm_up, options.words[0], "first")
    for number in range(options.rounds):
        for words in options.words:
            idle[words] += client.firsts(part, words)
        for tokens in options.line_tokens:
            batch = client.begin_batch(options.lines or 2 * options.seats, options.batch_words, tokens)
            rows.append(client.wait_for(options.seats - options.seats // 16 - 1, options.seats))
            for figures in (figures for figures in kinds if figures.line_tokens == tokens):
                beside(client, figures, part, options)
            if number == options.rounds - 1:
                time.sleep(options.lull)
                alone[str(tokens)] = speed(client, options.settle)
            client.end_batch(batch)
        print(json.dumps({"rounds": number + 1, "prompts": [figures.told() for figures in kinds]}), flush=True)
    return {"rows_of_the_batch": rows, "batch_alone_tokens_per_s": alone, "prompts": [one.told() for one in kinds]}


def beside(client: Client, figures: Figures, count: int, options: argparse.Namespace) -> None:
    """So many requests beside the batch that runs."""
    before, started = client.drawn(), time.perf_counter()
    figures.beside += client.firsts(count, figures.words, str(figures.line_tokens))
    drawn = client.drawn() - before - count * options.max_tokens
    figures.drawn.append(drawn / (time.perf_counter() - started))


def compared(words: int, idle: Sequence[float], beside: Sequence[float]) -> dict[str, Any]:
    """Figures of one length of prompt."""
    return {
        "words": words,
        "idle_ms": {"p50": percentile(idle, 0.5), "p99": percentile(idle, 0.99), "max": percentile(idle, 1.0)},
        "beside_ms": {"p50": percentile(beside, 0.5), "p99": percentile(beside, 0.99), "max": percentile(beside, 1.0)},
        "p50_ratio": round(_of(beside, 0.5) / _of(idle, 0.5), 3),
        "p99_ratio": round(_of(beside, 0.99) / _of(idle, 0.99), 3),
        "failed": sum(not first for first in (*idle, *beside)),
    }


def _of(values: Sequence[float], part: float) -> float:
    return percentile(values, part) or 1e-9


def explained(requests: Sequence[Asked], log: Path, most: int) -> dict[str, list[dict[str, Any]]]:
    """The slowest requests of each kind and length, with what the service's log says of each."""
    told: dict[str, list[tuple[str, dict[str, Any]]]] = {"first token": [], "prompts": [], "collection": []}
    with log.open(errors="replace") as lines:
        for found in filter(None, map(_TOLD.search, lines)):
            told[found[2]].append((found[1], json.loads(found[3])))
    kinds = dict.fromkeys((one.kind, one.words) for one in requests)
    return {
        f"{kind}, {words} words": [
            explanation(one, told)
            for one in sorted(requests, key=lambda one: -one.first)
            if (one.kind, one.words) == (kind, words)
        ][:most]
        for kind, words in kinds
    }


def explanation(one: Asked, told: dict[str, list[tuple[str, dict[str, Any]]]]) -> dict[str, Any]:
    """Where the time of one request went, in ms, and what there was meanwhile."""
    until = one.sent_at + one.first
    entry = next((entry for _, entry in told["first token"] if one.sent_at <= entry["at_s"] <= until), None)
    parts: dict[str, Any] = {"first_ms": round(one.first * 1e3, 1)}
    if entry is not None:
        came = (entry["at_s"] - one.sent_at) * 1e3
        parts |= {
            "to_engine": round(came, 1),
            "seated": round(entry["seated_ms"], 1),
            "launched": round(entry["waited_ms"] - entry["seated_ms"], 1),
            "read": round(entry["first_token_ms"] - entry["waited_ms"], 1),
            "to_client": round(one.first * 1e3 - came - entry["first_token_ms"], 1),
        }
    for name in ("prompts", "collection"):
        parts[name] = [
            {"process": process, "from_sending_ms": round((entry["at_s"] - one.sent_at) * 1e3, 1)}
            | {key: value for key, value in entry.items() if key not in ("at_s", "at_ms")}
            for process, entry in told[name]
            if entry["at_s"] < until and entry["at_s"] + entry["ms"] / 1e3 > one.sent_at
        ]
    return parts


def model_flags(options: argparse.Namespace) -> list[str]:
    """--model-path of a random model of a released shape, if one is wanted."""
    if not options.random:
        return []
    import torch

    from bench.tools.gpu_model import write_random_file

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
    parser.add_argument("--line-tokens", type=numbers, default=(100_000,), help="drawn by each line of a batch")
    parser.add_argument("--lines", type=int, default=0, help="of a batch; 0: two for each seat")
    parser.add_argument("--warm-up", type=int, default=32, help="requests before any is counted")
    parser.add_argument("--slowest", type=int, default=0, help="requests of each kind that are explained")
    parser.add_argument("--log", type=Path, help="where the service's log is kept then")
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
    level = "debug" if options.slowest else "warning"
    flags = [*model_flags(options), "--max-running", str(options.seats), "--log-level", level, *flags]
    with tempfile.TemporaryDirectory() as folder:
        path = options.log or Path(folder) / "log"
        with path.open("wb") as log, service(flags, log if options.slowest else None) as url:
            client = Client(url, options)
            figures = measured(client, options)
        slowest = explained(client.requests, path, options.slowest) if options.slowest else {}
    for kind, requests in slowest.items():
        print(kind)
        for request in requests:
            print(" ", json.dumps(request))
    about = {**origin(options.commit), "seats": options.seats, "requests": options.requests, "rounds": options.rounds}
    about |= {"lines": options.lines, "flags": flags, **figures, "slowest": slowest}
    print(json.dumps({"bench": "batch_ttft", **about, "target": TARGET}))


if __name__ == "__main__":
    sys.exit(main())
