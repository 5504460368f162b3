"""Time to first token of single requests while bulk streams run.

Also prints the engine's log of each request.

    python -m bench.ttft --concurrency 320 --requests 12 --model-path FILE --wkv-state fp16

`--concurrency` clients stream `--max-tokens` tokens each. After `--settle` seconds, `--requests` requests with longer
prompts run one after another. Prints for each one:
- the client's time to first token;
- the wait until the step with the end of its prompt was launched;
- the steps that ended meanwhile: milliseconds from launch to tokens, launch time if long, rows and tokens;
- a CUDA graph that was captured meanwhile.

Steps overlap: a step is launched while the previous one runs. The program starts its own
service with --log-level debug.
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

from bench.tools.http_load import Load, drive, over_http
from bench.tools.record import Arguments, finish
from bench.tools.service import machine, percentile, service, summary

LONG_LAUNCH_MS = 20.0
_FIRST_TOKEN = re.compile(r"first token (\{.*\})")
_CAPTURED = re.compile(r"captured a graph of \d+ rows in \d+ ms")
_WORTH_SHOWING = re.compile(r"warm-up took|decode graphs| ERROR | WARNING ")


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest for the service."""
    parser = Arguments(__doc__)
    parser.add_argument("--concurrency", type=int, default=320)
    parser.add_argument("--max-tokens", type=int, default=700)
    parser.add_argument("--bulk-words", type=int, default=16)
    parser.add_argument("--chunk-size", type=int, default=4)
    parser.add_argument("--client-processes", type=int, default=4)
    parser.add_argument("--settle", type=float, default=2.5, help="seconds after the start of the bulk clients")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--words", type=int, default=60, help="of the single requests' prompts")
    return parser.parse_known_args()


def loads(options: argparse.Namespace) -> tuple[Load, Load]:
    route = "/v1/chat/completions"
    bulk = Load(route, options.concurrency, 1, 1, options.max_tokens, options.bulk_words, options.chunk_size, True, "")
    return bulk, Load(route, 1, 1, 1, 8, options.words, 1, True, "")


def send_request(load: Load, url: str, number: int) -> float:
    """Send one request; returns the seconds to its first token, 0 if it failed."""
    address = urllib.parse.urlsplit(url)
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    drive(load, address.hostname or "", address.port or 80, [number], results)
    _, _, _, [(first, _, failed)] = results.get()
    if failed:
        print(f"request {number} failed: {failed}")
    return float(first)


def log_entries(lines: list[str], least_prompt: int) -> list[dict[str, Any]]:
    """Return the engine's log entries of the single requests; bulk requests have shorter prompts."""
    entries: list[dict[str, Any]] = []
    captured: list[str] = []
    for line in lines:
        if "warm-up took" in line:
            captured.clear()
        elif found := _CAPTURED.search(line):
            captured.append(found.group())
        elif found := _FIRST_TOKEN.search(line):
            entry = json.loads(found.group(1))
            if entry["prompt_tokens"] >= least_prompt:
                entries.append({**entry, "captured": captured})
                captured = []
    return entries


def describe(step: dict[str, Any]) -> str:
    """Format a step: 12.7ms(321r,400t), with +90 if launching alone took 90 ms."""
    launching = f"+{step['launch_ms']:.0f}" if step["launch_ms"] > LONG_LAUNCH_MS else ""
    return f"{step['ms']}{launching}ms({step['rows']}r,{step['tokens']}t)"


def main() -> None:
    """Measure and print; the last line is JSON."""
    options, flags = parse()
    bulk, single = loads(options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        with path.open("wb") as log, service([*flags, "--log-level", "debug"], log) as url:
            over_http(Load(**{**vars(bulk), "concurrency": 2, "max_tokens": 8}), url, 1)
            runs: list[dict[str, Any]] = []
            thread = threading.Thread(target=lambda: runs.append(over_http(bulk, url, options.client_processes)))
            thread.start()
            started = time.perf_counter()
            time.sleep(options.settle)
            seen = [
                (time.perf_counter() - started, send_request(single, url, 1000 + n)) for n in range(options.requests)
            ]
            over_at = time.perf_counter() - started
            thread.join()
        lines = path.read_text(errors="replace").splitlines()
    entries = log_entries(lines, options.words)
    for line in filter(_WORTH_SHOWING.search, lines):
        print(line)
    print("  sent s  client ms  engine ms  waited ms  steps")
    for (at, first), entry in zip(seen, entries, strict=False):
        engine = f"{entry['first_token_ms']:10.1f} {entry['waited_ms']:10.1f}"
        steps = " ".join([*map(describe, entry["steps"]), *entry["captured"]])
        print(f"{at:8.2f} {first * 1e3:10.1f} {engine}  {steps}")
    firsts = [first for _, first in seen]
    report = {
        **machine(options.commit),
        "flags": flags,
        "load": vars(bulk),
        "ttft_ms": [round(first * 1e3, 1) for first in firsts],
        "ttft_ms_p50": percentile(firsts, 0.5),
        "ttft_ms_max": percentile(firsts, 1.0),
        "requests_ended_s": round(over_at, 2),
        "engine": entries,
        "bulk": summary(bulk, runs[0]),
    }
    finish(report, options.out)


if __name__ == "__main__":
    main()
