"""Reads and writes documents in another process.

A large file takes seconds, in which the interpreter lock of this process would be held. The other process has limits,
and its memory goes with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from native.sandbox import call_once
from rwkv_batch.translation.documents.document import DocumentError, DocumentOptions

CPU_S, MEMORY_BYTES = 60, 2 << 30
_PROGRAM = "rwkv_batch.translation.documents.sandbox_process"


@dataclass(frozen=True, slots=True)
class DocumentRequests:
    """The requests that translate a document."""

    bodies: list[tuple[str, dict[str, Any]]]
    """key and body for each different text"""
    num_units: int
    num_characters: int
    notes: list[str]


async def read_requests(
    data: bytes, name: str, options: DocumentOptions, source: str, fields: Mapping[str, Any]
) -> DocumentRequests:
    """Read a file and return its requests, see `document.requests`. Raises DocumentError."""
    found: DocumentRequests = await _call("read", data, name, options, source, dict(fields))
    return found


async def write_translation(data: bytes, name: str, options: DocumentOptions, texts: Mapping[str, str]) -> bytes:
    """Return a file with its translations, by key of their texts. Raises DocumentError."""
    written: bytes = await _call("write", data, name, options, dict(texts))
    return written


async def _call(*call: Any) -> Any:
    try:
        answer = await call_once(_PROGRAM, call)
    except EOFError:
        raise DocumentError(f"takes more than {CPU_S} s or {MEMORY_BYTES >> 30} GiB to read; split it") from None
    if isinstance(answer, DocumentError):
        raise answer
    return answer
