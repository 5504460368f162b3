"""Fixtures shared by the tests that talk to a real service."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the engine process; before torch is loaded

from collections.abc import Iterator
from pathlib import Path

import pytest

from test.serving import Service


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random model in a real file: 2 layers of width 64, the whole vocabulary."""
    from demo.random_weights import write_random_model

    return write_random_model(tmp_path_factory.mktemp("model") / "tiny.pth", layers=2, width=64)


@pytest.fixture(scope="session")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service without a password, shared by every test that leaves it as it was."""
    running = Service(tmp_path_factory.mktemp("service"), "--model-path", str(tiny_model))
    try:
        yield running.wait_ready()
    finally:
        running.close()
