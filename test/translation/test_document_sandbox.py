"""Documents are read and written in another process, which has limits."""

from __future__ import annotations

import time

import pytest

from rwkv_batch.translation.documents import formats, sandbox
from rwkv_batch.translation.documents.document import DocumentError, DocumentOptions
from rwkv_batch.translation.documents.sandbox import read_requests, write_translation

OPTIONS = DocumentOptions(target="de", source="en")
CONTENT = b"text,id\nHello there,1\nBye,2\nHello there,3\n"


def test_documents_are_read_and_written_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the HTTP worker read them, and held the interpreter's lock for seconds."""
    monkeypatch.setattr(formats, "read_document", lambda *_: pytest.fail("it was read here"))
    found = read_requests(CONTENT, "a.csv", OPTIONS, "en", {"target_lang": "de"})
    assert (found.num_units, found.num_characters, found.notes) == (3, 25, ["column 'text'"])
    assert [body["text_list"] for _, body in found.bodies] == [["Hello there"], ["Bye"]]
    assert all(body["target_lang"] == "de" for _, body in found.bodies)
    texts = {found.bodies[0][0]: "Hallo"}
    assert write_translation(CONTENT, "a.csv", OPTIONS, texts) == CONTENT.replace(b"Hello there", b"Hallo")


def test_refusals_and_lost_processes_are_errors_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DocumentError, match="is not JSON"):
        read_requests(b"{", "a.json", OPTIONS, "en", {})
    monkeypatch.setattr(sandbox, "_PROGRAM", "test.translation.test_document_sandbox")  # its `serve` needs too much
    with pytest.raises(DocumentError, match="takes more than 60 s or 2 GiB to read; split it"):
        read_requests(CONTENT, "a.csv", OPTIONS, "en", {})


def serve() -> None:
    """Pass the limit of memory."""
    from native.sandbox import limit_memory

    limit_memory(256 << 20)
    bytearray(512 << 20)
    time.sleep(60)
