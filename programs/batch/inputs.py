"""Reads the input: decompression, lines of bounded length, and a hash to recognise the file."""

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
"""A longer line fails alone. It is never held in memory as a whole."""
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
"""Magic numbers of Zstandard's skippable frames, which parallel compressors write first."""
_READ_BYTES = 1 << 10
"""Compressed bytes per read. They expand to at most 32 MiB."""
_CHUNK = 1 << 20
_BOM = b"\xef\xbb\xbf"


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
    """Decompresses Zstandard frames. The library's own reader accepts truncated files."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame: zstandard.ZstdDecompressionObj | None = None
        """Current frame."""
        self._unused_data = b""
        """Bytes after the last frame."""
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
    """A file, a pipe or standard input, read once."""

    def __init__(self, path: str) -> None:
        """Raises RunError if it cannot be opened."""
        self.path = path
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
        if magic.startswith(_GZIP):
            return io.BufferedReader(gzip.GzipFile(fileobj=raw), _CHUNK)
        if magic == _ZSTD or int.from_bytes(magic, "little") in _SKIPPABLE:
            return io.BufferedReader(_ZstdReader(raw), _CHUNK)
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
        """Raises RunError if the file was replaced or changed."""
        if self._identity is not None and _file_identity(os.fstat(file)) != self._identity:
            raise RunError(
                f"the input {self.path} was changed while it was read; restore its content and give the same "
                "command to resume, or give another --output, or --fresh to start over"
            )

    def lines(self) -> Iterator[Line]:
        """Yields every line. Raises RunError if reading fails or the file was changed."""
        number = 0
        try:
            while data := self._stream.readline(MAX_LINE_BYTES + 1):
                size = len(data)
                while not data.endswith(b"\n") and size > MAX_LINE_BYTES:
                    more = self._stream.readline(_CHUNK)
                    size += len(more)
                    if not more or more.endswith(b"\n"):
                        break
                self._check_unchanged(self._raw.fileno())  # at every line, so that no line of another file is used
                number += 1
                if number == 1:
                    data = data.removeprefix(_BOM)
                yield Line(number, data.removesuffix(b"\n").removesuffix(b"\r"), size)
            self._check_unchanged(self._raw.fileno())
        except (OSError, EOFError, zstandard.ZstdError) as error:
            raise RunError(f"the input {self.path} cannot be read after line {number} ({error})") from None

    def close(self) -> None:
        """Closes the file."""
        if self.path != STDIN:
            self._raw.close()


class _FileIdentity(NamedTuple):
    """Recognises an open file."""

    device: int
    inode: int
    size: int
    changed_ns: int


def _file_identity(status: os.stat_result) -> _FileIdentity:
    return _FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
