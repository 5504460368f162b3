"""Shared fixtures: a fake Ray, and a fleet of fake clients."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from rwkv_batch.fleet.routing import FleetLimits
from test.fleet.fake_clients import FakeClient, FakeFleet, make_fleet, use_fake_clients
from test.fleet.fake_ray import FakeRay


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """Replaces the package `ray` during the test."""
    fake = FakeRay()
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop("rwkv_batch.fleet.actors.engine_actor", None)  # it has imported the real package
    yield fake
    sys.modules.pop("rwkv_batch.fleet.actors.engine_actor", None)


@pytest.fixture
def two_engines(monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    use_fake_clients(monkeypatch, FakeClient)
    return make_fleet(FleetLimits(resubmit=2, wait_s=0.0))
