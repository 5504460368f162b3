"""Files over DeepL's `/v2/document` and LibreTranslate's `/translate_file`."""

from __future__ import annotations

import asyncio
import hmac
from pathlib import PurePath
from typing import Annotated

from pydantic import BaseModel, Field

from routes.context import Context
from routes.file_store import ACTIVE_STATUSES, Batch
from routes.openai.files import not_found
from routes.request.bodies import Body
from routes.request.fields import Pattern, TextFields
from routes.request_context import current_request
from routes.response.http_response import DEEPL_ERRORS, FILE, HandlerResponse, HttpResponse, json_response
from routes.response.task_stream import with_early_head
from routes.route import Routes
from routes.translation.documents import (
    DocumentFields,
    DocumentQuery,
    FileName,
    create_document,
    delete_document,
    document_status,
    error_of,
    find_document,
    meta_of,
    translated_content,
)
from routes.translation.glossaries import GlossaryId
from routes.translation.languages import (
    HEAD_AFTER_S,
    LANGUAGE_CODE,
    LIBRE_ERRORS,
    DeepLFormality,
    Language,
    LibreBody,
    TargetLanguage,
)
from routes.translation.translator import CHECK_ERRORS, ModelName, check_languages
from rwkv_batch.errors import ErrorKind, ServiceError, invalid
from rwkv_batch.translation.documents.formats import ENDINGS
from rwkv_batch.translation.glossary import GlossaryMode
from rwkv_batch.translation.plan import AUTO

_FAILS = (ErrorKind.NOT_FOUND, ErrorKind.OVERLOADED)
_EXAMPLE = {"document_id": "doc_019eae3d7d1a"}
ROUTES = Routes()

_RESULT = "/result"
_KEY_MARK = "."
"""Between id and key in the address of a translated file."""
_POLL_S = 0.3


class DeepLDocumentBody(Body, TextFields):
    """A form (multipart/form-data) with a file."""

    content: bytes = Field(b"", description="The file, in the form's part `file`.")
    filename: FileName = Field("", description="The file's name, from the same part.")
    target_lang: TargetLanguage = Field(description="Code of a language in any case, like DE or ZH-HANT.")
    source_lang: Language = Field(AUTO, description="Code of the file's language. Default: detected for each text.")
    output_format: str = Field("", max_length=16, description="The ending of the file's name; no other is written.")
    glossary_id: GlossaryId = Field("", description="Id of a stored glossary.")
    formality: DeepLFormality = Field(
        "default", description="prefer_more and prefer_less are instructions. more and less are refused."
    )
    model: ModelName = Field("rwkv7")


class DeepLDocumentKey(Body):
    """A document and its key."""

    document_key: str = Field(min_length=1, max_length=128, description="The key from the upload.")
    document_id: Annotated[str, Pattern("^.+$", "a document's id")] = Field(
        max_length=80, description="The id, from the path. `/result` after it returns the translated file."
    )


class DeepLDocument(BaseModel):
    """An uploaded document."""

    document_id: str
    document_key: str


@ROUTES.add(
    "POST",
    "/v2/document",
    "DeepL: translate a file.",
    ends_with_client=True,
    takes_form=True,
    answer=DeepLDocument,
    error_format=DEEPL_ERRORS,
    errors=CHECK_ERRORS,
    form={"target_lang": "ZH", "file": "@film.srt"},
)
async def deepl_upload(context: Context, body: DeepLDocumentBody) -> HandlerResponse:
    """Translate a file as DeepL does."""
    check_languages({"source_lang": body.source_lang, "target_lang": body.target_lang})
    ending = PurePath(body.filename).suffix.lstrip(".").lower()
    if ending in ENDINGS and body.output_format and body.output_format.lower() != ending:
        message = f"must be {ending!r} or left out: the output has the file's format, got {body.output_format!r}"
        raise invalid("output_format", message, body.output_format)
    fields = DocumentFields.model_validate(
        body.model_dump(include={"target_lang", "source_lang", "glossary_id", "formality", "model"})
        | {"glossary_mode": GlossaryMode.ENFORCE}
    )
    batch = await create_document(context, body.content, body.filename, fields)
    return json_response({"document_id": batch.id, "document_key": meta_of(batch)["key"]})


def _check_key(batch: Batch, given: str, name: str) -> None:
    """Raise ServiceError unless the document's key was given."""
    if not hmac.compare_digest(meta_of(batch)["key"].encode(), given.encode()):
        raise not_found("document", name)


@ROUTES.add(
    "POST",
    "/v2/document/{document_id}",
    "DeepL: a document's status, or the translated file with `/result` after its id.",
    ends_with_client=True,
    error_format=DEEPL_ERRORS,
    errors=_FAILS,
    form_lists=(),
    example={**_EXAMPLE, "document_key": "0123456789abcdef"},
)
async def deepl_document(context: Context, body: DeepLDocumentKey) -> HandlerResponse:
    """Return a document's status, or the translated file."""
    name = body.document_id
    batch = await find_document(context, name.removesuffix(_RESULT))
    _check_key(batch, body.document_key, name)
    if name.endswith(_RESULT):
        return await translated_content(context, batch)
    status = {"document_id": batch.id, "status": document_status(batch)}
    if status["status"] == "done":
        return json_response({**status, "billed_characters": int(meta_of(batch)["characters"])})
    return json_response({**status, "error_message": error_of(batch)} if status["status"] == "error" else status)


class LibreFileBody(LibreBody):
    """A form (multipart/form-data) with a file."""

    content: bytes = Field(b"", description="The file, in the form's part `file`.")
    filename: FileName = Field("", description="The file's name, from the same part.")
    source: Annotated[Language, LANGUAGE_CODE] = Field(AUTO, description="Code of the language, or auto.")
    target: Annotated[TargetLanguage, LANGUAGE_CODE] = Field(description="Code of the language to translate into.")
    model: ModelName = Field("rwkv7")


class LibreFile(BaseModel):
    """Where the translated file is."""

    translatedFileUrl: str  # noqa: N815 - LibreTranslate's name


@ROUTES.add(
    "POST",
    "/translate_file",
    "LibreTranslate: translate a file.",
    ends_with_client=True,
    takes_form=True,
    allows_any_origin=True,
    secret_field="api_key",  # noqa: S106 - a name
    ignored_query=("api_key",),
    answer=LibreFile,
    error_format=LIBRE_ERRORS,
    errors=CHECK_ERRORS,
    form={"source": "en", "target": "zh", "file": "@film.srt"},
)
async def libre_upload(context: Context, body: LibreFileBody) -> HandlerResponse:
    """Translate a file as LibreTranslate does: the answer comes when it is done."""
    check_languages({"source": body.source, "target": body.target})
    given = {"target_lang": body.target, "source_lang": body.source, "model": body.model}
    fields = DocumentFields.model_validate(given)
    batch = await create_document(context, body.content, body.filename, fields)
    base = current_request().base_url

    async def answer() -> HttpResponse:
        found = batch
        try:
            while found.status in ACTIVE_STATUSES:
                await asyncio.sleep(_POLL_S)
                found = await find_document(context, batch.id)
        except asyncio.CancelledError:  # the client left
            await asyncio.shield(delete_document(context, batch))
            raise
        if document_status(found) == "error":
            raise ServiceError(ErrorKind.INTERNAL, f"the file was not translated: {error_of(found)}")
        name = f"{batch.id}{_KEY_MARK}{meta_of(batch)['key']}"
        return json_response({"translatedFileUrl": f"{base}/download_file/{name}"})

    return await with_early_head(answer(), LIBRE_ERRORS, HEAD_AFTER_S)


@ROUTES.add(
    "GET",
    "/download_file/{document_id}",
    "LibreTranslate: a translated file.",
    ends_with_client=True,
    is_public=True,
    allows_any_origin=True,
    content_type=FILE,
    error_format=LIBRE_ERRORS,
    errors=_FAILS,
    example=_EXAMPLE,
)
async def libre_download(context: Context, query: DocumentQuery) -> HandlerResponse:
    """Return a translated file. The key in its address is the permission."""
    name, _, key = query.document_id.partition(_KEY_MARK)
    batch = await find_document(context, name, owner="")
    _check_key(batch, key, name)
    return await translated_content(context, batch)
