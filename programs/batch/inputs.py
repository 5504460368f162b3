"""Reads the input: decompression, lines of bounded length, and a hash to recognise the file."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import zstandard

from programs.record import RunError

STDIN = "-"
MAX_LINE_BYTES = 16 * 1024 * 1024
"""A longer line fails alone. It is never held in memory as a whole."""
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
"""Magic numbers of Zstandard's skippable frames, which parallel compressors write first."""
_READ_BYTES = 1 << 10
"""Compressed bytes per read. They expand to at most 32 MiB."""
_CHUNK = 1 << 20
_BOM = b"\xef\xbb\xbf"
ReadCheck = Callable[[int, int], None]
"""Takes the numbers of lines and of decompressed bytes so far."""


class DamagedInputError(RunError):
    """The compressed data are damaged. Trying again does not help."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line without its line break."""

    number: int
    """From 1."""
    data: bytes
    """Truncated if the line is too long."""
    size: int
    """Size in bytes with the line break."""

    @property
    def is_too_long(self) -> bool:
        """Whether `data` is truncated."""
        return self.size > MAX_LINE_BYTES

    @property
    def text(self) -> str:
        """The decoded line. Invalid UTF-8 bytes become lone surrogates."""
        return self.data.decode("utf-8", "surrogateescape")


def is_stream(path: str) -> bool:
    """Whether the input can be read only once: standard input, pipes, devices."""
    return path == STDIN or (Path(path).exists() and not Path(path).is_file())


class _ZstdReader(io.RawIOBase):
    """A RawIOBase: decompresses Zstandard frames. The library's own reader accepts truncated files."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame: zstandard.ZstdDecompressionObj | None = None
        """Current frame."""
        self._unused_data = b""
        """Bytes after the last frame."""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
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


class _CheckedFile:
    """A compressed file. Checks before each read: a read that decompresses to nothing yields no line."""

    def __init__(self, raw: io.BufferedReader, check: Callable[[], None]) -> None:
        self._raw = raw
        self._check = check

    def read(self, size: int = -1) -> bytes:
        self._check()
        return self._raw.read(size)


class Input:
    """A file, a pipe or standard input, read once."""

    def __init__(self, path: str, check: ReadCheck = lambda num_lines, num_bytes: None) -> None:
        """Raises RunError if it cannot be opened. `check` raises to end the reading."""
        self.path = path
        self._check = check
        self._num_lines = 0
        self._num_bytes = 0
        """Decompressed bytes that were read."""
        try:
            self._raw = sys.stdin.buffer if path == STDIN else open(path, "rb", buffering=_CHUNK)  # noqa: SIM115
            self._identity = None if is_stream(path) else _file_identity(os.fstat(self._raw.fileno()))
            """Identity of the open file, to notice changes. None for streams."""
            self.size = None if self._identity is None else self._identity.size
        except OSError as error:
            raise RunError(f"the input {path} cannot be read ({error.strerror}); check its name") from None
        self._stream = self._decompressed()

    def _decompressed(self) -> BinaryIO:
        raw = cast(io.BufferedReader, self._raw)
        magic = raw.peek(4)[:4]
        checked = cast(BinaryIO, _CheckedFile(raw, lambda: self._check(self._num_lines, self._num_bytes)))
        if magic.startswith(_GZIP):
            return io.BufferedReader(gzip.GzipFile(fileobj=checked), _CHUNK)
        if magic == _ZSTD or int.from_bytes(magic, "little") in _SKIPPABLE:
            return io.BufferedReader(_ZstdReader(checked), _CHUNK)
        return raw

    def fraction(self) -> float | None:
        """Share of the input that was read, 0..1, or None if unknown."""
        return None if not self.size else min(1.0, self._raw.tell() / self.size)

    def digest(self) -> str:
        """Returns the SHA-256 of the file, or "" for streams. Raises RunError."""
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
        """Checks that the file was not replaced or changed. Raises RunError."""
        if self._identity is not None and _file_identity(os.fstat(file)) != self._identity:
            raise RunError(
                f"the input {self.path} was changed while it was read; restore its content and give the same "
                "command to resume, or give another --output, or --fresh to start over"
            )

    def lines(self) -> Iterator[Line]:
        """Yields every line. Raises RunError if reading fails or the file was changed."""
        try:
            while data := self._read_piece(MAX_LINE_BYTES + 1):
                size = len(data)
                while not data.endswith(b"\n") and size > MAX_LINE_BYTES:
                    more = self._read_piece(_CHUNK)
                    size += len(more)
                    if not more or more.endswith(b"\n"):
                        break
                self._check_unchanged(self._raw.fileno())  # at every line, so that no line of another file is used
                self._num_lines += 1
                if self._num_lines == 1:
                    data = data.removeprefix(_BOM)
                yield Line(self._num_lines, data.removesuffix(b"\n").removesuffix(b"\r"), size)
            self._check_unchanged(self._raw.fileno())
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            is_disk = isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile)
            kind = RunError if is_disk else DamagedInputError
            raise kind(f"the input {self.path} cannot be read after line {self._num_lines} ({error})") from None

    def _read_piece(self, size: int) -> bytes:
        """Returns the rest of a line, or its next `size` bytes."""
        piece = self._stream.readline(size)
        self._num_bytes += len(piece)
        self._check(self._num_lines, self._num_bytes)
        return piece

    def close(self) -> None:
        if self.path != STDIN:
            self._raw.close()


class _FileIdentity(NamedTuple):
    device: int
    inode: int
    size: int
    changed_ns: int


def _file_identity(status: os.stat_result) -> _FileIdentity:
    return _FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
