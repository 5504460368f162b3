"""`/openai/v1/files`: inputs and outputs of batches, in OpenAI's format."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, ParamSpec, TypeVar

from pydantic import BaseModel, Field

from routes.context import Context
from routes.file_store import Purpose, Store, StoredFile, StoreFullError
from routes.fine_tuning.data import UnknownFields, check_data
from routes.request.bodies import Body, Fields
from routes.request.fields import Pattern, TextFields
from routes.request_context import current_request, warn
from routes.response import http_response
from routes.route import Routes
from rwkv_batch.errors import ErrorKind, ServiceError, invalid

logger = logging.getLogger(__name__)

PATH = "/openai/v1/files"
_FILE_PATH = f"{PATH}/{{file_id}}"
_EXAMPLE = {"file_id": "file-019eae3d7d1a"}
READ_FAILED = "the file cannot be read"
TTL_S = 30 * 86400
"""Default lifetime of a file."""
MIN_LINES = 10
"""of a file of examples, as in OpenAI's API"""
_CONTENT = "/content"
_RETRY_S = 10.0
STORE_ERRORS = (ErrorKind.OVERLOADED, ErrorKind.STORAGE_FAILED)
ROUTES = Routes(error_format=http_response.OPENAI_ERRORS, errors=STORE_ERRORS)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Entry = TypeVar("_Entry")
_Seconds = Annotated[str, Pattern(r"^[0-9]{1,9}$", "a whole number of seconds below 1000000000")]


class FileBody(Body):
    """A form (multipart/form-data) with a file."""

    content: bytes = Field(b"", description="The file, in the form's part `file`.")
    filename: str = Field("", max_length=1024, description="The file's name, from the same part.")
    purpose: str = Field(
        description="batch: a file of requests for /openai/v1/batches. fine-tune: examples for a fine-tuning job."
    )
    expires_after: _Seconds | None = Field(
        None, alias="expires_after[seconds]", description="Seconds until the file is deleted. Default: 30 days."
    )
    expires_after_anchor: Literal["created_at"] | None = Field(
        None, alias="expires_after[anchor]", description="The time from which the seconds count."
    )


class ListQuery(TextFields):
    """A page of a list."""

    after: str = Field("", max_length=64, description="Id of the last entry of the previous page.")
    limit: int = Field(100, ge=1, le=10000, description="Maximum number of entries.")


class FilesQuery(ListQuery):
    """The files to list."""

    purpose: str = Field("", max_length=64, description="Only files with this purpose.")
    order: Literal["asc", "desc"] = Field("desc", description="Order by creation time.")


class FileQuery(Fields):
    """The file to return."""

    file_id: str = Field(min_length=1, max_length=80, description="The file's id. Add `/content` for its content.")


class FileObject(BaseModel):
    """A file without its content."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: int | None = None
    num_tokens: int | None = Field(None, description="Of a file of examples. Not in OpenAI's API.")


class Page(BaseModel, Generic[_Entry]):
    """A page of a list."""

    object: Literal["list"] = "list"
    data: list[_Entry]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(Page[FileObject]):
    """A page of files."""


class DeletedFile(BaseModel):
    """A deleted file."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool


def get_store(context: Context) -> Store:
    """Return the store. Raises ServiceError if the service has none."""
    if context.files is None:
        raise ServiceError(
            ErrorKind.NOT_FOUND,
            "this service stores no files; start it with --files-dir, or with --state-db and without --files-dir none",
        )
    return context.files


async def call_store(
    function: Callable[_Parameters, _Result],
    failure_message: str,
    *args: _Parameters.args,
    **kwargs: _Parameters.kwargs,
) -> _Result:
    """Call a store function on a thread and return its result.

    Raises ServiceError with `failure_message` if the store has no room, or its disk is full or unusable.
    """
    try:
        return await asyncio.to_thread(function, *args, **kwargs)
    except StoreFullError as error:
        raise ServiceError(ErrorKind.OVERLOADED, f"{failure_message}: {error}") from None
    except OSError as error:
        raise _disk_error(failure_message, error) from None


def _disk_error(failure_message: str, error: OSError) -> ServiceError:
    logger.error("%s: %s", failure_message, error)  # a client does not learn the path
    reason = error.strerror or error
    message = f"{failure_message}: {reason}; if the disk of --files-dir is full, free space on it, then retry"
    return ServiceError(ErrorKind.STORAGE_FAILED, message, retry_after_s=_RETRY_S)


def new_id(prefix: str) -> str:
    """Return an id that sorts by time and cannot be guessed."""
    return f"{prefix}{time.time_ns() // 1_000_000:011x}{secrets.token_hex(10)}"


def file_object(file: StoredFile) -> dict[str, Any]:
    return FileObject.model_validate(file, from_attributes=True).model_dump()


def list_page(entries: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return a page of a list. More than `limit` entries mean that there is another page."""
    page_entries = entries[:limit]
    ends = [entry["id"] for entry in (page_entries[:1] + page_entries[-1:])]
    return {
        "object": "list",
        "data": page_entries,
        "first_id": ends[0] if ends else None,
        "last_id": ends[-1] if ends else None,
        "has_more": len(entries) > limit,
    }


_REMEDIES = {
    "file": "GET /openai/v1/files lists them",
    "batch": "GET /openai/v1/batches lists them",
    "job": "GET /openai/v1/fine_tuning/jobs lists them",
    "document": "the upload's answer has its id",
}


def not_found(kind: str, name: str) -> ServiceError:
    """Return the error for an object that does not exist. One that belongs to another key gets the same error."""
    field = f"{kind}_id"
    message = f"{field}: no such {kind}: {name[:80]!r}; {_REMEDIES[kind]}"
    return ServiceError(ErrorKind.NOT_FOUND, message, field=field, given=name[:80])


@ROUTES.add(
    "POST",
    PATH,
    "Upload a file of requests for a batch, or of examples for a fine-tuning job.",
    ends_with_client=True,
    answer=FileObject,
    takes_form=True,
    form={"purpose": "batch", "file": "@lines.jsonl"},
)
async def upload_file(context: Context, body: FileBody) -> http_response.HandlerResponse:
    """Upload a file for a batch or for a fine-tuning job.

    A batch has JSON lines, each `{"custom_id", "method": "POST", "url", "body"}`. Examples are JSON lines with
    `messages`, or with `prompt` and `completion`, or a CSV or TMX of translations. The error of a bad file has
    the first 100 bad lines.
    """
    store = get_store(context)
    if body.purpose not in (Purpose.BATCH, Purpose.FINE_TUNE):
        raise invalid("purpose", f"must be 'batch' or 'fine-tune', got {body.purpose!r}", body.purpose)
    if not body.content:
        raise invalid("file", "must be a part of a form (multipart/form-data), and must not be empty", "")
    num_tokens: int | None = None
    if body.purpose == Purpose.FINE_TUNE:
        async with context.file_checks:
            unknown = UnknownFields()
            checking = asyncio.ensure_future(asyncio.to_thread(_check_examples, body.content, body.filename, unknown))
            try:
                num_tokens = await asyncio.shield(checking)
            finally:  # also if the client has left: the thread runs to its end
                await asyncio.wait([checking])
            for text in unknown.warnings:
                warn("file", f"file: {text}")
    created = int(time.time())
    file = StoredFile(
        id=new_id("file-"),
        owner=current_request().owner,
        bytes=len(body.content),
        created_at=created,
        filename=body.filename or "upload.jsonl",
        purpose=Purpose(body.purpose),
        expires_at=created + (int(body.expires_after) if body.expires_after else TTL_S),
        num_tokens=num_tokens,
    )
    await call_store(store.add_file, "the file cannot be stored", file, body.content)
    return http_response.json_response(file_object(file))


def _check_examples(content: bytes, filename: str, unknown: UnknownFields) -> int:
    """Check a file of examples; return the number of its tokens. Raises ServiceError with its first errors."""
    problems, num_lines, num_tokens = check_data(content, filename, unknown)
    if problems:
        raise invalid("file", "has errors:\n" + "\n".join(map(str, problems)), filename)
    if num_lines < MIN_LINES:
        raise invalid("file", f"has {num_lines} lines; give at least {MIN_LINES}", filename)
    return num_tokens


@ROUTES.add("GET", PATH, "List files.", answer=FileList)
async def list_files(context: Context, query: FilesQuery) -> http_response.HandlerResponse:
    """List this key's files."""
    newest_first = query.order == "desc"
    files = get_store(context).files
    page_query = query.purpose, query.after, query.limit + 1, newest_first
    found = await call_store(files, "the files cannot be listed", current_request().owner, *page_query)
    return http_response.json_response(list_page([file_object(file) for file in found], query.limit))


@ROUTES.add(
    "GET",
    _FILE_PATH,
    "Get a file, or its content with `/content` after its id.",
    answer=FileObject,
    errors=(ErrorKind.NOT_FOUND,),
    example=_EXAMPLE,
)
async def get_file(context: Context, query: FileQuery) -> http_response.HandlerResponse:
    """Return a file's metadata, or its content."""
    name: str = query.file_id
    store, file_id = get_store(context), name.removesuffix(_CONTENT)
    file = await call_store(store.file, READ_FAILED, current_request().owner, file_id)
    if file is None:
        raise not_found("file", file_id)
    if not name.endswith(_CONTENT):
        return http_response.json_response(file_object(file))
    if current_request().method == "HEAD":
        return http_response.HttpResponse(b"", content_type=http_response.FILE)
    try:
        content = await asyncio.to_thread(store.content(file.id).open, "rb")
    except FileNotFoundError:
        raise not_found("file", file_id) from None
    except OSError as error:
        raise _disk_error(READ_FAILED, error) from None
    try:
        release = context.stored_files.acquire(current_request().client)
    except ServiceError:
        content.close()
        raise
    return http_response.StreamedResponse(http_response.FileChunks(content, release), http_response.FILE)


@ROUTES.add("DELETE", _FILE_PATH, "Delete a file.", answer=DeletedFile, errors=(ErrorKind.NOT_FOUND,), example=_EXAMPLE)
async def delete_file(context: Context, query: FileQuery) -> http_response.HandlerResponse:
    """Delete a file. A batch that is already reading it continues."""
    name: str = query.file_id
    if not await call_store(
        get_store(context).delete_file, "the file cannot be deleted", current_request().owner, name
    ):
        raise not_found("file", name)
    return http_response.json_response({"id": name, "object": "file", "deleted": True})
