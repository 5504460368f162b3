"""Random changes of users' files: each reader reads them or raises its own error, within limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from test.fuzzing import headers
from test.fuzzing.readers import READERS, run

pytestmark = pytest.mark.slow

COUNT = 100_000 if "RWKV_LONG_TESTS" in os.environ else 200


@pytest.mark.parametrize("name", READERS)
def test_a_reader_refuses_what_it_cannot_read(name: str) -> None:
    seed = int.from_bytes(os.urandom(4), "little") if "RWKV_LONG_TESTS" in os.environ else 0
    found = run(name, seed, COUNT)
    assert "fault" not in found, found
    assert found["refused"] > COUNT // 10 and found["read"], "the changes are neither too small nor too large"


def test_headers_are_read_without_torch_in_256_mib(tmp_path: Path) -> None:
    headers.write_corpora(tmp_path)
    for name in headers.FORMATS:
        found = headers.run(tmp_path, name, 0, 300)
        assert "fault" not in found and found["read"] and found["peak_mib"] < 64, found
