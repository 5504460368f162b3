"""Documents: files that are translated in the background. A document is a batch with a line per text.

`/translate/v1/documents` has the native routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from pydantic import AfterValidator, BaseModel, Field

from routes.context import Context
from routes.file_store import ACTIVE_STATUSES, Batch, Counts, Purpose, Status, Store, StoredFile
from routes.openai.batches import new_batch
from routes.openai.files import READ_FAILED, call_store, get_store, new_id, not_found
from routes.request.bodies import Body
from routes.request.fields import Fields, TextFields
from routes.request.model_names import means_model
from routes.request_context import current_request
from routes.response.http_response import FILE, HandlerResponse, HttpResponse, json_response
from routes.route import Routes, Upload
from routes.translation import stored
from routes.translation.glossaries import GlossaryId
from routes.translation.languages import LABEL, Formality, GlossaryText, Language, StyleText, TargetLanguage
from routes.translation.translator import CHECK_ERRORS, ModelName, check_model, report_unknown_languages
from rwkv_batch.errors import ErrorKind, ServiceError, invalid
from rwkv_batch.translation.documents.document import ColumnError, DocumentError, DocumentOptions
from rwkv_batch.translation.documents.formats import ENDINGS, check_name, translated_name
from rwkv_batch.translation.documents.sandbox import DocumentRequests, read_requests, write_translation
from rwkv_batch.translation.glossary import Glossary, GlossaryMode
from rwkv_batch.translation.plan import AUTO

PATH = "/translate/v1/documents"
_ITEM = f"{PATH}/{{document_id}}"
_FAILS = (ErrorKind.NOT_FOUND, ErrorKind.OVERLOADED)
_EXAMPLE = {"document_id": "doc_019eae3d7d1a"}
_ENDINGS = ", ".join(ENDINGS)
ROUTES = Routes()
_TTL_S = 7 * 86400
_PREFIX, _CONTENT = "doc_", "/content"
_CANNOT_STORE, _CANNOT_DELETE = "the document cannot be stored", "the document cannot be deleted"
FileName = Annotated[
    str, Field(max_length=255), AfterValidator(lambda name: PurePath(name.replace("\\", "/")).name or "document")
]
_OneLine = Annotated[str, Field(max_length=256)]


class DocumentFields(TextFields):
    """What a translation of a file can be asked for."""

    target_lang: TargetLanguage = Field(description="ISO code or English name.")
    source_lang: Language = Field(AUTO, description="ISO code, or auto to detect each text.")
    column: _OneLine = Field("", description="Column of a CSV or TSV file. Default: text, or the only one.")
    encoding: _OneLine = Field("", description="Encoding of a text file. Default: detected.")
    bilingual: bool = Field(False, description="Keep each text, with its translation after it.")
    glossary_id: GlossaryId = Field("", description="Id of a stored glossary.")
    glossary_mode: GlossaryMode = Field(GlossaryMode.CHECK, description="hint, check or enforce, as for texts.")
    instruction: StyleText = Field("", description='Instruction in plain words, like "Use short sentences."')
    formality: Formality = Field("default", description="more or less formal, as for texts.")
    memory: bool = Field(False, description="Use the key's approved translations, as for texts.")
    model: ModelName = Field("rwkv7")


class DocumentBody(DocumentFields, Body, TextFields):
    """A form (multipart/form-data) with a file."""

    content: bytes = Field(b"", description="The file, in the form's part `file`.")
    filename: FileName = Field("", description="The file's name, from the same part. Its ending names the format.")
    glossary: GlossaryText = Field(
        {}, description='Terms and translations, as JSON: {"state pool": "状态池"}. They win over `glossary_id`.'
    )
    password: str = Field("", description="The password or an API key, if the service requires one.")


class DocumentUpload(DocumentFields):
    """A file as the request's body."""

    filename: FileName = Field(min_length=1, description="The file's name. Its ending names the format.")


class DocumentQuery(Fields):
    """The document to return."""

    document_id: str = Field(min_length=1, max_length=80, description="The id. Add `/content` for the translation.")


class DoubtfulText(BaseModel):
    """A translation that a person should read."""

    text: str
    translation: str
    warning: str


class DocumentObject(BaseModel):
    """A document that is translated."""

    id: str
    filename: str = Field(description="Name of the translated file.")
    status: Literal["queued", "translating", "done", "error"]
    texts: int = Field(description="Number of different texts.")
    translated: int
    failed: int = Field(description="Texts that could not be translated. They stay as they are.")
    created_at: int
    error: str = ""
    notes: list[str] = Field([], description="What was found in the file, like its encoding.")
    doubtful: list[DoubtfulText] = Field(
        [], description=f"Translations that may be wrong, once it is done; at most {stored.MAX_DOUBTFUL}."
    )


class DeletedDocument(BaseModel):
    """A deleted document."""

    id: str
    deleted: bool


_STATUS = dict.fromkeys(Status, "error") | {
    Status.VALIDATING: "queued",
    Status.IN_PROGRESS: "translating",
    Status.FINALIZING: "translating",
    Status.COMPLETED: "done",
}


def document_status(batch: Batch) -> str:
    return "error" if batch.ends_as is not Status.COMPLETED else _STATUS[batch.status]


def meta_of(batch: Batch) -> dict[str, str]:
    return batch.metadata or {}


def error_of(batch: Batch) -> str:
    if document_status(batch) != "error":
        return ""
    return batch.errors[0]["message"] if batch.errors else f"the translation was {batch.status}; send the file again"


def document_object(batch: Batch) -> dict[str, Any]:
    return {
        "id": batch.id,
        "filename": meta_of(batch)["result"],
        "status": document_status(batch),
        "texts": batch.counts.total,
        "translated": batch.counts.completed,
        "failed": batch.counts.failed,
        "created_at": batch.created_at,
        "error": error_of(batch),
        "notes": meta_of(batch).get("notes", "").splitlines(),
    }


def _lines(found: DocumentRequests, all_terms: Mapping[str, str]) -> bytes:
    """Return the lines of a document's batch. Each has the terms of its text only."""
    glossary = Glossary(all_terms)

    def line(key: str, body: dict[str, Any]) -> bytes:
        terms = glossary.terms_in(body["text_list"][0])
        body = body | ({"glossary": terms} if terms else {})
        return msgspec.json.encode({"custom_id": key, "method": "POST", "url": LABEL, "body": body})

    return b"\n".join(line(key, body) for key, body in found.bodies)


def _options(fields: DocumentFields) -> DocumentOptions:
    return DocumentOptions(
        target=fields.target_lang, source=fields.source_lang, column=fields.column, encoding=fields.encoding,
        is_bilingual=fields.bilingual,
    )  # fmt: skip


async def _read(
    context: Context, content: bytes, name: str, fields: DocumentFields, terms: Mapping[str, str]
) -> tuple[DocumentRequests, bytes]:
    """Read a file: its requests, and the lines of its batch. Raises ServiceError."""
    named = {"target_lang", "glossary_id", "glossary_mode", "instruction", "formality", "memory"}
    if means_model(fields.model, context.config.model_name):  # for another one, `model_context` has warned
        named.add("model")
    more = fields.model_dump(mode="json", include=named, exclude_defaults=True)
    try:
        check_name(name)
        async with _sandbox(context):
            found = await read_requests(content, name, _options(fields), fields.source_lang, more)
    except ColumnError as error:
        raise invalid("column", f"{name}: {error}", fields.column) from None
    except DocumentError as error:
        raise invalid("file", f"{name} {error}", name) from None
    if not found.num_units:
        raise invalid("file", f"{name} has no text to translate", name)
    return found, await asyncio.to_thread(_lines, found, terms)


@contextlib.asynccontextmanager
async def _sandbox(context: Context) -> AsyncIterator[None]:
    """Wait for one of the worker's processes for documents. Raises ServiceError if too many wait."""
    with context.stored_files.place(current_request().client):
        async with context.document_processes:
            yield


async def create_document(
    context: Context, content: bytes, name: str, fields: DocumentFields, terms: Mapping[str, str] | None = None
) -> Batch:
    """Store a file and begin its translation. Raises ServiceError."""
    report_unknown_languages(
        {"source_lang": fields.source_lang, "target_lang": fields.target_lang}, context.config.strict_fields
    )
    if not content:
        raise invalid("file", "must be a part of a form (multipart/form-data), and must not be empty", "")
    await check_model(context, fields.model)
    store, request_context = get_store(context), current_request()
    found, lines = await _read(context, content, name, fields, terms or {})
    original, requested = (_stored(request_context.owner, name, len(data)) for data in (content, lines))
    metadata = {key: str(getattr(fields, key)) for key in DocumentFields.model_fields} | {
        stored.FILE_KEY: original.id,
        "name": name,
        "key": secrets.token_hex(16),
        "result": translated_name(name, fields.target_lang)[:255],
        "characters": str(found.num_characters),
        "notes": "\n".join(found.notes),
    }
    batch = msgspec.structs.replace(
        new_batch(new_id(_PREFIX), LABEL, requested.id, _TTL_S, metadata), counts=Counts(total=len(found.bodies))
    )
    storing = asyncio.ensure_future(
        call_store(_store_all, _CANNOT_STORE, store, batch, [(original, content), (requested, lines)])
    )
    try:
        await asyncio.shield(storing)
    except asyncio.CancelledError:  # the client has left without the id; the thread ends its work
        await asyncio.wait([storing])
        if storing.exception() is None:
            await delete_document(context, batch)
        raise
    return batch


def _store_all(store: Store, batch: Batch, files: list[tuple[StoredFile, bytes]]) -> None:
    """Store a document's files, then its batch, or nothing. Raises StoreFullError, OSError."""
    try:
        for file, content in files:
            store.add_file(file, content)
        store.add_batch(batch)
    except BaseException:
        stored.delete_document(store, batch)
        raise


def _stored(owner: str, name: str, size: int) -> StoredFile:
    created = int(time.time())
    return StoredFile(
        id=new_id("file-"),
        owner=owner,
        bytes=size,
        created_at=created,
        filename=name,
        purpose=Purpose.DOCUMENT,
        expires_at=created + _TTL_S,
    )


async def find_document(context: Context, name: str, owner: str | None = None) -> Batch:
    """Return a document of this key. `owner`: another one. Raises ServiceError."""
    owner = current_request().owner if owner is None else owner
    batch = await call_store(get_store(context).batch, READ_FAILED, owner, name)
    if batch is None or not batch.id.startswith(_PREFIX) or stored.DELETED_KEY in meta_of(batch):
        raise not_found("document", name)
    return batch


async def translated_content(context: Context, batch: Batch) -> HttpResponse:
    """Return the translated file. Raises ServiceError if it is not ready."""
    if document_status(batch) == "error":
        raise ServiceError(ErrorKind.NOT_FOUND, f"there is no translation: {error_of(batch)}", field="document_id")
    if batch.status is not Status.COMPLETED:
        done = f"{batch.counts.completed} of {batch.counts.total} texts are translated"
        raise ServiceError(ErrorKind.OVERLOADED, f"the document is not ready: {done}; try again", retry_after_s=1.0)
    async with _sandbox(context):
        data = await _assembled(context, batch)
    name = meta_of(batch)["result"]
    simple = re.sub(r"[^\w.() -]", "_", name, flags=re.ASCII)  # for curl, which does not know `filename*`
    named = f"attachment; filename=\"{simple}\"; filename*=UTF-8''{quote(name)}"
    return HttpResponse(data, 200, FILE, {"Content-Disposition": named})


async def _assembled(context: Context, batch: Batch) -> bytes:
    """Return the file with the answers of its batch. Raises ServiceError if its files have expired."""
    meta = meta_of(batch)
    try:
        content, texts = await asyncio.to_thread(_stored_texts, get_store(context), batch)
    except FileNotFoundError:
        raise not_found("document", batch.id) from None
    fields = DocumentFields.model_validate({name: meta[name] for name in DocumentFields.model_fields if name in meta})
    try:
        return await write_translation(content, meta["name"], _options(fields), texts)
    except DocumentError as error:
        raise invalid("document_id", f"the translation of {meta['name']} {error}", batch.id) from None


def _stored_texts(store: Store, batch: Batch) -> tuple[bytes, dict[str, str]]:
    """Return a document's file, and its translations by key. Raises FileNotFoundError."""
    content = store.content(meta_of(batch)[stored.FILE_KEY]).read_bytes()
    return content, {key: answer["translations"][0]["text"] for key, answer in stored.answers(store, batch)}


async def delete_document(context: Context, batch: Batch) -> None:
    """Stop a translation and delete its files. Raises ServiceError."""

    def deleted(batch: Batch) -> Batch:
        batch = msgspec.structs.replace(batch, metadata={**meta_of(batch), stored.DELETED_KEY: "yes"})
        if batch.status not in (Status.VALIDATING, Status.IN_PROGRESS):
            return batch
        return batch.with_status(Status.CANCELLING, int(time.time()))

    store = get_store(context)
    batch = await call_store(store.update, _CANNOT_DELETE, batch.id, deleted)
    if batch.status not in ACTIVE_STATUSES:  # else its runner deletes it
        await call_store(stored.delete_document, _CANNOT_DELETE, store, batch)


@ROUTES.add(
    "POST",
    PATH,
    f"Translate a file: {_ENDINGS}.",
    ends_with_client=True,
    takes_form=True,
    answer=DocumentObject,
    errors=CHECK_ERRORS,
    form={"target_lang": "zh-CN", "file": "@film.srt"},
)
async def upload_form(context: Context, body: DocumentBody) -> HandlerResponse:
    """Translate a file, sent as a form. The answer has an id for its status and its result."""
    batch = await create_document(context, body.content, body.filename, body, body.glossary)
    return json_response(document_object(batch))


@ROUTES.add(
    "PUT",
    f"{PATH}/{{filename}}",
    "Translate a file that is the request's body.",
    ends_with_client=True,
    uploads=FILE,
    answer=DocumentObject,
    errors=CHECK_ERRORS,
    example={"filename": "film.srt", "target_lang": "zh-CN"},
)
async def upload_file(context: Context, upload: Upload[DocumentUpload]) -> HandlerResponse:
    """Translate a file in the body, as `curl -T` sends it."""
    batch = await create_document(context, upload.content, upload.query.filename, upload.query)
    return json_response(document_object(batch))


@ROUTES.add(
    "GET",
    _ITEM,
    "Get a document's status, or the translated file with `/content` after its id.",
    ends_with_client=True,
    answer=DocumentObject,
    errors=_FAILS,
    example=_EXAMPLE,
)
async def get_document(context: Context, query: DocumentQuery) -> HandlerResponse:
    """Return a document's status, or with `/content` the translated file."""
    name: str = query.document_id
    batch = await find_document(context, name.removesuffix(_CONTENT))
    if not name.endswith(_CONTENT):
        is_done = document_status(batch) == "done"
        doubtful = await asyncio.to_thread(stored.doubtful_texts, get_store(context), batch) if is_done else []
        return json_response(document_object(batch) | {"doubtful": doubtful})
    return await translated_content(context, batch)


@ROUTES.add(
    "DELETE",
    _ITEM,
    "Stop a document's translation, and delete its files.",
    answer=DeletedDocument,
    errors=_FAILS,
    example=_EXAMPLE,
)
async def remove_document(context: Context, query: DocumentQuery) -> HandlerResponse:
    """Stop a translation, and delete its files."""
    batch = await find_document(context, query.document_id)
    await delete_document(context, batch)
    return json_response({"id": batch.id, "deleted": True})
