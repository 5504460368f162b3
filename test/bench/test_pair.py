"""A measurement of two engines: what ends it before it begins, what its figures are."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import pair
from bench.tools.step_watch import Look, summary


def test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of another service are none of this one's."""

    @contextlib.contextmanager
    def service(*_: Any) -> Iterator[str]:
        with contextlib.ExitStack() as stack:
            for name in ("rwkv-1", "rwkv-2"):
                (tmp_path / name).mkdir()
                server = socket.create_server(str(tmp_path / name / "engine-0"), family=socket.AF_UNIX)
                stack.enter_context(server)
            yield ""

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(pair, "service", service)
    monkeypatch.setattr(pair, "Engines", lambda url: SimpleNamespace(wait_ready=lambda: None))
    with pytest.raises(SystemExit, match="2 engines have come, not 1"), pair.running(1, [], tmp_path / "log"):
        pass


def test_a_steps_time_is_that_with_all_rows() -> None:
    looks = [Look(0.0, 4, 10, 1.0), Look(0.2, 40, 20, 1.1), Look(0.4, 40, 30, 1.3), Look(0.6, 2, 40, 1.32)]
    told = summary(looks)
    assert (told["rows"], told["step_ms"], told["busy_s"]) == (40, 20.0, 0.32)
    assert summary([])["step_ms"] is None


def test_two_engines_pass_with_each_number_of_streams_or_not_at_all() -> None:
    one = pair.Figures(tokens_per_s=[100.0, 110.0, 100.0], steady=[120.0] * 3)
    two = pair.Figures(tokens_per_s=[195.0, 190.0, 200.0], steady=[240.0] * 3)
    told = pair.compared({"http_1": one, "http_2": two})
    assert (told["ok"], told["ratio"], told["steady_ratio"]) == (True, 1.95, 2.0)
    two.errors = 1
    assert not pair.compared({"http_1": one, "http_2": two})["ok"]
