"""A paced tuning leaves the device to others between its pieces."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from rwkv_batch.tuning.pacing import SHARE, Pacer, PieceEnd


def test_a_piece_is_followed_by_three_times_its_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "result.paced", [100.0]
    slept: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", slept.append)
    pacer = Pacer(path, torch.device("cpu"))

    def piece(seconds: float) -> None:
        now[0] += seconds
        pacer.wait()

    piece(0.5)
    path.touch()
    piece(0.5)  # its start is not known
    piece(0.01)
    piece(9.0)
    path.unlink()
    piece(0.5)
    path.touch()
    piece(0.5)
    assert slept == pytest.approx([0.01 * (1 / SHARE - 1), 1.0])


def test_pieces_end_in_the_forward_and_in_the_backward(tmp_path: Path) -> None:
    waits = []
    pacer = Pacer(tmp_path / "result.paced", torch.device("cpu"))
    pacer.wait = lambda: waits.append(1)  # type: ignore[method-assign]
    x = torch.randn(3, requires_grad=True)
    y = PieceEnd.apply(x * 2, pacer)
    assert torch.equal(y, x * 2) and len(waits) == 1
    (y * torch.arange(3)).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2.0 * torch.arange(3)) and len(waits) == 2
