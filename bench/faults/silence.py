"""How long nobody answers while malformed packets abort HTTP workers: the service without a proxy in front.

    python -m bench.faults.silence [--seconds 60] [--every 1.0] [--probe-every 0.01] [--out FILE] [flags of app.py]

Every `--every` seconds one packet is sent on which Robyn aborts its worker; meanwhile a new connection asks for
/healthz every `--probe-every` seconds, whether earlier ones are answered or not. The service is silent while no answer
comes: a gap between answers counts whole if it is longer than 50 ms, which a loaded machine needs for a scheduling
delay. Told are the share of the time that such gaps make, the longest gap, the longest wait of an answered probe,
probes that were cut off, workers lost, and answers other than 200. What bounds it: how soon a spare worker takes over
the listening socket, and meanwhile the workers at the other sockets. The last line is JSON, exit status 1 if the
silence is 2 % or more or any gap is longer than 0.3 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.chaos.disturbances import PACKETS
from bench.tools.origin import origin
from bench.tools.service import service

GAP_S = 0.05
MOST_S, MOST_SHARE = 0.3, 0.02
PATIENCE_S = 10.0
ABORTS = PACKETS[0]
PROBE = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@dataclass
class Answers:
    """What became of the probes."""

    port: int
    times: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    statuses: set[str] = field(default_factory=set)
    cut: int = 0

    async def probe(self) -> None:
        """One connection, one request."""
        began = time.monotonic()
        line = await exchange(self.port, PROBE, PATIENCE_S)
        if not line:
            self.cut += 1
            return
        self.times.append(time.monotonic())
        self.waits.append(self.times[-1] - began)
        self.statuses.add(line.decode("ascii", "replace").partition(" ")[2][:3])


async def exchange(port: int, packet: bytes, patience_s: float) -> bytes:
    """Send it on a connection of its own; the answer's first line, b"" if there is none."""
    with contextlib.suppress(OSError, TimeoutError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(packet)
            return await asyncio.wait_for(reader.readline(), patience_s)
        finally:
            writer.close()
    return b""


async def measure(port: int, seconds: float, every: float, probe_every: float) -> tuple[Answers, float, float]:
    """Probes and packets for so long; (answers, beginning, end)."""
    answers, packets = Answers(port), 0
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in itertools.count():
            at = number * probe_every
            if at >= seconds:
                break
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            group.create_task(answers.probe())
            if at >= packets * every:
                packets += 1
                group.create_task(exchange(port, ABORTS, 0.3))
        ended = time.monotonic()
    return answers, began, ended


def summary(answers: Answers, began: float, ended: float) -> dict[str, Any]:
    """Figures of one run."""
    times = [began, *sorted(at for at in answers.times if at < ended), ended]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    waits = sorted(answers.waits) or [float("inf")]
    return {
        "seconds": round(ended - began, 1),
        "answered": len(answers.times),
        "cut": answers.cut,
        "statuses": sorted(answers.statuses),
        "silent_share": round(sum(gap for gap in gaps if gap > GAP_S) / (ended - began), 5),
        "longest_gap_s": round(max(gaps), 4),
        "wait_ms": {f"p{part:g}": round(1e3 * waits[int(len(waits) * part / 100)], 1) for part in (50, 99, 99.9)},
        "longest_wait_s": round(waits[-1], 4),
    }


def main() -> None:
    """Measure and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=1.0, help="seconds from packet to packet")
    parser.add_argument("--probe-every", type=float, default=0.01, help="seconds from probe to probe")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="to be written down where git is not at hand")
    arguments, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "service.log"
        with path.open("wb") as log, service(["--front", "none", *rest], log) as url:
            port = int(url.rpartition(":")[2])
            found = summary(*asyncio.run(measure(port, arguments.seconds, arguments.every, arguments.probe_every)))
        lost = path.read_text(errors="replace").count("(SIGABRT)")
    last = {"measure": "silence", **origin(arguments.commit), "every_s": arguments.every, "workers_lost": lost, **found}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(last, indent=1) + "\n")
    print(json.dumps(last))
    is_loud = found["silent_share"] < MOST_SHARE and found["longest_gap_s"] < MOST_S and found["statuses"] == ["200"]
    sys.exit(0 if is_loud else 1)


if __name__ == "__main__":
    main()
