"""A Ray that is played, for tests of what a service does in a cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from test.cluster.fake_ray import FakeRay


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """In the place of the package, for as long as the test runs."""
    fake = FakeRay()
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop("cluster.actors.engine_actor", None)  # it has imported the package
    yield fake
    sys.modules.pop("cluster.actors.engine_actor", None)
