"""Every CUDA source compiles for every architecture that is served, without spills that matter; nvcc comes from pip."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from native import cuda_check

ROOT = Path(__file__).parents[2]
MAX_SPILL_BYTES = 160


def test_there_is_a_compiler() -> None:
    """requirements-dev.txt has it, so that no source is ever unbuilt."""
    assert cuda_check.why_not() is None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", cuda_check.cuda_sources(ROOT), ids=lambda path: path.name)
def test_compiles(source: Path) -> None:
    for arch in cuda_check.CHECKED_ARCHS:
        compiled = cuda_check.compile_one(source, arch)
        assert compiled.ok, compiled.output
        spills = [int(size) for size in re.findall(r"(\d+) bytes spill stores", compiled.output)]
        assert max(spills, default=0) <= MAX_SPILL_BYTES, compiled.output
