"""What several files of these tests share: a Ray and engines that are played."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from rwkv_batch.fleet.fleet import FleetLimits
from test.fleet.fake_ray import FakeRay
from test.fleet.fake_clients import Made, Played, made, play


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """In the place of the package, for as long as the test runs."""
    fake = FakeRay()
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop("rwkv_batch.fleet.actors.engine_actor", None)  # it has imported the package
    yield fake
    sys.modules.pop("rwkv_batch.fleet.actors.engine_actor", None)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Made:
    """A fleet of two engines that are there."""
    play(monkeypatch, Played)
    return made(FleetLimits(resubmit=2, wait_s=0.0))
