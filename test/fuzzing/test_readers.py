"""Random changes of users' files: each reader reads them or raises its own error, within limits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from test.conftest import IS_LONG
from test.fuzzing import headers
from test.fuzzing.readers import CPU_S, READERS, fuzz, run
from test.resource_limits import run_bounded

pytestmark = pytest.mark.slow

COUNT = 100_000 if IS_LONG else 200


def fuzz_each(folder: Path) -> dict[str, dict[str, Any]]:
    """Run all readers. Returns their figures by name."""
    found = {}
    for number, name in enumerate(READERS):
        (own := folder / str(number)).mkdir()
        found[name] = fuzz(name, str(own), "0 0", COUNT)
    return found


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Figures of readers that share a process. Without them each reader gets its own, which imports torch."""
    return {} if IS_LONG else run_bounded(fuzz_each, tmp_path_factory.mktemp("readers"), cpu_s=CPU_S).result or {}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_refuses_what_it_cannot_read(name: str, figures: dict[str, dict[str, Any]]) -> None:
    seed = int.from_bytes(os.urandom(4), "little") if IS_LONG else 0
    found = figures.get(name) or run(name, seed, COUNT)
    assert "fault" not in found, found
    assert found["refused"] > COUNT // 10 and found["read"], "the changes are neither too small nor too large"


def test_headers_are_read_without_torch_in_256_mib(tmp_path: Path) -> None:
    headers.write_corpora(tmp_path)
    for name in headers.FORMATS:
        found = headers.run(tmp_path, name, 0, 300)
        assert "fault" not in found and found["read"] and found["peak_mib"] < 64, found
