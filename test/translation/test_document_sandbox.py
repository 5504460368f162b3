"""Documents are read and written in another process, which has limits."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rwkv_batch.translation.documents import formats, sandbox
from rwkv_batch.translation.documents.document import DocumentError, DocumentOptions
from rwkv_batch.translation.documents.sandbox import read_requests, write_translation

OPTIONS = DocumentOptions(target="de", source="en")
CONTENT = b"text,id\nHello there,1\nBye,2\nHello there,3\n"


def test_documents_are_read_and_written_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the HTTP worker read them, and held the interpreter's lock for seconds."""
    monkeypatch.setattr(formats, "read_document", lambda *_: pytest.fail("it was read here"))
    found = asyncio.run(read_requests(CONTENT, "a.csv", OPTIONS, "en", {"target_lang": "de"}))
    assert (found.num_units, found.num_characters, found.notes) == (3, 25, ["column 'text'"])
    assert [body["text_list"] for _, body in found.bodies] == [["Hello there"], ["Bye"]]
    assert all(body["target_lang"] == "de" for _, body in found.bodies)
    texts = {found.bodies[0][0]: "Hallo"}
    assert asyncio.run(write_translation(CONTENT, "a.csv", OPTIONS, texts)) == CONTENT.replace(b"Hello there", b"Hallo")


def test_refusals_and_lost_processes_are_errors_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DocumentError, match="is not JSON"):
        asyncio.run(read_requests(b"{", "a.json", OPTIONS, "en", {}))
    monkeypatch.setattr(sandbox, "_PROGRAM", "test.translation.test_document_sandbox")  # its `serve` needs too much
    with pytest.raises(DocumentError, match="takes more than 60 s or 2 GiB to read; split it"):
        asyncio.run(read_requests(CONTENT, "a.csv", OPTIONS, "en", {}))


def test_a_fault_of_a_reader_is_not_blamed_on_the_file() -> None:
    """Any exception was said to be a limit of time or memory, and its traceback was lost."""
    with pytest.raises(RuntimeError, match="AttributeError"):
        asyncio.run(read_requests(CONTENT, "a.csv", None, "en", {}))  # type: ignore[arg-type]


def test_a_document_takes_no_thread_and_ends_with_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six slow documents blocked all other work on threads, also after their clients had left."""
    real = asyncio.create_subprocess_exec

    async def leave() -> int:
        started: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def start(*command: str, **options: Any) -> Any:
            started.set_result(await real("sleep", "60", **options))
            return started.result()

        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        task = asyncio.create_task(read_requests(CONTENT, "a.csv", OPTIONS, "en", {}))
        process = await started
        await asyncio.to_thread(int)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        code: int = await process.wait()
        return code

    assert asyncio.run(asyncio.wait_for(leave(), 30)) == -9


def serve() -> None:
    """Pass the limit of memory."""
    from native.sandbox import limit_memory

    limit_memory(256 << 20)
    bytearray(512 << 20)
    time.sleep(60)
