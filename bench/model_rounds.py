"""What streams notice of models that come and go beside them, and what the service keeps of those.

    python -m bench.model_rounds --rounds 50 --second 12x768
    python -m bench.model_rounds --rounds 3 --streams 8 --second 2x128 --period-s 0.5       # the short form

One line of JSON; a run that is ended by SIGTERM in its rounds says what is known of these.

`--streams` clients stream from the service's own model, a token a delta. First nothing else happens, for half as long
as the rounds are to take; then a second model is loaded and unloaded every `--period-s`, each time under a name of its
own, so that several rounds are under way where one takes longer; then nothing again, for as long; then, in the same
streams: an engine that is killed in the middle of loading, a file that is broken, one that vanishes as soon as it is
asked for, the same name twice at once, two names.

Told: the gaps between a stream's deltas in the three times, and the longest one of every `--period-s` of a stream. By
how much each stream's gaps in the rounds are longer than in the two other times together: the longest of all, the
median of the longest of every `--period-s` (one long gap that had another cause does not change it), the 99th of a
hundred, the median; and the same of the time after by the time before, which is what the machine does by itself.
The same of one stream more, straight from the engine's socket (`engine_stream`): without what HTTP workers add. Who
receives notes what comes and nothing else; when a delta came says the system where it does (`bench/gap_clients.py`).
Errors of streams. Memory (PSS without pages of files) of all processes and of each kind, and what rounds leave of it
beyond what the tokens take that the streams draw meanwhile: the service keeps a stream's tokens until it ends. What
says something on a machine that others use, too: how often a second the serving engine's threads lost their core
(where the system counts it), and the CPU seconds of a round's engine, from its fork to its end. Bounds: on a CPU the
models share memory bandwidth with the streams, and the cores but for those that `--threads` leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from bench.gap_clients import Receiver, address, receive, receive_from_engine
from bench.gaps import Span, figures
from bench.http_load import Load, fetch, served_tokens
from bench.serve import machine, percentile, service
from bench.streams import ENGINE_FORKS, _parent, memory_mb
from demo.random_weights import write_random_model

PASSWORD = "rounds"
MAX_TOKENS = 60_000
"""Of a stream: none ends between the two looks at memory."""
LOOKS = ("begin", "rounds_begin", "rounds_end", "end")
SETTLE_S = 3.0
"""After the streams have begun, and after the rounds, before memory is looked at."""


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest for the service."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--period-s", type=float, default=1.0)
    parser.add_argument("--at-once", type=int, default=4, help="rounds under way")
    parser.add_argument("--no-faults", action="store_true", help="rounds alone")
    parser.add_argument("--second", default="12x768", help="layers x width of the second model")
    parser.add_argument("--commit", default="", help="of the code, where git is not at hand")
    return parser.parse_known_args()


class Look(NamedTuple):
    """Memory (MB, no pages of files) of all processes and of each kind, and tokens drawn, which streams keep."""

    memory: dict[str, float]
    drawn: int

    def since(self, other: Look) -> tuple[float, int]:
        """What came to both."""
        return self.memory["all"] - other.memory["all"], self.drawn - other.drawn


def kept_mb(looks: list[Look]) -> float:
    """What rounds leave of memory, beyond what as many tokens take in the undisturbed times before and after.

    `looks`: where the first of these begins and ends, and the second.
    """
    begin, rounds_begin, rounds_end, end = looks
    (before, drawn_before), (after, drawn_after) = rounds_begin.since(begin), end.since(rounds_end)
    grown, drawn = rounds_end.since(rounds_begin)
    return round(grown - drawn * (before + after) / (drawn_before + drawn_after), 2)


class Service:
    """The service's routes for models."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.engine = int(self.status()["processes"]["engine"]["pid"])

    def status(self) -> dict[str, Any]:
        """/status."""
        value: dict[str, Any] = json.loads(fetch(self.url, "/status", ""))
        return value

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer's JSON, a refusal's too."""
        headers = {"Authorization": f"Bearer {PASSWORD}"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                value: dict[str, Any] = json.loads(response.read())
        except urllib.error.HTTPError as error:
            value = {"http": error.code, **json.loads(error.read())}
        return value

    def load(self, name: str, file: str = "second.safetensors", wait_s: float = 240) -> dict[str, Any]:
        """See /v1/models/load; few slots, so that the second model's memory is its weights'."""
        return self.post("/v1/models/load", name=name, file=file, wait_s=wait_s, max_running=4)

    def unload(self, name: str) -> dict[str, Any]:
        """See /v1/models/unload."""
        return self.post("/v1/models/unload", name=name, wait_s=240)

    def processes(self) -> set[int]:
        """Direct children of the supervisor, and the engines that one of them forks."""
        supervisor = _parent(self.engine)
        numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        children = {number for number in numbers if _parent(number) == supervisor}
        forking = {child for child in children if ENGINE_FORKS in _command(child)}
        return children | {number for number in numbers if _parent(number) in forking}

    def lost_cores(self) -> int:
        """How often the serving engine's threads that live had to leave a core."""
        lost = 0
        for task in Path(f"/proc/{self.engine}/task").iterdir():
            lines = (task / "status").read_text().splitlines()
            lost += sum(int(line.split()[1]) for line in lines if line.startswith("nonvoluntary"))
        return lost

    def ended_cpu_s(self) -> float:
        """CPU seconds of engines that have ended."""
        used = 0
        for pid in self.processes() | {_parent(self.engine)}:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                used += int(fields[13]) + int(fields[14])
        return used / os.sysconf("SC_CLK_TCK")

    def look(self) -> Look:
        """What it has now."""
        kinds = memory_mb(self.engine, "Pss_Anon")
        return Look({"all": round(sum(kinds.values()), 1), **kinds}, int(served_tokens(self.url, "")))


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def rounds(service: Service, args: argparse.Namespace, seconds: list[float]) -> list[str]:
    """What went wrong. `seconds` is given those of each round when it ends."""
    wrong: list[str] = []
    places = threading.Semaphore(args.at_once)

    def one(number: int) -> None:
        started = time.monotonic()
        name = f"round-{number}"
        answer = service.load(name)
        if answer.get("status") != "ready":
            wrong.append(f"{name}: {answer}")
        answer = service.unload(name)
        if answer.get("status") != "unloaded":
            wrong.append(f"{name}: {answer}")
        seconds.append(time.monotonic() - started)
        places.release()

    threads = []
    for number in range(args.rounds):
        due = time.monotonic() + args.period_s
        places.acquire()
        threads.append(threading.Thread(target=one, args=(number,), daemon=True))
        threads[-1].start()
        time.sleep(max(0.0, due - time.monotonic()))
    for thread in threads:
        thread.join()
    return wrong


def faults(service: Service) -> dict[str, str]:
    """What each disturbance was answered."""
    told: dict[str, str] = {}
    before = service.processes()
    service.load("killed", wait_s=0)
    while not (new := service.processes() - before):
        time.sleep(0.01)
    time.sleep(0.5)
    for pid in new:
        os.kill(pid, signal.SIGKILL)
    told["kill -9"] = _settled(service, "killed")
    whole = (service.folder / "second.safetensors").read_bytes()
    (service.folder / "broken.safetensors").write_bytes(whole[: len(whole) // 2])
    told["a broken file"] = _settled(service, "broken", service.load("broken", "broken.safetensors"))
    (service.folder / "gone.safetensors").write_bytes(whole)
    service.load("gone", "gone.safetensors", wait_s=0)
    (service.folder / "gone.safetensors").unlink()
    told["a file that vanishes"] = _settled(service, "gone")
    answers: list[dict[str, Any]] = []
    names = ("same", "same", "other")
    threads = [threading.Thread(target=lambda name=name: answers.append(service.load(name))) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told["two at once, one name twice"] = " | ".join(sorted(str(a.get("status") or a.get("http")) for a in answers))
    for name in ("same", "other", "killed", "broken", "gone"):
        service.unload(name)
    return told


def _settled(service: Service, name: str, answer: dict[str, Any] | None = None) -> str:
    """How a load ended."""
    while answer is None or answer["status"] == "loading":
        time.sleep(0.1)
        answer = json.loads(fetch(service.url, f"/v1/models/{name}", ""))
    return f"{answer['status']}: {answer['error']}" if answer.get("error") else str(answer["status"])


def undisturbed(service: Service, seconds: float) -> tuple[Span, int]:
    """A time in which nothing else happens, and how often the serving engine's threads had to leave a core in it."""
    started, lost = time.monotonic(), service.lost_cores()
    time.sleep(seconds)
    return (started, time.monotonic()), service.lost_cores() - lost


class Times:
    """When what happened: gaps of the streams, and of one straight from the engine, by what happened beside them."""

    def __init__(self, client: Receiver, direct: Receiver, second_s: float) -> None:
        self._client, self._direct, self._second_s = client, direct, second_s

    def told(self, before: Span, in_rounds: Span, after: Span | None = None) -> dict[str, Any]:
        """Figures of all gaps by now; `after`: None, where that time is yet to come."""
        self._client.look()
        self._direct.look()
        spans = before, in_rounds, after or (in_rounds[1], in_rounds[1])
        direct = figures(self._direct.gaps, *spans, self._second_s)
        return {**figures(self._client.gaps, *spans, self._second_s), "engine_stream": direct}


def measure(url: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    served = Service(url, folder)
    load = Load("/v1/chat/completions", args.streams, 1, 1, MAX_TOKENS, 16, 1, True, "")
    client = Receiver(receive, folder / "gaps", load, *address(url))
    while served.status()["running_rows"] < args.streams:
        time.sleep(0.1)
    direct = Receiver(receive_from_engine, folder / "engine-gaps", served.engine, MAX_TOKENS)
    times = Times(client, direct, args.period_s)
    served.unload("warm" if served.load("warm")["status"] == "ready" else "none")  # what is compiled once
    time.sleep(SETTLE_S)
    processes = len(served.processes())
    quiet_s = max(args.period_s * args.rounds / 2, 5.0)
    looks = [served.look()]
    before, lost_before = undisturbed(served, quiet_s)
    looks.append(served.look())
    used, lost, begun = served.ended_cpu_s(), served.lost_cores(), time.monotonic()

    seconds: list[float] = []
    try:
        wrong = rounds(served, args, seconds)
    except SystemExit:  # a time limit
        print(json.dumps({"rounds": len(seconds), **times.told(before, (begun, time.monotonic()))}), flush=True)
        raise
    in_rounds = begun, time.monotonic()
    lost = served.lost_cores() - lost
    used = served.ended_cpu_s() - used
    time.sleep(SETTLE_S)
    looks.append(served.look())
    after, lost_after = undisturbed(served, quiet_s)
    looks.append(served.look())
    told = {} if args.no_faults else faults(served)
    faults_end = time.monotonic()
    client.stop()
    direct.stop()
    found = times.told(before, in_rounds, after)
    return {
        "streams": args.streams,
        "stamped_by": client.stamped_by,
        "rounds": len(seconds),
        "round_s_p50": round(statistics.median(seconds), 2),
        "rounds_s": round(in_rounds[1] - in_rounds[0], 1),
        **found,
        "lost_cores_a_second": {
            "before": round(lost_before / quiet_s),
            "in_rounds": round(lost / (in_rounds[1] - in_rounds[0])),
            "after": round(lost_after / quiet_s),
        },
        "cpu_s_of_a_round": round(used / args.rounds, 2),
        "faults": told,
        "faults_gap_ms_max": percentile([g for _, at, g in client.gaps if after[1] < at < faults_end], 1.0),
        "memory_mb": {name: look.memory for name, look in zip(LOOKS, looks, strict=True)},
        "drawn": [look.drawn - looks[0].drawn for look in looks],
        "rounds_kept_mb": kept_mb(looks),
        "processes": {"before": processes, "after": len(served.processes())},
        "stream_errors": client.failures[:3],
        "wrong": wrong[:3],
    }


def main() -> None:
    """Measure and print."""
    args, flags = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # a time limit: the service ends, too
    layers, width = map(int, args.second.split("x"))
    flags_said = list(flags)
    with tempfile.TemporaryDirectory(prefix="rwkv-bench-") as name:
        folder = Path(name)
        write_random_model(folder / "second.safetensors", layers, width)
        flags += ["--models-dir", name, "--admin-password", PASSWORD, "--max-models", str(args.at_once + 4)]
        with (folder / "service.log").open("wb") as log, service(flags, log) as url:
            told = measure(url, folder, args)
    about = {"second": args.second, "flags": flags_said, **machine()}
    print(json.dumps({**told, **about, **({"commit": args.commit} if args.commit else {})}))


if __name__ == "__main__":
    main()
