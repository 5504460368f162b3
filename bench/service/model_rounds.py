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
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.service.coming_models import PASSWORD, Service, faults, rounds
from bench.service.round_notes import MAX_TOKENS, TRACED_GAPS, Notes
from bench.service.round_times import Times
from bench.service.scheduler_events import Buffers, KernelWork
from bench.tools.http_load import Load
from bench.tools.service import machine, percentile, service
from demo.random_weights import write_random_model

TRACED_MB = 4
"""Of each CPU's events: those of some four seconds and more."""


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
    args, flags = parser.parse_known_args()
    args.times = min(args.times, args.rounds)  # each has a round at least
    return args, flags


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
        try:
            used = _in_turn(args, times, notes, buffers, all_of)
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


def _in_turn(
    args: argparse.Namespace,
    times: Times,
    notes: Notes,
    buffers: Buffers | None,
    all_of: Callable[[range], None],
) -> float:
    """Times alone and times of rounds, which `all_of` does -> CPU seconds of the rounds' engines."""
    times.look()
    used, quiet_s = 0.0, max(args.period_s * args.rounds / args.times, 3.0)
    for number in range(args.times):
        numbers = range(args.rounds * number // args.times, args.rounds * (number + 1) // args.times)
        times.take(partial(time.sleep, quiet_s), 0)
        if number == 0 and buffers is not None:
            notes.trace(buffers, notes.long_s(times.spans[False]))
        used -= times.served.ended_cpu_s()
        times.take(partial(all_of, numbers), len(numbers))
        used += times.served.ended_cpu_s()
        begun, ended = times.spans[True][-1]
        quiet_s = ended - begun
    return used


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
