"""The real service under everything at once; what it must never do is counted.

    python -m bench.chaos [--minutes 10] [--clients 16] [--model FILE] [--seed 1] [--log FILE] [--out FILE]
                          [--service-argument=--front=nginx ...]

`app.py` with tiny caches serves some clients that use every route, leave in the middle, send wrong bodies, whole and
damaged session files and deletes. For the first three fifths of the time HTTP workers and the engine are killed and
malformed packets sent; then only traffic goes on. Counted are:

* answers that nothing explains: a status other than the request should get, or a broken connection, at a time when
  nothing was killed and no packet sent (a 429 of a full queue is explained by the clients themselves);
* slots, leases, rows and jobs held when nobody asks for anything, before and after the quiet part;
* threads and file descriptors that a process has more at the end of the quiet part than at its beginning, beyond a
  few of pools that fill when they are first needed;
* growth of memory in the last three quarters of that part, of each process that was there all that time: at most 1 %
  an hour (`slope.py`), as far as a short run can tell; bounded caches are so small here that they are full before, and
  pages of files do not count (the rows of the embedding that are read for the first time, code);
* acknowledged turns lost or different: every session is asked for again on a service that is never disturbed
  (`bench/chaos/crash.py` says how).

The last line is JSON; exit status 1 if anything of this was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from bench.chaos.crash import Service, check_all, misplaced, stored_names
from bench.chaos.disturbances import Disturbances
from bench.chaos.health import Figures, Sampler, all_figures, at_rest, name_of, names_of
from bench.chaos.slope import Slope, medians, slope
from bench.chaos.traffic import Client, Findings, stop
from bench.tools.origin import origin

STORM = 0.6
"""Share of the time in which things are broken."""
WARM_UP_S = 15.0
MORE = 8
"""Threads or files a process may have more: pools that fill when they are first needed."""
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


def storm(disturbances: Disturbances, seconds: float, draw: random.Random) -> None:
    """Kill and abuse for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(min(draw.uniform(2, 12), max(0.0, until - time.monotonic())))
        if draw.random() < 0.5:
            disturbances.abuse(draw)
        else:
            with contextlib.suppress(httpx.HTTPError):
                disturbances.kill(draw)


def rest(clients: list[Client], gate: threading.Event, service: Service) -> tuple[dict[str, Any], dict[int, Figures]]:
    """Hold all clients back, and look at the service alone."""
    gate.clear()
    for client in clients:
        client.is_waiting.wait(150)
    held = at_rest(service.url)
    time.sleep(3.0)
    figures = all_figures(service.process.pid)
    gate.set()
    return held, figures


def run(folder: Path, arguments: argparse.Namespace, service_arguments: list[str]) -> dict[str, Any]:
    """The whole run against one service."""
    database = str(folder / "sessions.db")
    service = Service(folder, *service_arguments, *TINY, "--state-db", database, *arguments.service_argument)
    disturbances, findings, gate = Disturbances(service.url), Findings(), threading.Event()
    gate.set()
    clients = [Client(service.url, number, disturbances, findings, gate) for number in range(arguments.clients)]
    sampler = Sampler(service.process.pid)
    sampler.start()
    for client in clients:
        client.start()
    seconds = arguments.minutes * 60
    try:
        storm(disturbances, seconds * STORM, random.Random(arguments.seed))
        time.sleep(WARM_UP_S)  # what was killed last fills its pools again
        held_before, before = rest(clients, gate, service)
        quiet_since = time.monotonic()
        time.sleep(seconds * (1 - STORM))
        held_after, after = rest(clients, gate, service)
    finally:
        stop(clients, gate)
        sampler.stop()
    names = {pid: name_of(pid) for pid in after} | names_of(service.url)
    talks = [talk for client in clients for talk in client.talks]
    more = {what: grown(before, after, what) for what in ("threads", "files")}
    service.stop()
    since = quiet_since + (time.monotonic() - quiet_since) / 4
    found = {pid: slope_since(samples, since) for pid, samples in sampler.samples.items() if pid in after}
    shape = {pid: kib_of_blocks(sampler.samples[pid]) for pid, one in found.items() if one and one.an_hour}
    stored = stored_names(folder, [*service_arguments, "--state-db", database])
    wrong = misplaced(talks, stored) + check_all(folder, talks, service_arguments)
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
        "more_threads": more["threads"],
        "more_files": more["files"],
        "memory_growth_an_hour": {f"{pid} {names[pid]}": told(one) for pid, one in found.items() if one},
        "memory_grows": [f"{pid} {names[pid]}" for pid, one in found.items() if one and one.grows],
        "memory_kib_of_blocks": {f"{pid} {names[pid]}": one for pid, one in shape.items()},
        "memory_mib": {f"{pid} {names[pid]}": one.rss >> 20 for pid, one in after.items()},
    }


def grown(before: dict[int, Figures], after: dict[int, Figures], what: str) -> dict[str, int]:
    """Processes that have more of it than they had."""
    more = {pid: getattr(after[pid], what) - getattr(figures, what) for pid, figures in before.items() if pid in after}
    return {f"{pid} {name_of(pid)}": count for pid, count in more.items() if count > MORE}


def slope_since(samples: list[tuple[float, int]], since: float) -> Slope | None:
    """Of memory after that moment; None for a process that came up later: it has not warmed up."""
    if samples[0][0] > since:
        return None
    return slope([(at, float(own)) for at, own in samples if at > since])


def kib_of_blocks(samples: list[tuple[float, int]]) -> list[tuple[int, int]]:
    """(seconds since the process was first seen, KiB) over its whole life: a line up, or steps that end."""
    points = medians([(at - samples[0][0], own / 1024) for at, own in samples])
    return [(round(at), round(kib)) for at, kib in points]


def told(found: Slope) -> dict[str, float]:
    """For the record."""
    return {name: round(getattr(found, name), 4) for name in ("an_hour", "low", "high")} | {
        "seconds": round(found.seconds)
    }


def is_bad(result: dict[str, Any]) -> bool:
    """Whether anything was found."""
    held = any(count for one in result["held_at_rest"] for count in one.values())
    leaks = bool(result["more_threads"] or result["more_files"] or result["memory_grows"])
    return bool(result["unexplained"] or result["lost_or_different"]) or held or leaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--model", default="", help="default: the built-in demo model")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="where the service's log goes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="to be written down where git is not at hand")
    parser.add_argument("--service-argument", action="append", default=[], help="given to app.py as it is")
    arguments = parser.parse_args()
    service_arguments = ["--dtype", "fp32", "--pp-devices", "cpu", "--log-level", "warning", "--access-log", "false"]
    service_arguments += ["--model-path", arguments.model] if arguments.model else []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        try:
            result = run(folder, arguments, service_arguments)
        finally:
            if arguments.log is not None and (folder / "service.log").exists():
                arguments.log.write_text((folder / "service.log").read_text(errors="replace"))
        tracebacks = (folder / "service.log").read_text(errors="replace").count("Traceback")
    last = {
        "measure": "chaos",
        **origin(arguments.commit),
        "minutes": arguments.minutes,
        "clients": arguments.clients,
        **result,
    }
    last |= {"tracebacks": tracebacks, "ok": not is_bad(result)}
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(last, indent=1) + "\n")
    print(json.dumps(last))
    sys.exit(1 if is_bad(result) else 0)


if __name__ == "__main__":
    main()
