"""What streams notice of models that come and go beside them, and what the service keeps of those.

    python -m bench.service.model_rounds --rounds 50 --second 12x768
    python -m bench.service.model_rounds --rounds 3 --streams 8 --second 2x128 --period-s 0.5       # the short form

One line of JSON; a run that is ended by SIGTERM in its rounds says what is known of these.

`--streams` clients stream from the service's own model, a token a delta. Times in which nothing else happens and times
of rounds take turns, each as long as the other: the longest gap of all grows with the time that is looked at. In the
rounds a second model is loaded and unloaded every `--period-s`, each time under a name of its own, so that several
rounds are under way where one takes longer. `--warm` such rounds come before: what is made once is no loss. In the end,
in the same streams: an engine that is killed in the middle of loading, a file that is broken, one that vanishes as soon
as it is asked for, the same name twice at once, two names.

Told: the gaps between a stream's deltas alone and in the rounds, the longest one of each of these times and of every
`--period-s` of a stream. By how much each stream's gaps in the rounds are longer than alone: the longest of all, the
median of the longest of every `--period-s` (one long gap that had another cause does not change it), the 99th of a
hundred, the median; and the same of the second half of the times alone by the first, which is what the machine does by
itself. The same of one stream more, straight from the engine's socket (`engine_stream`): without what HTTP workers add.
Who receives notes what comes and nothing else; when a delta came says the system where it does
(`bench/service/gap_clients.py`). Errors of streams.

`longest_gaps`, of the rounds and alone, each with what the engine and the HTTP workers met at that time, by what is
noted every tenth of a second (`bench/service/core_watch.py`): threads that waited for a core, page faults, time that
the machine below took; and collections of garbage of a millisecond or more, which each process tells in its log. With
`--trace FOLDER` the scheduler's own events besides (`bench/service/scheduler_events.py`): how long a thread of the
engine waited for a core and who had it, how long it ran or was blocked, and CPUs that stood still; and of all that
workers of the kernel did (`kernel_work`) what took longest. That takes some of the cores' time, and a system that lets
us.

Memory (PSS without pages of files) of all processes and of each kind before and after each of these times.
`kept_kb_of_a_round`: what a round leaves, beyond what tokens take, since the service keeps a stream's tokens until it
ends; both fitted to these figures together, with the standard error. With `--tokens` so small that streams end and are
opened anew, they take none, and the error is smaller. What says something on a machine that others use,
too: how often a second the serving engine's threads lost their core (where the system counts it), and the CPU seconds
of a round's engine, from its fork to its end. Bounds: on a CPU the models share memory bandwidth with the streams, and
the cores but for those that `--threads` leaves. With `--only-memory-mb N` no model comes or goes: in each round another
process takes so much memory and ends, which says what the machine itself makes of that.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import operator
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.service.core_watch import around, samples, watch
from bench.service.gap_clients import Beside, Receiver, address, receive, receive_from_engine
from bench.service.gaps import Span, figures, longest
from bench.service.scheduler_events import Buffers, KernelWork
from bench.service.streams import ENGINE_FORKS, _parent, memory_mb
from bench.tools.http_load import Load, fetch, served_tokens
from bench.tools.service import machine, percentile, service
from demo.random_weights import write_random_model

PASSWORD = "rounds"
MAX_TOKENS = 60_000
"""Of a stream: none ends before the run does."""
SETTLE_S = 0.5
"""After something has happened, before memory is looked at and the next time begins."""
LOOKS = 3
"""At memory, of which the middle one is taken."""
TRACED_MB = 4
"""Of each CPU's events: those of some four seconds and more."""
TRACED_GAPS = 6
NOTED_S = 0.3
"""So often a gap that is to be traced is looked for."""


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest for the service."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=MAX_TOKENS, help="of a stream, which is then opened anew")
    parser.add_argument("--times", type=int, default=5, help="in which the rounds are done, as many others between")
    parser.add_argument("--warm", type=int, default=8, help="rounds before that are not counted")
    parser.add_argument("--longest", type=int, default=3, help="gaps that are told one by one")
    parser.add_argument("--trace", metavar="FOLDER", help="the scheduler's events in the longest gaps, kept there")
    parser.add_argument("--period-s", type=float, default=1.0)
    parser.add_argument("--at-once", type=int, default=4, help="rounds under way")
    parser.add_argument("--no-faults", action="store_true", help="rounds alone")
    parser.add_argument("--second", default="12x768", help="layers x width of the second model")
    parser.add_argument("--only-memory-mb", type=int, default=0, help="instead of a model, a process takes so much")
    parser.add_argument("--commit", default="", help="of the code, where git is not at hand")
    return parser.parse_known_args()


class Look(NamedTuple):
    """Memory (MB, no pages of files) of all processes and of each kind, and tokens drawn, which streams keep."""

    memory: dict[str, float]
    drawn: int


def kept_kb(looks: list[Look], rounds: list[int]) -> dict[str, dict[str, float]]:
    """What a round leaves of memory beyond what tokens take (KB), and its standard error, of all and of each kind.

    `rounds`: how many there were between each look and the next. Least squares of growth = tokens * a + rounds * b.
    """
    told = {}
    drawn = [(after.drawn - before.drawn) / 1e3 for before, after in itertools.pairwise(looks)]
    tt, tr, rr = (sum(map(operator.mul, *two)) for two in ((drawn, drawn), (drawn, rounds), (rounds, rounds)))
    for kind in looks[0].memory:
        grown = [(y.memory.get(kind, 0.0) - x.memory[kind]) * 1e3 for x, y in itertools.pairwise(looks)]
        tg, rg = sum(map(operator.mul, drawn, grown)), sum(map(operator.mul, rounds, grown))
        of_token, of_round = (tg * rr - rg * tr) / (tt * rr - tr * tr), (rg * tt - tg * tr) / (tt * rr - tr * tr)
        off = [g - t * of_token - r * of_round for g, t, r in zip(grown, drawn, rounds, strict=True)]
        spread = sum(map(operator.mul, off, off)) / max(len(off) - 2, 1)
        told[kind] = {
            "kb": round(of_round, 2),
            "error": round((spread * tt / (tt * rr - tr * tr)) ** 0.5, 2),
            "bytes_of_a_token": round(of_token, 1),
        }
    return told


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
        return Look({"all": round(sum(kinds.values()), 3), **kinds}, int(served_tokens(self.url, "")))


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def rounds(service: Service, args: argparse.Namespace, numbers: range, seconds: list[float]) -> list[str]:
    """What went wrong in rounds of these numbers. `seconds` is given those of each round when it ends."""
    wrong: list[str] = []
    places = threading.Semaphore(args.at_once)

    def one(number: int) -> None:
        started = time.monotonic()
        if args.only_memory_mb:
            take_memory(args.only_memory_mb)
        else:
            come_and_go(f"round-{number}")
        seconds.append(time.monotonic() - started)
        places.release()

    def come_and_go(name: str) -> None:
        answer = service.load(name)
        if answer.get("status") != "ready":
            wrong.append(f"{name}: {answer}")
        answer = service.unload(name)
        if answer.get("status") != "unloaded":
            wrong.append(f"{name}: {answer}")

    threads = []
    for number in numbers:
        due = time.monotonic() + args.period_s
        places.acquire()
        threads.append(threading.Thread(target=one, args=(number,), daemon=True))
        threads[-1].start()
        time.sleep(max(0.0, due - time.monotonic()))
    for thread in threads:
        thread.join()
    return wrong


def take_memory(mb: int) -> None:
    """A process that is no part of the service takes so much memory, at the lowest priority, and ends."""
    work = f"import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); b'x' * ({mb} << 20)"
    subprocess.run([sys.executable, "-c", work], check=True)


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


class Times:
    """The times alone and those of rounds: when, how often the engine's threads lost their core, memory around them."""

    def __init__(self, served: Service) -> None:
        self._served = served
        self.spans: dict[bool, list[Span]] = {False: [], True: []}
        """of rounds: True"""
        self.lost = {False: 0, True: 0}
        self.looks: list[Look] = []
        self.rounds: list[int] = []
        """between each look and the next"""
        self.begun: float | None = None
        """when the one that goes on has begun, which is one of rounds"""

    def look(self) -> None:
        """At memory."""
        looks = []
        for _ in range(LOOKS):
            time.sleep(SETTLE_S)
            looks.append(self._served.look())
        self.looks.append(sorted(looks, key=lambda look: look.memory["all"])[LOOKS // 2])
        time.sleep(SETTLE_S / 2)

    def take(self, act: Callable[[], None], num_rounds: int) -> None:
        """The time that `act` takes, and a look behind it."""
        lost, self.begun = self._served.lost_cores(), time.monotonic()
        act()
        self.spans[num_rounds > 0].append((self.begun, time.monotonic()))
        self.lost[num_rounds > 0] += self._served.lost_cores() - lost
        self.begun = None
        self.rounds.append(num_rounds)
        self.look()

    def memory(self) -> dict[str, Any]:
        """All looks by now, and what a round leaves by them."""
        told = {
            "memory_mb": [look.memory for look in self.looks],
            "drawn": [look.drawn - self.looks[0].drawn for look in self.looks],
        }
        both = {True, False} <= {rounds > 0 for rounds in self.rounds}
        return told | ({"kept_kb_of_a_round": kept_kb(self.looks, self.rounds)} if both else {})

    def seconds(self, of_rounds: bool) -> float:
        """Of all of these times."""
        return sum(end - begin for begin, end in self.spans[of_rounds])


class Notes:
    """What is noted beside the streams: their gaps, what processes meet on their cores, the scheduler's events."""

    def __init__(self, served: Service, load: Load, folder: Path, args: argparse.Namespace) -> None:
        self._args, self._folder = args, folder
        self.client = Receiver(receive, folder / "gaps", load, *address(served.url))
        while served.status()["running_rows"] < args.streams:
            time.sleep(0.1)
        self.direct = Receiver(receive_from_engine, folder / "engine-gaps", served.engine, MAX_TOKENS)
        workers = served.status()["processes"]["http_workers"]
        self._names = {served.engine: "engine", **{w["pid"]: w["name"] for w in workers if w["name"] != "bench"}}
        self._watch = Beside(watch, folder / "cores", list(self._names))
        self.buffers: Buffers | None = None
        self._end = threading.Event()

    def trace(self, buffers: Buffers, above_s: float) -> None:
        """From now on keep the scheduler's events of the longest gaps among those that are longer."""

        since = time.monotonic()

        def look() -> None:
            while not self._end.wait(NOTED_S):
                new = [gap for one in (self.client, self.direct) for gap in one.look()]
                long = [gap for gap in new if gap[2] > above_s and gap[1] - gap[2] > since]
                if long:
                    buffers.keep(longest(long, [(since, math.inf)], TRACED_GAPS))

        self.buffers = buffers
        threading.Thread(target=look, daemon=True).start()

    def long_s(self, spans: Sequence[Span]) -> float:
        """From how long on a gap is to be traced: one and a half of the longest but one of a hundred of that time."""
        self.client.look()
        found = sorted(gap for _, at, gap in self.client.gaps if any(b <= at < e for b, e in spans))
        return 1.5 * found[int(0.99 * (len(found) - 1))]

    def stop(self) -> None:
        """Nothing is noted any more."""
        self._end.set()
        if self.buffers is not None:
            self.buffers.stop()
        self.client.stop()
        self.direct.stop()
        self._watch.end()

    def told(self, alone: Sequence[Span], in_rounds: Sequence[Span]) -> dict[str, Any]:
        """Figures of all gaps by now."""
        self.client.look()
        self.direct.look()
        direct = figures(self.direct.gaps, alone, in_rounds, self._args.period_s)
        return {**figures(self.client.gaps, alone, in_rounds, self._args.period_s), "engine_stream": direct}

    def longest(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        """The longest gaps of that time, and what was noted then."""
        noted, log = samples(self._folder / "cores"), (self._folder / "service.log").read_text(errors="replace")
        told = []
        for begin, end in longest(self.client.gaps, spans, self._args.longest):
            direct = [gap for _, at, gap in self.direct.gaps if begin <= at and at - gap <= end]
            found: dict[str, Any] = {
                "ended_s": round(end, 3),
                "at_s": round(begin - spans[0][0], 2),
                "ms": _ms(end - begin),
            }
            found |= {"engine_stream_ms": _ms(max(direct, default=0.0)), "collections": collections(log, begin, end)}
            told.append(found | around(noted, begin, end, self._names))
        return told

    def traced(self) -> list[dict[str, Any]]:
        """What the scheduler says of the longest gaps."""
        if self.buffers is None:
            return []
        threads = {}
        for pid, name in self._names.items():
            for task in Path(f"/proc/{pid}/task").iterdir():
                threads[int(task.name)] = name
        return self.buffers.told(threads, Path(self._args.trace))


def collections(log: str, begin: float, end: float) -> list[str]:
    """Collections of garbage in that time (monotonic s), by the log of all processes."""
    found = []
    for what in _COLLECTION.finditer(log):
        told = json.loads(what[2])
        if begin <= told["at_s"] + told["ms"] / 1e3 and told["at_s"] <= end:
            found.append(f"{what[1]} generation {told['generation']} {told['ms']} ms")
    return found


_COLLECTION = re.compile(r"(\S+) +DEBUG +collection (\{.*?\})")
"""A process's name and what it tells; lines of several processes may be one."""


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def measure(url: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    served = Service(url, folder)
    load = Load("/v1/chat/completions", args.streams, 1, 1, args.tokens, 16, 1, True, "")
    notes = Notes(served, load, folder, args)
    seconds: list[float] = []
    wrong = rounds(served, args, range(-args.warm, 0), seconds)
    seconds.clear()
    processes = len(served.processes())
    times = Times(served)

    def all_of(numbers: range) -> None:
        wrong.extend(rounds(served, args, numbers, seconds))

    with contextlib.ExitStack() as stack:
        buffers = stack.enter_context(Buffers(TRACED_GAPS, TRACED_MB)) if args.trace else None
        work = stack.enter_context(KernelWork(TRACED_MB)) if args.trace else None
        times.look()
        used = 0.0
        quiet_s = max(args.period_s * args.rounds / args.times, 3.0)
        try:
            for number in range(args.times):
                numbers = range(args.rounds * number // args.times, args.rounds * (number + 1) // args.times)
                times.take(partial(time.sleep, quiet_s), 0)
                if number == 0 and buffers is not None:
                    notes.trace(buffers, notes.long_s(times.spans[False]))
                used -= served.ended_cpu_s()
                times.take(partial(all_of, numbers), len(numbers))
                used += served.ended_cpu_s()
                quiet_s = times.spans[True][-1][1] - times.spans[True][-1][0]
        except SystemExit:  # a time limit
            in_rounds = times.spans[True] + ([(times.begun, time.monotonic())] if times.begun else [])
            known = {"rounds": len(seconds), **notes.told(times.spans[False], in_rounds), **times.memory()}
            print(json.dumps(known), flush=True)
            raise
        faults_begin = time.monotonic()
        told = {} if args.no_faults else faults(served)
        faults_end = time.monotonic()
        notes.stop()
        traced = notes.traced()
        alone, in_rounds = times.spans[False], times.spans[True]
        kernel = work.told({"alone": alone, "in_rounds": in_rounds}) if work is not None else {}
    return {
        "streams": args.streams,
        "stamped_by": notes.client.stamped_by,
        "rounds": len(seconds),
        **({"only_memory_mb": args.only_memory_mb} if args.only_memory_mb else {}),
        "round_s_p50": round(statistics.median(seconds), 2),
        **notes.told(alone, in_rounds),
        "longest_gaps": {"in_rounds": notes.longest(in_rounds), "alone": notes.longest(alone)},
        "traced": traced,
        "kernel_work": kernel,
        "lost_cores_a_second": {
            "alone": round(times.lost[False] / times.seconds(False)),
            "in_rounds": round(times.lost[True] / times.seconds(True)),
        },
        "cpu_s_of_a_round": round(used / args.rounds, 2),
        "faults": told,
        "faults_gap_ms_max": percentile([g for _, at, g in notes.client.gaps if faults_begin < at < faults_end], 1.0),
        **times.memory(),
        "processes": {"before": processes, "after": len(served.processes())},
        "stream_errors": notes.client.failures[:3],
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
        flags += ["--log-level", "debug"]  # with which collections of garbage are told
        with (folder / "service.log").open("wb") as log, service(flags, log) as url:
            told = measure(url, folder, args)
    about = {"second": args.second, "flags": flags_said, **machine()}
    print(json.dumps({**told, **about, **({"commit": args.commit} if args.commit else {})}))


if __name__ == "__main__":
    main()
