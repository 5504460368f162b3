"""The model that tests of the engine share."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.harness import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model. Tests neither change it nor write files next to it."""
    return tiny_model(tmp_path_factory.mktemp("model"))
