"""The scheduler's own events around a moment: Linux's tracefs, where there is one and who runs this may use it.

Several buffers, of which one takes the events of the last seconds, over and over; `keep` has it stop, which is a single
write, and another one go on. What was kept is read when the run is over.
"""

from __future__ import annotations

import contextlib
import itertools
import lzma
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.service.gaps import Span

TRACEFS = Path("/sys/kernel/tracing")
EVENTS = (
    "sched/sched_switch",
    "sched/sched_waking",
    "sched/sched_wakeup",
    "sched/sched_process_fork",
    "sched/sched_process_exit",
    "workqueue/workqueue_execute_start",
    "irq_vectors/local_timer_entry",
)
"""What a worker of the kernel's does is told by its function. The last: the clock's tick, every few milliseconds on
each CPU that is not idle. Where none comes on a CPU that has a thread to run, it is not Linux that keeps it: the
machine below a virtual one does."""
CONTEXT_S = 0.006
"""Events so long before a gap say what each thread did when it began."""


class Buffers:
    """See above; to be used as a context: they are the system's, and stay where nobody removes them."""

    def __init__(self, count: int, mb_per_cpu: int) -> None:
        """`count`: gaps that can be kept, beside the buffer that takes what comes."""
        self._free = [TRACEFS / "instances" / f"rwkv-{os.getpid()}-{number}" for number in range(count + 1)]
        self._all = list(self._free)
        self._mb_per_cpu = mb_per_cpu
        self._takes: Path | None = None
        self._kept: list[tuple[list[Span], Path]] = []
        """gaps, and the buffer that has them"""
        self._since = 0.0

    def __enter__(self) -> Buffers:
        for folder in self._all:
            _make(folder, self._mb_per_cpu, EVENTS)
        self._go_on()
        return self

    def __exit__(self, *_: object) -> None:
        for folder in self._all:
            with contextlib.suppress(OSError):
                _write(folder / "tracing_on", "0")
                folder.rmdir()

    def keep(self, gaps: list[Span]) -> None:
        """Keep what is there of these gaps; of more than there are buffers for those with the longest stay."""
        if self._takes is None:
            return
        now = [gap for gap in gaps if gap[0] >= self._since]
        for kept, _ in self._kept[-1:]:  # those that are told late
            kept.extend(gap for gap in gaps if gap[0] < self._since)
        if now:
            _write(self._takes / "tracing_on", "0")
            self._kept.append((now, self._takes))
            if not self._free:
                shortest = min(self._kept, key=lambda one: max(map(_s, one[0])))
                self._kept.remove(shortest)
                self._free.append(shortest[1])
            self._go_on()

    def stop(self) -> None:
        """Nothing is noted any more."""
        if self._takes is not None:
            _write(self._takes / "tracing_on", "0")
            self._takes = None

    def _go_on(self) -> None:
        self._takes = self._free.pop()
        _write(self._takes / "trace", "")
        _write(self._takes / "tracing_on", "1")
        self._since = time.monotonic()

    def told(self, threads: dict[int, str], folder: Path | None = None) -> list[dict[str, Any]]:
        """What `threads` (by their number) met in each gap that was kept; the lines themselves go to `folder`."""
        found = []
        kept = [(gap, buffer) for gaps, buffer in self._kept for gap in gaps]
        for number, ((begin, end), buffer) in enumerate(sorted(kept, key=lambda one: -_s(one[0]))[: len(self._all)]):
            with (buffer / "trace").open(errors="replace") as file:
                lines = list(within(file, begin - CONTEXT_S, end))
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                with lzma.open(folder / f"gap-{number}.trace.xz", "wt", preset=1) as packed:
                    packed.write("".join(lines))
            found.append(Window(begin, end).read(lines).told(threads))
        return found


def _make(folder: Path, mb_per_cpu: int, events: Sequence[str]) -> None:
    """A buffer that takes these events of the CPUs that this process may use, and is not begun."""
    cpus = os.sched_getaffinity(0)
    mask = f"{sum(1 << cpu for cpu in cpus):x}"
    groups = [mask[max(0, end - 8) : end] for end in range(len(mask), 0, -8)]
    folder.mkdir()
    _write(folder / "tracing_on", "0")
    _write(folder / "trace_clock", "mono")
    _write(folder / "tracing_cpumask", ",".join(reversed(groups)))
    for cpu in cpus:
        _write(folder / "per_cpu" / f"cpu{cpu}" / "buffer_size_kb", str(mb_per_cpu << 10))
    for event in events:
        _write(folder / "events" / event / "enable", "1")


def _s(span: Span) -> float:
    return span[1] - span[0]


def _write(path: Path, value: str) -> None:
    path.write_text(value)


class KernelWork:
    """What workers of the kernel's do in a whole run, and for how long at a time. A context, as `Buffers`."""

    def __init__(self, mb_per_cpu: int) -> None:
        self._folder = TRACEFS / "instances" / f"rwkv-{os.getpid()}-work"
        self._mb_per_cpu = mb_per_cpu

    def __enter__(self) -> KernelWork:
        _make(self._folder, self._mb_per_cpu, ("workqueue/workqueue_execute_start", "workqueue/workqueue_execute_end"))
        _write(self._folder / "tracing_on", "1")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            _write(self._folder / "tracing_on", "0")
            self._folder.rmdir()

    def told(self, times: dict[str, Sequence[Span]]) -> dict[str, dict[str, dict[str, float]]]:
        """Of each of these times the functions that took longest at once: how often, ms at most, ms in all."""
        with (self._folder / "trace").open(errors="replace") as file:
            return work_of(file, times)


def work_of(lines: Iterable[str], times: dict[str, Sequence[Span]]) -> dict[str, dict[str, dict[str, float]]]:
    """See `KernelWork.told`."""
    took: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in times}
    begun: dict[str, tuple[float, str]] = {}
    for line in lines:
        if found := _LINE.match(line):
            at, worker = float(found[4]), found[2]
            if found[5] == "workqueue_execute_start":
                begun[worker] = at, found[6].rpartition("function ")[2]
            elif worker in begun:
                since, function = begun.pop(worker)
                for name, spans in times.items():
                    if any(begin <= since < end for begin, end in spans):
                        took[name][function].append(at - since)
    return {
        name: {
            function: {"times": len(s), "ms_max": _ms(max(s)), "ms": _ms(sum(s))}
            for function, s in sorted(of.items(), key=lambda one: -max(one[1]))[:_FUNCTIONS]
        }
        for name, of in took.items()
    }


_FUNCTIONS = 4
_LINE = re.compile(r"^\s*(.+)-(\d+)\s+\[(\d+)\] \S+\s+(\d+\.\d+): (\w+): (.*)$")
_FIELD = re.compile(r"(\w+)=(.*?)(?= ==> | \w+=|$)")
_AT = re.compile(r" (\d+\.\d+): ")


def within(lines: Iterable[str], begin: float, end: float) -> Iterator[str]:
    """Those of that time (s)."""
    for line in lines:
        found = _AT.search(line)
        if found and begin <= float(found[1]) <= end:
            yield line


class Piece(NamedTuple):
    """What a thread did for a while without a change."""

    does: str
    """runs, waits (for a core, which it could use), or how it sleeps ("sleeps S", "sleeps D")"""
    begin: float
    end: float
    cpu: int
    """where it ran or waited; -1: not known"""

    @property
    def s(self) -> float:
        """How long it was."""
        return self.end - self.begin


@dataclass
class Window:
    """The events of a gap, from begin to end (s)."""

    begin: float
    end: float
    names: dict[int, str] = field(default_factory=dict)
    pieces: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    """by thread; a CPU's that idles is below 0"""
    seen: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """by CPU: when anything was noted on it"""
    ticks: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """by CPU: when the clock's tick came"""
    work: dict[int, str] = field(default_factory=dict)
    """by the number of a kernel's worker, the function that it ran"""
    beside: list[str] = field(default_factory=list)
    """processes that began or ended"""
    _now: dict[int, tuple[str, float, int]] = field(default_factory=dict)
    _switched: dict[int, float] = field(default_factory=dict)
    """by CPU: when it was given to who has it"""

    def read(self, lines: Iterable[str]) -> Window:
        """Take events in any order; returns itself."""
        events = [found for line in lines if (found := _LINE.match(line))]
        for found in sorted(events, key=lambda found: float(found[4])):
            self._take(int(found[3]), float(found[4]), found[5], found[6], f"{found[1]}-{found[2]}")
        last = max((float(found[4]) for found in events), default=self.end)
        for thread, (does, since, cpu) in self._now.items():
            self.pieces[thread].append(Piece(does, since, max(last, since), cpu))
        return self

    def _take(self, cpu: int, at: float, event: str, what: str, who: str) -> None:
        self.seen[cpu].append(at)
        fields = dict(_FIELD.findall(what))
        match event:
            case "sched_switch":
                before, after = (int(fields[name]) or -1 - cpu for name in ("prev_pid", "next_pid"))
                self.names[before], self.names[after] = fields["prev_comm"], fields["next_comm"]
                runs_on = fields["prev_state"].startswith("R")
                self._has(before, cpu)
                since = self._switched.get(cpu, self.begin - CONTEXT_S)
                self._change(before, "waits" if runs_on else f"sleeps {fields['prev_state']}", at, cpu, ("runs", since))
                self._change(after, "runs", at, cpu, ("waits", self.begin - CONTEXT_S))
                self._switched[cpu] = at
            case "sched_waking":
                thread = int(fields["pid"])
                self.names[thread] = fields["comm"]
                if self._now.get(thread, ("", 0.0, 0))[0] not in ("waits", "runs"):
                    self._change(thread, "waits", at, int(fields["target_cpu"]), ("sleeps", self.begin - CONTEXT_S))
            case "sched_wakeup":
                if self._now.get(int(fields["pid"]), ("", 0.0, 0))[0] == "waits":
                    self._now[int(fields["pid"])] = "waits", self._now[int(fields["pid"])][1], int(fields["target_cpu"])
            case "workqueue_execute_start":
                self.work[int(who.rpartition("-")[2])] = what.rpartition("function ")[2]
            case "local_timer_entry":
                self.ticks[cpu].append(at)
                name, _, number = who.rpartition("-")
                thread = int(number) or -1 - cpu
                self._has(thread, cpu)
                if thread not in self._now:
                    self.names[thread] = name
                    self._now[thread] = "runs", self._switched.get(cpu, self.begin - CONTEXT_S), cpu
            case "sched_process_fork" | "sched_process_exit":
                if at >= self.begin:
                    self.beside.append(f"{(at - self.begin) * 1e3:.1f} ms {event[14:]} {who}")

    def _has(self, thread: int, cpu: int) -> None:
        """That thread has the CPU. Some kernels do not tell that an idle one was given to a thread: it was as soon as
        the thread wanted it."""
        does, since, there = self._now.get(thread, ("", 0.0, 0))
        idle, idle_since, _ = self._now.get(-1 - cpu, ("", 0.0, 0))
        if thread >= 0 and does == "waits" and idle == "runs" and there == cpu:
            self._change(thread, "runs", max(since, idle_since), cpu, ("waits", since))
            self._change(-1 - cpu, "waits", max(since, idle_since), cpu, ("runs", idle_since))

    def _change(self, thread: int, does: str, at: float, cpu: int, did: tuple[str, float]) -> None:
        """From now on it does that; `did`: what it must have done since when, where nothing is known of it."""
        before, since, there = self._now.get(thread, (*did, cpu))
        self.pieces[thread].append(Piece(before, since, at, there))
        self._now[thread] = does, at, cpu

    def told(self, threads: dict[int, str]) -> dict[str, Any]:
        """The longest pieces of each kind of those threads, what ran where they waited, and CPUs that stood still."""
        own = {thread: name for thread, name in threads.items() if thread in self.pieces}
        return {
            "ended_s": round(self.end, 3),
            "gap_ms": _ms(self.end - self.begin),
            "threads": len(own),
            "waited": [self._told(*piece, behind=True) for piece in self._longest(own, "waits")],
            "ran": [self._told(*piece) for piece in self._longest(own, "runs")],
            "blocked": [self._told(*piece) for piece in self._longest(own, "sleeps D")],
            "cpus_that_stood_still": self._stood_still()[:4],
            "beside": self.beside[:12],
        }

    def _longest(self, own: dict[int, str], does: str) -> list[tuple[str, Piece]]:
        found = [
            (f"{name} {thread}", piece)
            for thread, name in own.items()
            for piece in self.pieces[thread]
            if piece.does.startswith(does) and piece.end > self.begin
        ]
        return sorted(found, key=lambda one: -one[1].s)[:3]

    def _told(self, who: str, piece: Piece, behind: bool = False) -> dict[str, Any]:
        told: dict[str, Any] = {"who": who, "from_ms": _ms(piece.begin - self.begin), "ms": _ms(piece.s)}
        told |= {"cpu": piece.cpu, "ticks": sum(piece.begin <= at <= piece.end for at in self.ticks[piece.cpu])}
        if behind:
            told["behind"] = self._on(piece.cpu, piece.begin, piece.end)[:4]
        return told

    def _on(self, cpu: int, begin: float, end: float) -> list[str]:
        """Who ran on a CPU in that time, the longest first."""
        ran: dict[str, float] = defaultdict(float)
        for thread, pieces in self.pieces.items():
            for piece in pieces:
                if piece.does == "runs" and piece.cpu == cpu and piece.begin < end and piece.end > begin:
                    name = "idle" if thread < 0 else self._name(thread)
                    ran[name] += min(piece.end, end) - max(piece.begin, begin)
        return [f"{name} {s * 1e3:.1f} ms" for name, s in sorted(ran.items(), key=lambda one: -one[1])]

    def _name(self, thread: int) -> str:
        work = f" ({self.work[thread]})" if thread in self.work else ""
        return f"{self.names.get(thread, '?')} {thread}{work}"

    def _stood_still(self) -> list[dict[str, Any]]:
        """Where a thread had a CPU and nothing at all was noted there for two ticks of 4 ms."""
        found = []
        for cpu, seen in self.seen.items():
            for before, after in itertools.pairwise(seen):
                who = self._on(cpu, before, after)
                if after - before > 2 * TICK_S and who and not who[0].startswith("idle"):
                    told = {"cpu": cpu, "from_ms": _ms(before - self.begin), "ms": _ms(after - before), "had": who[0]}
                    found.append((after - before, told))
        return [told for _, told in sorted(found, key=lambda one: -one[0])]


TICK_S = 0.004


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
