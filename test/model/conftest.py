"""Emulated kernels: their tests run when what they run has changed. Kernels of older CPUs."""

from __future__ import annotations

import pytest

from test.model.card_launches import EMULATED, emulated_digest, is_recorded
from test.model.older_instructions import instructions

__all__ = ["instructions"]


@pytest.fixture(scope="module", autouse=True)
def _passed(request: pytest.FixtureRequest) -> None:
    """Skip what passed: compiling the kernels for the CPU takes a minute."""
    if request.path.name.endswith("_emulated.py") and is_recorded(EMULATED, emulated_digest()):
        pytest.skip("compiled.json has these sources: the tests passed with them; make test-long runs all")
