"""Runs the real service under mixed traffic and faults, and counts violations.

    python -m bench.chaos [--hours 1.5] [--clients 16] [--pause-s 0] [--model FILE] [--seed 1] [--log FILE] [--out FILE]
                          [--service-argument=--front=nginx ...]

`app.py` runs with small caches. Its clients use every route, batches included. They also disconnect early, send invalid
bodies, import intact and damaged session files, and delete sessions. All the time, keys, tuned states, adapters and
models are reloaded and used. In the storm, the first third, the program kills HTTP workers and the engine, and sends
malformed packets. In the quiet part it does not. It counts:

* unexplained answers: an unexpected status or a broken connection while no fault was injected. A 429 of a full queue
  is expected.
* slots, leases, rows and jobs in use without a request, before and after the quiet part;
* growth of memory, threads and descriptors of each process, and of the number of files, in the last three quarters of
  the quiet part. The upper bound is 1 % per hour (`health.py`). Files, threads and descriptors come and go with
  requests, so their lowest numbers count. The caches are full by then. Pages of files (code, embedding rows) do not
  count.
* acknowledged turns that were lost or changed. All sessions run a second time on an undisturbed service
  (`bench/chaos/crash.py`).

The last line is JSON. The exit status is 1 if there was any violation.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from bench.chaos.crash import check_all, stored_names, wrong_sessions
from bench.chaos.health import (
    FLAT_COUNT,
    FLAT_THREADS,
    Figures,
    Sampler,
    Slope,
    all_figures,
    held_when_idle,
    name_of,
    names_of,
    slope,
)
from bench.chaos.reloads import Administrator, Files
from bench.chaos.service import PASSWORD, Disturbances, Service, logs
from bench.chaos.traffic import Client, Findings, stop
from bench.tools.record import Arguments, finish, origin

STORM_SHARE = 1 / 3
"""Share of the run in which faults are injected."""
PROGRESS_S = 300.0
WARM_UP_S = 15.0
TINY = (
    "--max-running=8",
    "--l1-sessions=2",
    "--l2-sessions=3",
    "--prefix-cache-slots=2",
    "--prefix-cache-l2=2",
    "--checkpoint-tokens=64",
    "--checkpoint-idle-s=0.5",
    "--retain-tokens=-1",
    "--http-workers=2",
)


def inject_faults(disturbances: Disturbances, seconds: float, rng: random.Random) -> None:
    """Kill processes and send malformed packets for `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(min(rng.uniform(2, 12), max(0.0, until - time.monotonic())))
        if rng.random() < 0.5:
            disturbances.send_malformed(rng)
        else:
            with contextlib.suppress(httpx.HTTPError):
                disturbances.kill(rng)


def measure_idle(
    clients: list[Client], gate: threading.Event, service: Service
) -> tuple[dict[str, Any], dict[int, Figures]]:
    """Pause all clients and measure the idle service: what it holds, and its processes."""
    gate.clear()
    for client in clients:
        client.is_waiting.wait(150)
    held = held_when_idle(service.url)
    time.sleep(3.0)
    figures = all_figures(service.process.pid)
    gate.set()
    return held, figures


def run(folder: Path, arguments: argparse.Namespace, service_arguments: list[str]) -> dict[str, Any]:
    """Run traffic and faults against one service, and return the record."""
    (folder / "tmp").mkdir()
    files, database = Files(folder), folder / "sessions.db"
    flags = [*service_arguments, *TINY, "--password", PASSWORD, *files.arguments, *arguments.service_argument]
    service = Service(folder, *flags, state_db=database, TMPDIR=str(folder / "tmp"))
    disturbances, findings, gate = Disturbances(service.url), Findings(), threading.Event()
    gate.set()
    common = (disturbances, findings, gate)
    clients = [Client(service.url, number, *common, arguments.pause_s) for number in range(arguments.clients)]
    clients.append(Administrator(service.url, arguments.clients, *common, supervisor=service.process.pid, files=files))
    sampler = Sampler(service.process.pid, folder)
    sampler.start()
    for client in clients:
        client.start()
    seconds = arguments.hours * 3600
    try:
        inject_faults(disturbances, seconds * STORM_SHARE, random.Random(arguments.seed))
        time.sleep(WARM_UP_S)  # the last restarted process fills its pools
        held_before, _ = measure_idle(clients, gate, service)
        quiet_since = time.monotonic()
        wait(seconds * (1 - STORM_SHARE), findings)
        held_after, after = measure_idle(clients, gate, service)
    finally:
        stop(clients, gate)
        sampler.stop()
    names = {pid: name_of(pid) for pid in after} | names_of(service.url)
    talks = [talk for client in clients for talk in client.talks]
    service.stop()
    since = quiet_since + (time.monotonic() - quiet_since) / 4
    found = slopes_since(sampler, since, names)
    stored = stored_names(folder, service_arguments, database)
    wrong = wrong_sessions(talks, stored) + check_all(folder, talks, service_arguments)
    return {
        "answers": dict(sorted(findings.answers.items())),
        "disturbances": disturbances.counts,
        "acknowledged_turns": findings.acknowledged,
        "sessions": len(talks),
        "lost_or_different": len(wrong),
        "first_differences": wrong[:5],
        "unexplained": len(findings.unexplained),
        "first_unexplained": findings.unexplained[:10],
        "held_at_rest": [held_before, held_after],
        "growth_an_hour": {what: slope_record(one) for what, one in found.items()},
        "grows": [what for what, one in found.items() if one.grows],
    }


def wait(seconds: float, findings: Findings) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, PROGRESS_S))
        with findings.lock:
            answers, unexplained = findings.answers.total(), findings.unexplained[:3]
        print(f"{answers} answers, {findings.acknowledged} turns, unexplained: {unexplained}", flush=True)


def slopes_since(sampler: Sampler, since: float, names: dict[int, str]) -> dict[str, Slope]:
    """Return the slopes after `since` by name. Processes that started later have not warmed up and are left out."""
    found = {"files": slope([(at, float(count)) for at, count in sampler.files if at > since], FLAT_COUNT)}
    for pid, samples in sampler.samples.items():
        if pid in names and samples[0][0] <= since:
            for what, max_more in (("anonymous", None), ("threads", FLAT_THREADS), ("descriptors", FLAT_COUNT)):
                points = [(at, float(getattr(figures, what))) for at, figures in samples if at > since]
                found[f"{what} of {pid} {names[pid]}"] = slope(points, max_more)
    return {what: one for what, one in found.items() if one is not None}


def slope_record(found: Slope) -> dict[str, float]:
    return {name: round(getattr(found, name), 4) for name in ("an_hour", "low", "high")} | {
        "seconds": round(found.seconds)
    }


def has_violations(result: dict[str, Any]) -> bool:
    held = any(count for one in result["held_at_rest"] for count in one.values())
    return bool(held or result["unexplained"] or result["lost_or_different"] or result["grows"])


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--hours", type=float, default=1.5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pause-s", type=float, default=0.0, help="mean pause of a client after a request")
    parser.add_argument("--model", default="", help="default: the built-in demo model")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="file for the service's log")
    parser.add_argument("--service-argument", action="append", default=[], help="passed to app.py unchanged")
    arguments = parser.parse_args()
    service_arguments = ["--dtype", "fp32", "--pp-devices", "cpu", "--log-level", "warning", "--access-log", "false"]
    service_arguments += ["--model-path", arguments.model] if arguments.model else []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        try:
            result = run(folder, arguments, service_arguments)
        finally:
            if arguments.log is not None:
                arguments.log.write_text(logs(folder))
        tracebacks = logs(folder).count("Traceback")
    last = {
        "measure": "chaos",
        **origin(arguments.commit),
        "hours": arguments.hours,
        "clients": arguments.clients,
        **result,
    }
    last |= {"tracebacks": tracebacks, "ok": not has_violations(result)}
    finish(last, arguments.out)
    sys.exit(1 if has_violations(result) else 0)


if __name__ == "__main__":
    main()
