"""Tokens/s of every route that generates, with ratios to /v1.

The routes alternate on one service.

    python -m bench.routes --rows 64 --max-tokens 128
    python -m bench.routes --url http://127.0.0.1:8000 --routes /v1/chat/completions,/big_batch/completions

A run is one request of `--rows` prompts; on the state routes it is `--rows` requests with one session each. Each row
samples exactly `--max-tokens` tokens. The service counts tokens. Ratios compare medians. On a machine with other load,
CPU time per token (of the service's processes, the minimum of the runs) is more reliable.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from typing import Any

from bench.tools.http_load import Load, fetch, over_http
from bench.tools.record import Arguments, finish
from bench.tools.service import machine, service, service_cpu_s, summary

FIRST = "/v1/chat/completions"
ROUTES = (
    FIRST,
    "/v2/chat/completions",
    "/big_batch/completions",
    "/FIM/v1/batch-FIM",
    "/openai/v1/chat/completions",
    "/openai/v1/completions",
    "/state/chat/completions",
    "/multi_state/chat/completions",
    "/translate/v1/batch-translate",
)


def load_of(route: str, options: argparse.Namespace) -> Load:
    """Return the same rows in the form that this route takes."""
    one_by_one = "state/" in route
    clients, rows = (options.rows, 1) if one_by_one else (1, options.rows)
    stream = "translate" not in route
    return Load(
        route, clients, 1, rows, options.max_tokens, options.prompt_words, options.chunk_size, stream, options.password
    )


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest for the service."""
    parser = Arguments(__doc__)
    parser.add_argument("--url", default="", help="URL of a running service")
    parser.add_argument("--routes", default=",".join(ROUTES), help="the others are compared with the first one")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompt-words", type=int, default=16)
    parser.add_argument("--chunk-size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--password", default="")
    return parser.parse_known_args()


def main() -> None:
    """Measure and print; the last line is JSON."""
    options, rest = parse()
    loads = [load_of(route, options) for route in options.routes.split(",")]
    speeds: dict[str, list[float]] = {load.route: [] for load in loads}
    costs: dict[str, list[float]] = {load.route: [] for load in loads}
    errors: dict[str, str] = {}
    with contextlib.nullcontext(options.url) if options.url else service(rest) as url:
        for turn in range(options.repeats + 1):  # the first turn warms up
            for load in loads:
                before = service_cpu_s(url)
                run: dict[str, Any] = summary(load, over_http(load, url, 1))
                cost = (service_cpu_s(url) - before) / max(1, run["tokens"]) * 1e6
                if run["errors"]:
                    errors[load.route] = run["first_error"]
                if turn:
                    speeds[load.route].append(run["tokens_per_s"])
                    costs[load.route].append(round(cost, 1))
        status = json.loads(fetch(url, "/status", options.password))
    medians = {route: statistics.median(runs) for route, runs in speeds.items()}
    cheapest = {route: min(runs) for route, runs in costs.items()}
    first = loads[0].route
    for route, runs in speeds.items():
        spread = f"{min(runs):.0f}..{max(runs):.0f}"
        cpu = f"{cheapest[route]:7.0f} us CPU a token"
        print(f"{route:34} {medians[route]:9.1f} tokens/s ({spread})  {medians[route] / medians[first]:.3f}  {cpu}")
    report = {"rows": options.rows, "max_tokens": options.max_tokens, "tokens_per_s": speeds, "cpu_us": costs}
    ratios = {route: round(median / medians[first], 3) for route, median in medians.items()}
    report |= {"ratios": ratios, "errors": errors, "samplers": status["samplers"]}
    finish({**machine(options.commit), **report}, options.out)


if __name__ == "__main__":
    main()
