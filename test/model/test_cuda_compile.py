"""Every CUDA source compiles for Ampere and Hopper, without spills that matter, wherever nvcc is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from native import cuda_check

ROOT = Path(__file__).parents[2]
MAX_SPILL_BYTES = 128

pytestmark = pytest.mark.skipif(cuda_check.why_not() is not None, reason=str(cuda_check.why_not()))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", cuda_check.cuda_sources(ROOT), ids=lambda path: path.name)
def test_compiles(source: Path) -> None:
    for arch in cuda_check.CHECKED_ARCHS:
        compiled = cuda_check.compile_one(source, arch)
        assert compiled.ok, compiled.output
        spills = [int(size) for size in re.findall(r"(\d+) bytes spill stores", compiled.output)]
        assert max(spills, default=0) <= MAX_SPILL_BYTES, compiled.output
