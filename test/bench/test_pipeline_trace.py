"""What a timeline of stages is summed up to."""

from __future__ import annotations

from bench.stages.pipeline_trace import HostSpan, StageSpan, summary


def test_work_waiting_and_the_host_are_told_apart() -> None:
    """Two stages of 2 ms, the second of which waits a millisecond before each of its steps."""
    stages = [StageSpan(0, step, "d", 3.0 * step, 3.0 * step, 3.0 * step + 2) for step in range(4)]
    stages += [StageSpan(1, step, "m", 3.0 * step + 2, 3.0 * step + 3, 3.0 * step + 5) for step in range(4)]
    host = [HostSpan("launch", step, 3.0 * step, 3.0 * step + 0.5) for step in range(4)]
    found = summary(host, stages)
    assert found["steps"] == 4 and found["ms_per_step"] == 14 / 4
    assert found["works"] == {"0": round(8 / 14, 3), "1": round(8 / 14, 3)}
    assert found["waits"] == {"0": 0.0, "1": round(4 / 14, 3)}
    assert found["between_ms"] == {"0": [1.0, 1.0], "1": [0.0, 0.0]}
    assert found["graph_ms"] == {"0d": 2.0, "1m": 2.0} and found["graphs"] == {"0d": 4, "1m": 4}
    assert found["host_ms_per_step"] == {"launch": 0.5}


def test_a_trace_of_one_step_or_none_tells_no_times() -> None:
    assert summary([], []) == {"steps": 0}
    assert summary([], [StageSpan(0, 7, "d", 0.0, 1.0, 2.0)]) == {"steps": 1}
