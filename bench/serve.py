"""Load over HTTP compared with the engine alone: tokens/s, time to first token, inter-token times, errors, ratio.

    python -m bench.serve --concurrency 64 --chunk-size 4
    python -m bench.serve --url http://127.0.0.1:8000 --route /translate/v1/batch-translate --no-stream

`--concurrency` clients run at once; several numbers are measured one after the other. Each client sends `--rounds`
requests of `--rows` prompts, one after the other. Each row samples exactly `--max-tokens` tokens where the route
allows it. The service counts tokens (/metrics). The client measures times in its own process, with one selector loop
and no threads. Its first connections are open before the clock starts, as those of clients that keep them. The engine
alone gets the same prompts as one job per client, in its own process with the same settings. Both alternate, and the
ratio compares medians.

`cpu_ratio` compares CPU seconds per token of the engine alone and of all service processes. It is also reliable on a
shared machine, where wall time is not.

On a GPU give `--gpu-memory-utilization 0.42` or less: the engine alone, which starts second on the same GPU, gets twice
the share.

Bounds: on few cores, client, HTTP workers and engine share the cores, so the ratio shows the CPU time of HTTP. On a GPU
the engine hardly needs a core, so the ratio shows the added wall time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.tools.http_load import Load, fetch, over_http
from bench.tools.record import Arguments, finish, save
from bench.tools.service import machine, service, service_cpu_s, summary
from programs.settings import parse_settings

MEMORY_FLAG = "--gpu-memory-utilization"


def engine_alone(arguments: Sequence[str], reply: Connection) -> None:
    """Run the prompts of each load received through an engine here; sends a run as `over_http` returns it."""
    from bench.traffic import PENALTIES
    from programs.settings.model_file import with_default_model
    from rwkv_batch.engine import Engine
    from rwkv_batch.request import GenerateRequest, Job, JobEvents
    from rwkv_batch.tokenizer import Tokenizer

    engine = Engine(with_default_model(parse_settings(arguments, os.environ)).engine)
    engine.start()
    encode = Tokenizer().encode

    def job(load: Load, client: int, turn: int) -> Job:
        rows = [
            GenerateRequest(
                prompt=encode(prompt),
                max_tokens=load.max_tokens,
                sampling=PENALTIES,
                ignore_eos=True,
                chunk_size=load.chunk_size if load.stream else 0,
            )
            for prompt in load.prompts(client)
        ]
        return Job(job_id=f"{client}.{turn}", rows=rows, sampler="rapid", label="bench")

    def run(load: Load) -> dict[str, Any]:
        tokens = 0
        clients_done = threading.Semaphore(0)
        times: dict[str, list[float]] = {}

        def submit(client: int, turn: int) -> None:
            new = job(load, client, turn)
            times[new.job_id] = [time.perf_counter()]
            engine.submit(new, sink, lambda refusal: None)

        def sink(events: JobEvents) -> None:
            nonlocal tokens
            tokens += sum(delta.num_tokens for delta in events.deltas)
            times[events.job_id].append(time.perf_counter())
            if events.done:
                client, turn = map(int, events.job_id.split("."))
                if turn + 1 < load.rounds:
                    submit(client, turn + 1)
                else:
                    clients_done.release()

        started, used = time.perf_counter(), time.process_time()
        for client in range(load.concurrency):
            submit(client, 0)
        for _ in range(load.concurrency):
            clients_done.acquire()
        seconds, used = time.perf_counter() - started, time.process_time() - used
        figures = [(at[1] - at[0], [b - a for a, b in pairwise(at[1:])], "") for at in times.values()]
        return {"tokens": tokens, "seconds": seconds, "clients_cpu_s": [used], "figures": figures}

    while load := reply.recv():
        reply.send(run(load))
    engine.stop()


def for_second(flags: Sequence[str]) -> list[str]:
    """Return the flags of a second engine on the service's GPU.

    Its share of the memory counts the memory of the service's engine, too.
    """
    doubled = list(flags)
    if MEMORY_FLAG in doubled:
        place = doubled.index(MEMORY_FLAG) + 1
        doubled[place] = str(2 * float(doubled[place]))
    return doubled


@contextmanager
def engine_process(arguments: Sequence[str]) -> Iterator[Connection]:
    """Start a process with an engine. Send a Load to run; receive what `over_http` returns."""
    # The service's engine process sets this too: with spinning threads an engine alone is a third faster.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    folder = tempfile.mkdtemp(prefix="rwkv-bench-")
    flags = [*arguments, "--state-db", str(Path(folder) / "alone.db")]
    process = spawn.Process(target=engine_alone, args=(flags, theirs))
    process.start()
    theirs.close()
    try:
        yield ours
        ours.send(None)
        process.join(30)
    finally:
        process.kill()


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest for the service."""
    parser = Arguments(__doc__)
    parser.add_argument("--url", help="URL of a running service; skips the engine alone")
    parser.add_argument("--route", default="/v1/chat/completions")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64])
    parser.add_argument("--rounds", type=int, default=1, help="requests of each client, one after the other")
    parser.add_argument("--rows", type=int, default=1, help="prompts in each request")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompt-words", type=int, default=16)
    parser.add_argument("--chunk-size", type=int, default=4)
    parser.add_argument("--no-stream", action="store_true")
    parser.add_argument("--password", default="")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--client-processes", type=int, default=1)
    return parser.parse_known_args()


def compare(load: Load, url: str, engine: Connection, repeats: int, client_processes: int) -> dict[str, Any]:
    """Alternate between HTTP and the engine alone."""
    alone, http, costs, served_costs = [], [], [], []
    warm = replace(load, concurrency=2, rounds=1)
    over_http(warm, url, 1)
    engine.send(warm)
    engine.recv()
    for _ in range(repeats):
        engine.send(load)
        run = engine.recv()
        alone.append(summary(load, run))
        costs.append(sum(run["clients_cpu_s"]) / run["tokens"] * 1e6)
        before = service_cpu_s(url)
        run = over_http(load, url, client_processes)
        served_costs.append((service_cpu_s(url) - before) / run["tokens"] * 1e6)
        http.append(summary(load, run))
        print(
            f"{load.concurrency} clients: engine alone {alone[-1]['tokens_per_s']} tokens/s "
            f"({costs[-1]:.0f} us CPU per token), "
            f"over HTTP {http[-1]['tokens_per_s']} tokens/s ({served_costs[-1]:.0f} us)",
            flush=True,
        )
    speeds = [one["tokens_per_s"] for one in alone]
    return {
        "engine_tokens_per_s": speeds,
        "engine": median_run(alone),
        "ratio": round(statistics.median(one["tokens_per_s"] for one in http) / statistics.median(speeds), 3),
        "cpu_us_per_token_engine": round(statistics.median(costs), 1),
        "cpu_us_per_token_served": round(statistics.median(served_costs), 1),
        "cpu_ratio": round(statistics.median(costs) / statistics.median(served_costs), 3),
        **http_report(http),
    }


def http_report(http: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median run over HTTP and the speed of each."""
    return {"http": median_run(http), "http_tokens_per_s": [run["tokens_per_s"] for run in http]}


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return sorted(runs, key=lambda run: run["tokens_per_s"])[len(runs) // 2]


def main() -> None:
    """Measure and print; the last line is JSON, with the loads in order. `--out` is written after each load."""
    options, rest = parse()
    loads = [
        Load(
            options.route,
            concurrency,
            options.rounds,
            options.rows,
            options.max_tokens,
            options.prompt_words,
            options.chunk_size,
            not options.no_stream and "translate" not in options.route,
            options.password,
        )
        for concurrency in options.concurrency
    ]
    report: dict[str, Any] = {**machine(options.commit), "load": {**vars(loads[0]), "password": bool(options.password)}}
    report["loads"] = []

    def keep(load: Load, result: dict[str, Any]) -> None:
        report["loads"].append({**result, "concurrency": load.concurrency})
        save(report, options.out)

    if options.url:
        for load in loads:
            runs = [over_http(load, options.url, options.client_processes) for _ in range(options.repeats)]
            keep(load, http_report([summary(load, run) for run in runs]))
    else:
        with service(rest) as url, engine_process(for_second(rest)) as engine:
            report["status"] = {key: json.loads(fetch(url, "/status", ""))[key] for key in ("kernels", "samplers")}
            for load in loads:
                keep(load, compare(load, url, engine, options.repeats, options.client_processes))
    finish(report, options.out)


if __name__ == "__main__":
    main()
