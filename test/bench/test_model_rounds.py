"""What `bench.service.model_rounds` makes of gaps, of memory and of what was noted beside them."""

from __future__ import annotations

import pytest

from bench.service.coming_models import Look
from bench.service.core_watch import Sample, around
from bench.service.gaps import Gap, figures, longest
from bench.service.model_rounds import parse
from bench.service.round_notes import collections
from bench.service.round_times import kept_kb
from bench.service.scheduler_events import Window, within, work_of

ALONE, ROUNDS = ((0.0, 10.0), (33.0, 43.0)), ((10.0, 30.0),)


def gaps(every_s: float, span: tuple[float, float], longer: dict[int, float]) -> list[Gap]:
    """Of two streams, a gap every so often; in some seconds of the span the first is longer."""
    found: list[Gap] = []
    for number in range(int((span[1] - span[0]) / every_s)):
        at = span[0] + number * every_s
        first = number % int(1 / every_s) == 0
        gap = longer.get(int(at - span[0]), every_s) if first else every_s
        found += [(stream, at, gap) for stream in (0, 1)]
    return found


def test_one_long_gap_that_was_met_alone_does_not_hide_those_of_every_round() -> None:
    found = gaps(0.01, ALONE[0], {3: 0.08}) + gaps(0.01, ALONE[1], {})
    found += gaps(0.01, ROUNDS[0], dict.fromkeys(range(20), 0.03))
    told = figures(found, ALONE, ROUNDS, 1.0)
    assert told["grew"]["longest"]["most"] < 0.5
    assert told["grew"]["longest_of_a_second"] == {"median": 3.0, "most": 3.0, "streams_above_1.5": 2}
    assert told["grew"]["median"]["most"] == 1.0 and told["streams_seen"] == 2
    assert told["alone_by_alone"]["longest"]["most"] == 0.12
    assert told["in_rounds_gap_ms"]["longest_of_a_second"] == {"p50": 30.0, "p90": 30.0}
    assert told["alone_gap_ms"]["longest_of_each_time"] == [80.0, 10.0] and told["alone_gap_ms"]["seconds"] == 20.0


def test_while_the_rounds_go_on_there_are_figures_of_what_was() -> None:
    found = gaps(0.01, ALONE[0], {}) + gaps(0.01, ROUNDS[0], dict.fromkeys(range(20), 0.03))
    told = figures(found, ALONE[:1], ROUNDS, 1.0)
    assert told["grew"]["longest_of_a_second"]["median"] == 3.0 and told["alone_by_alone"] == {}


def test_a_gap_of_all_streams_is_told_once() -> None:
    found = gaps(0.01, ALONE[0], {3: 0.08, 5: 0.05}) + gaps(0.01, ROUNDS[0], {7: 0.2})
    assert [round(end - begin, 3) for begin, end in longest(found, ALONE, 2)] == [0.08, 0.05]


def test_what_streams_draw_is_not_lost_by_rounds() -> None:
    """A hundred bytes a token, and 20 KB a round in the engine."""
    rounds, drawn = [0, 10, 0, 10], [0, 10_000, 25_000, 33_000, 50_000]
    memory = [100.0 + tokens * 1e-4 for tokens in drawn]
    engine = [mb + kb / 1e3 for mb, kb in zip(memory, (0, 0, 200, 200, 400), strict=True)]
    looks = [
        Look({"all": own + mb, "engine": own, "http": mb}, tokens)
        for own, mb, tokens in zip(engine, memory, drawn, strict=True)
    ]
    told = kept_kb(looks, rounds)
    assert told["engine"] == {"kb": 20.0, "error": 0.0, "bytes_of_a_token": 100.0}
    assert abs(told["http"]["kb"]) < 0.01 and told["all"]["bytes_of_a_token"] == 200.0


def test_fewer_rounds_than_times_are_a_time_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the short form that the program's first words name; a time without rounds has no end to be told."""
    monkeypatch.setattr("sys.argv", ["model_rounds", "--rounds", "3", "--threads", "1"])
    args, flags = parse()
    assert (args.times, flags) == (3, ["--threads", "1"])


def test_what_a_round_is_said_to_leave_has_an_error_where_memory_comes_and_goes() -> None:
    looks = [Look({"all": mb}, tokens) for tokens, mb in enumerate((10.0, 11.0, 10.0, 12.0, 10.0, 11.0, 10.0))]
    told = kept_kb(looks, [0, 10, 0, 10, 0, 10])["all"]
    assert told["error"] > 40


LINES = """\
# tracer: nop
          engine-11   [002] d..2.   100.000000: sched_switch: prev_comm=engine prev_pid=11 prev_prio=120 prev_state=S \
==> next_comm=swapper/2 next_pid=0 next_prio=120
    kworker/3:1-9     [003] d..2.   100.000500: sched_switch: prev_comm=swapper/3 prev_pid=0 prev_prio=120 \
prev_state=R ==> next_comm=kworker/3:1 next_pid=9 next_prio=120
          engine-12   [001] d..2.   100.001000: sched_waking: comm=engine pid=11 prio=120 target_cpu=003
    kworker/3:1-9     [003] .....   100.000510: workqueue_execute_start: work struct 00000000c7: function gives_back
    kworker/3:1-9     [003] d.h1.   100.004000: local_timer_entry: vector=236
    kworker/3:1-9     [003] d..2.   100.021000: sched_switch: prev_comm=kworker/3:1 prev_pid=9 prev_prio=120 \
prev_state=R+ ==> next_comm=engine next_pid=11 next_prio=120
          engine-11   [003] d..2.   100.022000: sched_switch: prev_comm=engine prev_pid=11 prev_prio=120 prev_state=S \
==> next_comm=swapper/3 next_pid=0 next_prio=120
          engine-11   [003] d..2.   107.000000: sched_waking: comm=engine pid=12 prio=120 target_cpu=003
"""


def test_who_had_the_core_that_a_thread_waited_for() -> None:
    """And that the clock's tick came there once in twenty milliseconds: it stood still."""
    lines = list(within(LINES.splitlines(keepends=True), 99.9, 101.0))
    told = Window(100.0, 100.022).read(lines).told({11: "engine"})
    assert len(lines) == 7 and told["threads"] == 1 and told["gap_ms"] == 22.0
    waited = {"who": "engine 11", "from_ms": 1.0, "ms": 20.0, "cpu": 3, "ticks": 1}
    assert told["waited"] == [{**waited, "behind": ["kworker/3:1 9 (gives_back) 20.0 ms"]}]
    assert told["ran"] == [{"who": "engine 11", "from_ms": 21.0, "ms": 1.0, "cpu": 3, "ticks": 0}]
    assert told["cpus_that_stood_still"] == [
        {"cpu": 3, "from_ms": 4.0, "ms": 17.0, "had": "kworker/3:1 9 (gives_back) 17.0 ms"}
    ]


def test_a_thread_that_was_given_an_idle_core_unseen_has_not_waited() -> None:
    """As some kernels tell it: that the core goes from idle to a thread is missing."""
    other = "2] d..2.   100.021500: sched_switch: prev_comm=engine prev_pid=11 prev_prio=120 prev_state=S ==> "
    left_out = "kworker", "22000", "107."
    lines = [line for line in LINES.splitlines() if not any(one in line for one in left_out)]
    lines = [line.replace("target_cpu=003", "target_cpu=002") for line in lines]
    lines.append(f"          engine-11   [00{other}next_comm=swapper/2 next_pid=0 next_prio=120")
    told = Window(100.0, 100.022).read(lines).told({11: "engine"})
    assert told["ran"] == [{"who": "engine 11", "from_ms": 1.0, "ms": 20.5, "cpu": 2, "ticks": 0}]
    assert told["waited"] == [{"who": "engine 11", "from_ms": 1.0, "ms": 0.0, "cpu": 2, "ticks": 0, "behind": []}]


def test_what_was_noted_of_each_process_at_that_time() -> None:
    noted = [Sample(at, pid, 0.002 * pid, 0.001, 3, 0, 0.01) for at in (1.0, 1.1, 1.2, 9.0) for pid in (1, 2)]
    told = around(noted, 1.05, 1.15, {1: "engine", 2: "http-0"})
    assert told["engine"] == {"waited_ms": 4.0, "most_of_one_thread_ms": 1.0, "faults": 6, "major_faults": 0}
    assert told["http-0"]["waited_ms"] == 8.0 and told["steal_ms"] == 20.0


def test_collections_of_garbage_are_read_from_a_log_whose_lines_two_processes_wrote_at_once() -> None:
    one = 'http-0     DEBUG   collection {"at_s":5.0,"ms":3.0,"generation":2}'
    log = f"20:00:00.000 {one}20:00:00.001 engine     INFO    said\n20:00:01.000 {one.replace('5.0', '7.5')}\n"
    assert collections(log, 5.002, 6.0) == ["http-0 generation 2 3.0 ms"]


def test_how_long_workers_of_the_kernel_work_at_once() -> None:
    line = "     kworker/3:1-9     [003] .....   {}: workqueue_execute_{}: work struct 00000000c7: function {}\n"
    log = [(1.0, "start", "gives"), (1.03, "end", "gives"), (5.0, "start", "gives"), (5.001, "end", "gives")]
    lines = [line.format(f"{at:.6f}", *what) for at, *what in log]
    told = work_of(lines, {"alone": [(4.0, 6.0)], "in_rounds": [(0.0, 2.0), (8.0, 9.0)]})
    assert told["in_rounds"] == {"gives": {"times": 1, "ms_max": 30.0, "ms": 30.0}}
    assert told["alone"]["gives"]["ms_max"] == 1.0
