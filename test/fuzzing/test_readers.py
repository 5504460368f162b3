"""Random changes of users' files: each reader reads them or raises its own error, within limits."""

from __future__ import annotations

import os

import pytest

from test.fuzzing.readers import READERS, run

COUNT = 100_000 if "RWKV_LONG_TESTS" in os.environ else 2000


@pytest.mark.parametrize("name", READERS)
def test_a_reader_refuses_what_it_cannot_read(name: str) -> None:
    seed = int.from_bytes(os.urandom(4), "little") if "RWKV_LONG_TESTS" in os.environ else 0
    found = run(name, seed, COUNT)
    assert "fault" not in found, found
    assert found["refused"] > COUNT // 10 and found["read"], "the changes are neither too small nor too large"
