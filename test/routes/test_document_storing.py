"""Uploads: one large file must not block the others, and a client that leaves must leave no file behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from routes.config import HttpConfig
from routes.context import Context, Readiness, RequestLimiter
from routes.file_store import Store, StoreFullError
from routes.openai import files
from routes.request_context import RequestContext, set_current_request
from routes.translation import document_clients, documents, stored
from routes.translation.documents import DocumentFields, create_document
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.translation.documents.document import ColumnError, DocumentError
from rwkv_batch.translation.documents.sandbox import DocumentRequests

FIELDS = DocumentFields.model_validate({"target_lang": "de", "source_lang": "en"})


async def found(*_: Any) -> DocumentRequests:
    """Stands for the process that reads a file."""
    return DocumentRequests([("1", {"text_list": ["Hello"]})], 1, 5, [])


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(documents, "read_requests", found)
    made = Context(None, HttpConfig(), RequestLimiter(8), Readiness(0))  # type: ignore[arg-type]
    made.files = Store(tmp_path / "files", 1 << 20, 10)
    set_current_request(RequestContext("id", "POST", "http://x", "/", "127.0.0.1"))
    return made


def held(context: Context) -> list[Any]:
    assert context.files is not None
    left = [*context.files.files("", "", "", 9, newest_first=True), *context.files.active_batches()]
    return [*left, *context.files.content("x").parent.iterdir()]


@pytest.mark.parametrize("call", ["add_file", "add_batch"])
def test_a_client_that_leaves_leaves_nothing(context: Context, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The file stayed for seven days."""
    began, goes_on = threading.Event(), threading.Event()
    store: Any = context.files
    real = getattr(store, call)

    def slow(*arguments: Any) -> None:
        began.set()
        assert goes_on.wait(30)
        real(*arguments)

    monkeypatch.setattr(store, call, slow)

    async def leave() -> None:
        task = asyncio.create_task(create_document(context, b"Hello\n", "a.txt", FIELDS))
        await asyncio.to_thread(began.wait, 30)
        task.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    (batch,) = store.active_batches()
    assert batch.status == "cancelling" and stored.DELETED_KEY in batch.metadata, "its runner deletes its files"
    assert {file.id for file in held(context) if hasattr(file, "purpose")} <= {
        batch.metadata[stored.FILE_KEY],
        batch.input_file_id,
    }


@pytest.mark.parametrize(
    ("error", "field", "message"),
    [
        (DocumentError("is not YAML: line 1, column 4; check it"), "file", "file: a.csv is not YAML"),
        (ColumnError("there is no column 'x'; name one of 'a'"), "column", "column: a.csv: there is no column 'x'"),
    ],
)
def test_a_refusal_names_the_field(
    context: Context, monkeypatch: pytest.MonkeyPatch, error: DocumentError, field: str, message: str
) -> None:
    """A column in a parser's message made `column` the wrong field."""

    async def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(documents, "read_requests", refuse)
    with pytest.raises(ServiceError, match=message) as found:
        asyncio.run(create_document(context, b"x", "a.csv", FIELDS))
    assert found.value.info.field == field


def test_the_routes_end_with_their_clients() -> None:
    """Only generation did, so a file was read and stored for a client that had left."""
    routes = (*documents.ROUTES, *document_clients.ROUTES)
    assert [route.path for route in routes if not route.ends_with_client and route.method != "DELETE"] == []


def test_a_file_for_a_tuned_model_waits_for_the_engine(context: Context) -> None:
    """It was refused at once while the engine restarted, with errors that its routes did not list."""
    calls, named = [], FIELDS.model_copy(update={"model": "rwkv7:poet"})
    context.readiness = Readiness(600)

    class Engine:
        def call(self, call: object, reply: Callable[[object], None]) -> None:
            calls.append(call)
            reply([])

    context.engine = Engine()  # type: ignore[assignment]

    async def upload() -> None:
        await create_document(context, b"Hello\n", "a.txt", FIELDS)  # a plain one only needs the store
        task = asyncio.create_task(create_document(context, b"Hello\n", "a.txt", named))
        await asyncio.sleep(0.01)
        assert not calls and not task.done()
        context.readiness.engine_changed(is_connected=True)
        await task

    with pytest.raises(ServiceError, match="'rwkv7:poet'") as refused:
        asyncio.run(upload())
    assert refused.value.info.kind is ErrorKind.MODEL_NOT_FOUND and len(calls) == 1
    uploads = [one for one in (*documents.ROUTES, *document_clients.ROUTES) if one.takes_form or one.uploads]
    expected = {ErrorKind.MODEL_NOT_FOUND, ErrorKind.ENGINE_LOST, ErrorKind.OVERLOADED}
    assert len(uploads) == 4 and all(expected <= {*one.errors} for one in uploads)


def test_a_full_store_keeps_nothing(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise StoreFullError("too many")

    monkeypatch.setattr(context.files, "add_batch", full)
    with pytest.raises(ServiceError, match="too many"):
        asyncio.run(create_document(context, b"Hello\n", "a.txt", FIELDS))
    assert not held(context)


def test_examples_are_checked_one_file_at_a_time(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six large files took all threads of an HTTP worker, so no other file was listed for minutes."""
    running, most, began, goes_on = [0], [0], threading.Event(), threading.Event()

    def check(*_: Any) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        began.set()
        assert goes_on.wait(30)
        running[0] -= 1

    monkeypatch.setattr(files, "_check_examples", check)

    async def upload_all() -> None:
        body = files.FileBody.model_validate({"purpose": "fine-tune", "content": b"{}", "filename": "a.jsonl"})
        tasks = [asyncio.create_task(files.upload_file(context, body)) for _ in range(3)]
        await asyncio.to_thread(began.wait, 30)
        for task in tasks[:2]:  # one that is checked, and one that waits
            task.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in done] == [True, True, False]

    asyncio.run(upload_all())
    assert most == [1]
