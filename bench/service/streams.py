"""What stands between an engine and its clients, without a model: CPU time per delta, and what it adds to first tokens.

`--streams` clients stream from an engine that draws a token for every row each `--step-ms` (`service/paced_engine.py`);
when all have begun, `--requests` short requests come one after another. For these: the client's seconds to the first
token less the engine's (from arrival to sinks), which is the time that workers, sockets and Python's lock take, both
ways. CPU time is told per delta, for the engine's process and the HTTP workers, over the time of the requests.

For the streams themselves: errors, seconds to the first token when all are opened at once, and the memory (PSS) of all
processes of the service while all are open. Bounds: one client process opens them one after another on the service's
cores, so the last ones' first tokens hold the time that opening takes; a worker writes at most --max-streams.

    python -m bench.service.streams --streams 240 --step-ms 33
    python -m bench.service.streams --streams 1000 --step-ms 100 --http-workers 3
    python -m bench.service.streams --streams 1000 --step-ms 100 --http-workers 3 --front nginx
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

from bench.tools.http_load import Load, fetch, over_http, served_tokens
from bench.tools.service import machine, percentile, service
from bench.ttft import ask
from supervisor.engines import PRELOADED

ROUTE = "/v1/chat/completions"
ENGINE_FORKS = PRELOADED.encode()
"""In the command line of what engines of other models are forked from, and so in theirs."""


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest for the service."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=240)
    parser.add_argument("--step-ms", type=float, default=33.0)
    parser.add_argument("--launch-ms", type=float, default=0.0, help="of a step, in which Python's lock is held")
    parser.add_argument("--chunk-size", type=int, default=4)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--client-processes", type=int, default=1)
    return parser.parse_known_args()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process's threads that live."""
    used = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        used += int((task / "schedstat").read_text().split()[0])
    return used / 1e9


def wait_for(url: str, rows: int, opening: threading.Thread) -> None:
    """Until so many rows run. Exits if the clients end before."""
    while (running := json.loads(fetch(url, "/status", ""))["running_rows"]) < rows:
        if not opening.is_alive():
            raise SystemExit(f"the streams ended before all {rows} ran; {running} run")
        time.sleep(0.1)


def memory_mb(engine: int, figure: str = "Pss") -> dict[str, float]:
    """Proportional set size in MB of the service's processes, by what they are; "Pss_Anon": without pages of files."""
    sizes: dict[str, float] = {}
    supervisor = parent(engine)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or not _descends(int(entry.name), supervisor):
            continue
        try:
            lines = (entry / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kind = "engine" if int(entry.name) == engine else _kind((entry / "cmdline").read_bytes())
        size = next(int(line.split()[1]) for line in lines if line.startswith(f"{figure}:")) / 1e3
        sizes[kind] = round(sizes.get(kind, 0.0) + size, 3)
    return sizes


def _kind(command: bytes) -> str:
    if b"forkserver" in command:
        return "models" if ENGINE_FORKS in command else "http"
    return "nginx" if command.startswith(b"nginx") else "supervisor"


def parent(pid: int) -> int:
    """The process that has started it; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def _descends(pid: int, ancestor: int) -> bool:
    while pid not in (0, 1, ancestor):
        pid = parent(pid)
    return pid == ancestor


def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one run."""
    seconds = options.requests * (options.step_ms * 3e-3 + 0.05) + 3
    tokens = int(seconds * 1e3 / options.step_ms)
    bulk = Load(ROUTE, options.streams, 1, 1, tokens, 16, options.chunk_size, True, "")
    single = Load(ROUTE, 1, 1, 1, 4, 60, 1, True, "")
    runs: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: runs.append(over_http(bulk, url, options.client_processes)))
    thread.start()
    wait_for(url, options.streams, thread)
    processes = json.loads(fetch(url, "/status", ""))["processes"]
    engine, workers = processes["engine"]["pid"], [worker["pid"] for worker in processes["http_workers"]]
    memory = memory_mb(engine)
    begun, before = served_tokens(url, ""), (cpu_s(engine), sum(map(cpu_s, workers)))
    seen = [ask(single, url, 1000 + n) for n in range(options.requests)]
    deltas = (served_tokens(url, "") - begun) / options.chunk_size
    used = cpu_s(engine) - before[0], sum(map(cpu_s, workers)) - before[1]
    told = json.loads(fetch(url, "/status", ""))["first_s"][-options.requests :]
    thread.join()
    added = [client - inside for client, inside in zip(seen, told, strict=True)]
    first = [figure[0] for figure in runs[0]["figures"] if figure[0]]
    errors = [figure[2] for figure in runs[0]["figures"] if figure[2]]
    return {
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "streams_ttft_ms_p50": percentile(first, 0.5),
        "streams_ttft_ms_p99": percentile(first, 0.99),
        "memory_mb": memory,
        "added_ms_p50": percentile(added, 0.5),
        "added_ms_p90": percentile(added, 0.9),
        "added_ms_max": percentile(added, 1.0),
        "ttft_ms_p50": percentile(seen, 0.5),
        "engine_us_per_delta": round(used[0] / deltas * 1e6, 1),
        "workers_us_per_delta": round(used[1] / deltas * 1e6, 1),
    }


def main() -> None:
    """Measure and print; the last line is JSON."""
    options, flags = parse()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.environ["RWKV_BENCH_STEP_MS"] = str(options.step_ms)
    os.environ["RWKV_BENCH_LAUNCH_MS"] = str(options.launch_ms)
    with service(flags, module="bench.service.paced_engine") as url:
        over_http(Load(ROUTE, 2, 1, 1, 8, 16, 4, True, ""), url, 1)
        print(json.dumps({**machine(), **vars(options), "flags": flags, **measure(url, options)}))


if __name__ == "__main__":
    main()
