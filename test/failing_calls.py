"""Makes the Nth call of a process fail: of files, of sockets or of memory (failing_calls.c)."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

from native import machine

SOURCE = Path(__file__).with_name("failing_calls.c")
_NUMBERS = struct.Struct("5q")
_NAME_BYTES = 64
FOLDER, CONTROL, ONLY = "FAILING_CALLS_FOLDER", "FAILING_CALLS_CONTROL", "FAILING_CALLS_ONLY"
SYNCS = "fsync fdatasync"
FILES, SOCKETS, MEMORY = 1, 2, 4
"""Kinds of calls: on files below the folder, of TCP, allocations from 1 MiB on."""


def environment(folder: Path, work: Path, only: str = "") -> Mapping[str, str]:
    """Build the library in `work`. Return the variables of a process whose calls below `folder` can fail.

    only: names of the calls that count; "": all
    """
    library, control = work / "failing_calls.so", work / "control"
    compiler = machine.cxx()
    assert compiler is not None
    command = [compiler, "-x", "c", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    control.write_bytes(bytes(_NUMBERS.size + _NAME_BYTES))
    counted = {ONLY: only} if only else {}
    return {"LD_PRELOAD": str(library), FOLDER: f"{folder}/", CONTROL: str(control), **counted}


class FailingCalls:
    """The control of a process that was started with `environment`; used by the process or by its parent."""

    def __init__(self, control: Path | None = None) -> None:
        with (control or Path(os.environ[CONTROL])).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _NUMBERS.size + _NAME_BYTES)

    def arm(self, first: int, count: int = 1, kinds: int = FILES) -> None:
        """Let `count` calls of these kinds fail. The first of them is number `first`. Counting starts at 1."""
        self._memory[_NUMBERS.size :] = bytes(_NAME_BYTES)
        _NUMBERS.pack_into(self._memory, 0, first, count, 0, 0, kinds)

    def disarm(self) -> int:
        """Let no call fail. Return how many have failed."""
        failed: int
        _, _, calls, failed, _ = _NUMBERS.unpack_from(self._memory)
        _NUMBERS.pack_into(self._memory, 0, 0, 0, calls, failed, 0)
        return failed

    @property
    def failed(self) -> int:
        """How many calls have failed since `arm`."""
        return int(_NUMBERS.unpack_from(self._memory)[3])

    @property
    def last(self) -> str:
        return bytes(self._memory[_NUMBERS.size :]).split(b"\0")[0].decode()
