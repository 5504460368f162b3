"""Time to first token of single requests while bulk streams run, or of an idle engine.

    python -m bench.ttft --concurrency 320 --requests 12 --model-path FILE --wkv-state fp16
    python -m bench.ttft --concurrency 0 --words 14 700 2400 --model-path FILE   # idle; 24 tokens and more

`--concurrency` clients stream `--max-tokens` tokens each. After `--settle` seconds, `--requests` requests with longer
prompts run one after another. Prints when each was sent and its time to first token, by the client's clock.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import threading
import time
import urllib.parse
from typing import Any

from bench.tools.http_load import Load, drive, over_http
from bench.tools.record import Arguments, finish
from bench.tools.service import machine, percentile, service, summary


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
    parser.add_argument("--words", type=int, nargs="+", default=[60], help="of the single requests' prompts")
    return parser.parse_known_args()


def loads(options: argparse.Namespace) -> tuple[Load, list[Load]]:
    route = "/v1/chat/completions"
    bulk = Load(route, options.concurrency, 1, 1, options.max_tokens, options.bulk_words, options.chunk_size, True, "")
    return bulk, [Load(route, 1, 1, 1, 8, words, 1, True, "") for words in options.words]


def send_request(load: Load, url: str, number: int) -> float:
    """Send one request; returns the seconds to its first token, 0 if it failed."""
    address = urllib.parse.urlsplit(url)
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    drive(load, address.hostname or "", address.port or 80, [number], results)
    _, _, _, [(first, _, failed)] = results.get()
    if failed:
        print(f"request {number} failed: {failed}")
    return float(first)


def main() -> None:
    """Measure and print; the last line is JSON."""
    options, flags = parse()
    bulk, singles = loads(options)
    with service(flags) as url:
        over_http(Load(**{**vars(bulk), "concurrency": 2, "max_tokens": 8}), url, 1)
        runs: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: runs.append(over_http(bulk, url, options.client_processes)))
        if bulk.concurrency:
            thread.start()
        started = time.perf_counter()
        time.sleep(options.settle)
        firsts: dict[int, list[float]] = {single.prompt_words: [] for single in singles}
        for number, single in itertools.product(range(options.requests), singles):
            at = time.perf_counter() - started
            first = send_request(single, url, 1000 + number)
            firsts[single.prompt_words].append(first)
            print(f"{single.prompt_words} words, sent at {at:.2f} s: {first * 1e3:.1f} ms")
        over_at = time.perf_counter() - started
        if bulk.concurrency:
            thread.join()
    report = {
        **machine(options.commit),
        "flags": flags,
        "load": vars(bulk),
        "ttft": [
            {"words": words, "ms_p50": percentile(of_words, 0.5), "ms_max": percentile(of_words, 1.0)}
            for words, of_words in firsts.items()
        ],
        "requests_ended_s": round(over_at, 2),
        "bulk": summary(bulk, runs[0]) if runs else None,
    }
    finish(report, options.out)


if __name__ == "__main__":
    main()
