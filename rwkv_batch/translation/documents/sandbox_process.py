"""The process that reads or writes one document."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from native.sandbox import limit_memory, limit_next_cpu, receive, send


def serve() -> None:
    """Answer one call from standard input. The answer is its result or a DocumentError."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each thread takes address space, which is limited
    from rwkv_batch.translation.documents.document import DocumentError
    from rwkv_batch.translation.documents.sandbox import CPU_S, MEMORY_BYTES

    limit_memory(MEMORY_BYTES)
    name, *arguments = receive(sys.stdin.buffer)
    limit_next_cpu(CPU_S)
    answer: Any
    try:
        answer = (_read if name == "read" else _write)(*arguments)
    except DocumentError as error:
        answer = error
    send(sys.stdout.buffer, answer)


def _read(data: bytes, name: str, options: Any, source: str, fields: Mapping[str, Any]) -> Any:
    from rwkv_batch.translation.documents.document import requests
    from rwkv_batch.translation.documents.formats import read_document
    from rwkv_batch.translation.documents.sandbox import DocumentRequests

    document = read_document(data, name, options)
    units = document.units
    num_characters = sum(len(unit.text) for unit in units)
    return DocumentRequests([*requests(document, source, fields)], len(units), num_characters, document.notes)


def _write(data: bytes, name: str, options: Any, texts: Mapping[str, str]) -> bytes:
    from rwkv_batch.translation.documents.document import unit_key
    from rwkv_batch.translation.documents.formats import read_document

    document = read_document(data, name, options)
    return document.write([texts.get(unit_key(unit)) for unit in document.units], is_bilingual=options.is_bilingual)
