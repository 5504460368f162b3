"""The input's bytes: opened, decompressed, cut into lines of bounded length, and known again by their hash."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import zstandard

from programs.record import RunError

STDIN = "-"
MAX_LINE_BYTES = 16 * 1024 * 1024
"""A longer line fails alone; it is never held whole."""
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
"""What a Zstandard file of parallel compressors begins with: a frame without data."""
_READ_BYTES = 1 << 10
"""Compressed bytes that are taken at once: they become 32 MiB at most."""
_CHUNK = 1 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """A line without its end."""

    number: int
    """From 1."""
    data: bytes
    """Cut off where it is too long."""
    size: int
    """Bytes in the input, the end included."""

    @property
    def is_too_long(self) -> bool:
        """Whether only its beginning is there."""
        return self.size > MAX_LINE_BYTES

    @property
    def text(self) -> str:
        """Decoded; bytes that are no UTF-8 are lone surrogates."""
        return self.data.decode("utf-8", "surrogateescape")


def is_stream(path: str) -> bool:
    """Whether it can be read once only: standard input, a named pipe, a shell's <(command), a device."""
    return path == STDIN or (Path(path).exists() and not Path(path).is_file())


class _ZstdReader(io.RawIOBase):
    """Zstandard frames, decompressed. zstandard's own reader takes a file that was cut off for one that is whole."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame: zstandard.ZstdDecompressionObj | None = None
        """the frame that is being read"""
        self._unused_data = b""
        """bytes behind the last frame"""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """See RawIOBase."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See RawIOBase. Raises EOFError if the file ends within a frame."""
        while not self._ready:
            piece = self._unused_data or self._raw.read(_READ_BYTES)
            self._unused_data = b""
            if not piece:
                if self._frame is not None:
                    raise EOFError("Compressed file ended before the end of its last frame")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(piece))
            if self._frame.eof:
                self._unused_data, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


class Input:
    """A file, a pipe or standard input, read once from its beginning."""

    def __init__(self, path: str) -> None:
        """Raises RunError if it cannot be opened."""
        self.path = path
        try:
            self._raw = sys.stdin.buffer if path == STDIN else open(path, "rb", buffering=_CHUNK)  # noqa: SIM115
            self._identity = None if is_stream(path) else _file_identity(os.fstat(self._raw.fileno()))
            """what a change of the file would change; None: it can be read once only"""
            self.size = None if self._identity is None else self._identity.size
        except OSError as error:
            raise RunError(f"the input {path} cannot be read ({error.strerror}); check its name") from None
        self._stream = self._decompressed()

    def _decompressed(self) -> BinaryIO:
        raw = cast(io.BufferedReader, self._raw)
        magic = raw.peek(4)[:4]
        if magic.startswith(_GZIP):
            return io.BufferedReader(gzip.GzipFile(fileobj=raw), _CHUNK)
        if magic == _ZSTD or int.from_bytes(magic, "little") in _SKIPPABLE:
            return io.BufferedReader(_ZstdReader(raw), _CHUNK)
        return raw

    def fraction(self) -> float | None:
        """How much of it has been read, 0..1; None if nobody knows."""
        return None if not self.size else min(1.0, self._raw.tell() / self.size)

    def digest(self) -> str:
        """SHA-256 of the file, as it lies there; "" of what can be read once only. Raises RunError."""
        if self._identity is None:
            return ""
        try:
            with open(self.path, "rb") as file:
                value = hashlib.file_digest(file, "sha256").hexdigest()
                self._check_unchanged(file.fileno())
        except OSError as error:
            raise RunError(f"the input {self.path} cannot be read ({error.strerror}); check its name") from None
        return value

    def _check_unchanged(self, file: int) -> None:
        """Raises RunError if this open file is not what was opened, or has been written to since."""
        if self._identity is not None and _file_identity(os.fstat(file)) != self._identity:
            raise RunError(
                f"the input {self.path} was changed while it was read; once it holds again what it held, the same "
                "command goes on from here, else give another --output, or --fresh to begin anew"
            )

    def lines(self) -> Iterator[Line]:
        """Every line. Raises RunError where the file cannot be read on, and once it was changed."""
        number = 0
        try:
            while data := self._stream.readline(MAX_LINE_BYTES + 1):
                size = len(data)
                while not data.endswith(b"\n") and size > MAX_LINE_BYTES:
                    more = self._stream.readline(_CHUNK)
                    size += len(more)
                    if not more or more.endswith(b"\n"):
                        break
                self._check_unchanged(
                    self._raw.fileno()
                )  # at every line: none of another file is asked under this one's number
                number += 1
                if number == 1:
                    data = data.removeprefix(_BOM)
                yield Line(number, data.removesuffix(b"\n").removesuffix(b"\r"), size)
            self._check_unchanged(self._raw.fileno())
        except (OSError, EOFError, zstandard.ZstdError) as error:
            raise RunError(f"the input {self.path} cannot be read after line {number} ({error})") from None

    def close(self) -> None:
        """Let go of the file."""
        if self.path != STDIN:
            self._raw.close()


class _FileIdentity(NamedTuple):
    """What a file is known again by while it is open."""

    device: int
    inode: int
    size: int
    changed_ns: int


def _file_identity(status: os.stat_result) -> _FileIdentity:
    return _FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
