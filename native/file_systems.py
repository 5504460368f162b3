"""Recognises file systems whose files other machines can write."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path

_NETWORK = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x5346414F: "AFS",
    0x01021997: "9P",
    0x65735546: "FUSE, perhaps of another machine like sshfs",
}
"""`f_type` of statfs(2), from Linux's magic.h and the file systems' sources."""
_STATFS_BYTES = 256
"""More than the structure has on any processor. It begins with `f_type`."""


def network_file_system(path: Path | str) -> str:
    """Return the name of the network file system that has `path`, or "" for a local one or outside Linux."""
    return _NETWORK.get(_type_number(path), "")


def _type_number(path: Path | str) -> int:
    """Return the number of the file system's type. 0: not known."""
    if not sys.platform.startswith("linux"):
        return 0
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _statfs()(os.fsencode(path), buffer) != 0:
        return 0
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF


@functools.cache
def _statfs() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).statfs
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function
