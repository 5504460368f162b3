"""A paced tuning leaves the device to others between its pieces."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from rwkv_batch.tuning.pacing import SHARE, Pacer, PieceEnd


def test_a_piece_begins_when_the_one_before_has_had_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "result.paced", [100.0]
    slept: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", slept.append)
    pacer = Pacer(path, torch.device("cpu"))

    def piece(seconds: float, name: str = "core", tokens: int = 64) -> None:
        now[0] += seconds
        pacer.wait(name, tokens)

    piece(0.5)
    path.touch()
    piece(0.5)  # its start is not known
    piece(0.01)
    piece(0.03)  # another process had the device for 0.02 s of it
    piece(0.2)
    piece(0.002, tokens=4)  # a smaller piece does not make the larger one short
    piece(0.01)
    piece(9.0, "compilation")
    piece(0.25, "compilation")
    path.unlink()
    piece(0.5)
    path.touch()
    piece(0.5)
    period = 0.01 / SHARE
    wanted = [period - 0.01, period - 0.03, 0, 0.002 / SHARE - 0.002, period - 0.01, 0, 0.25]
    assert slept == pytest.approx(wanted)


def test_short_work_becomes_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause costs the service a switch between processes. A long piece stays alone."""
    path, now, pauses = tmp_path / "result.paced", [100.0], list[tuple[str, float]]()
    path.touch()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    pacer = Pacer(path, torch.device("cpu"))
    layer = {"tiles": 0.0001, "core": 0.00015, "output": 0.0002, "key": 0.0008, "value": 0.0008}
    switch = [0.0003]  # before work that follows a pause
    for _ in range(8):
        pauses.clear()
        for name, seconds in layer.items():
            now[0] += seconds + switch[0]
            switch[0] = 0.0
            monkeypatch.setattr(time, "sleep", lambda s, name=name: pauses.append((name, s)) or switch.append(0.0003))
            pacer.wait(name, 64)
            switch[:] = switch[-1:]
    assert [name for name, _ in pauses] == ["output", "key", "value"]
    assert pauses[0][1] == pytest.approx(0.00075 * (1 / SHARE - 1))


def test_pieces_end_in_the_forward_and_in_the_backward(tmp_path: Path) -> None:
    waits = []
    pacer = Pacer(tmp_path / "result.paced", torch.device("cpu"))
    pacer.wait = lambda *piece: waits.append(piece)  # type: ignore[method-assign]
    x = torch.randn(3, requires_grad=True)
    y = PieceEnd.apply(x * 2, pacer, "output")
    assert torch.equal(y, x * 2) and waits == [("output", 3)]
    (y * torch.arange(3)).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2.0 * torch.arange(3))
    assert waits[1:] == [("after output, backward", 3)]
