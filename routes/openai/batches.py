"""`/openai/v1/batches`: requests in a file, answered in the background, in OpenAI's format.

These routes only store and show batches. `programs/serve/batches/` runs them in its own process.
"""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, Field

from routes.context import Context
from routes.file_store import Batch, Status
from routes.openai import files
from routes.request.bodies import Body, Fields
from routes.request.fields import IgnoredValue, Pattern
from routes.request_context import current_request
from routes.response.http_response import OPENAI_ERRORS, HandlerResponse, json_response
from routes.route import Routes
from rwkv_batch.errors import ErrorKind, ServiceError, invalid

PATH = "/openai/v1/batches"
_BATCH_PATH = f"{PATH}/{{batch_id}}"
ROUTES = Routes(error_format=OPENAI_ERRORS, errors=files.STORE_ERRORS)
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/score",
    "/openai/v1/chat/completions",
    "/openai/v1/completions",
    "/openai/v1/responses",
    "/v2/chat/completions",
    "/big_batch/completions",
    "/FIM/v1/batch-FIM",
    "/translate/v1/batch-translate",
)
"""Routes that a batch's lines may call."""
_CANCEL = "/cancel"
_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
_MAX_WINDOW_S = 7 * 86400
_HOUR_S = 3600
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class BatchesBody(Body):
    """A batch to run."""

    input_file_id: str = Field(max_length=80, description="An uploaded file of JSON lines.")
    endpoint: str = Field(max_length=128, description=f"The `url` of every line: {', '.join(ENDPOINTS)}.")
    completion_window: str = Field(
        "24h", max_length=8, description="Time limit in hours or days, like 24h or 7d. At most 7 days."
    )
    metadata: Metadata | None = Field(None, description="Repeated in the batch object.")
    output_expires_after: IgnoredValue = Field(None, description="Accepted and ignored: results are kept for 30 days.")


class BatchQuery(Fields):
    """The batch to return."""

    batch_id: str = Field(min_length=1, max_length=80, description="The batch's id.")


class CancelQuery(Fields):
    """The batch to cancel."""

    batch_id: Annotated[str, Pattern(f"^.+{_CANCEL}$", f"a batch's id, and {_CANCEL}")] = Field(
        min_length=1, max_length=80, description="The batch's id, followed by `/cancel`."
    )


class RequestCounts(BaseModel):
    """Number of lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchObject(BaseModel):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(files.Page[BatchObject]):
    """A page of batches."""


def batch_object(batch: Batch) -> dict[str, Any]:
    others: dict[str, Any] = {
        f"{status}_at": batch.times.get(status) for status in Status if status is not Status.VALIDATING
    }
    others["errors"] = {"object": "list", "data": batch.errors} if batch.errors else None
    others["request_counts"] = msgspec.to_builtins(batch.counts)
    return BatchObject.model_validate(msgspec.to_builtins(batch) | others).model_dump()


def _window_s(text: str) -> int:
    """Return the seconds of a completion window. Raises ServiceError."""
    found = _WINDOW.fullmatch(text)
    seconds = 0 if found is None else int(found[1]) * (_HOUR_S if found[2] == "h" else 24 * _HOUR_S)
    if not 0 < seconds <= _MAX_WINDOW_S:
        raise invalid("completion_window", f"must be hours or days up to 7d, like 24h, got {text!r}", text)
    return seconds


def new_batch(
    batch_id: str, endpoint: str, file_id: str, window_s: int, metadata: dict[str, str] | None = None
) -> Batch:
    """Return a batch of the current request's client."""
    request_context, created = current_request(), int(time.time())
    return Batch(
        id=batch_id,
        owner=request_context.owner,
        client=request_context.client,
        key=request_context.client if request_context.key_digest else "",
        limits=None if request_context.limits is None else msgspec.to_builtins(request_context.limits),
        endpoint=endpoint,
        input_file_id=file_id,
        completion_window=f"{window_s // _HOUR_S}h",
        created_at=created,
        expires_at=created + window_s,
        metadata=metadata,
    )


@ROUTES.add(
    "POST",
    PATH,
    "Create a batch from a file of requests.",
    answer=BatchObject,
    example={"input_file_id": "file-019eae3d7d1a", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
)
async def create_batch(context: Context, body: BatchesBody) -> HandlerResponse:
    """Create a batch that answers the lines of a file. Its rows have batch priority."""
    store, request_context = files.get_store(context), current_request()
    if body.endpoint not in ENDPOINTS:
        raise invalid("endpoint", f"must be one of {', '.join(ENDPOINTS)}, got {body.endpoint!r}", body.endpoint)
    window_s = _window_s(body.completion_window)
    if await files.call_store(store.file, files.READ_FAILED, request_context.owner, body.input_file_id) is None:
        raise invalid(
            "input_file_id",
            f"no such file: {body.input_file_id!r}; upload it to /openai/v1/files first",
            body.input_file_id,
        )
    batch = new_batch(files.new_id("batch_"), body.endpoint, body.input_file_id, window_s, body.metadata)
    batch = msgspec.structs.replace(batch, completion_window=body.completion_window)
    await files.call_store(store.add_batch, "the batch cannot be created", batch)
    return json_response(batch_object(batch))


@ROUTES.add("GET", PATH, "List batches.", answer=BatchList)
async def list_batches(context: Context, query: files.ListQuery) -> HandlerResponse:
    """List this key's batches, newest first."""
    page_query = query.after, query.limit + 1
    found = await files.call_store(
        files.get_store(context).batches, "the batches cannot be listed", current_request().owner, *page_query
    )
    return json_response(files.list_page([batch_object(batch) for batch in found], query.limit))


async def _batch(context: Context, name: str) -> Batch:
    """Return a batch of this key. Raises ServiceError."""
    batch = await files.call_store(
        files.get_store(context).batch, "the batch cannot be read", current_request().owner, name
    )
    if batch is None:
        raise files.not_found("batch", name)
    return batch


@ROUTES.add(
    "GET",
    _BATCH_PATH,
    "Get a batch.",
    answer=BatchObject,
    errors=(ErrorKind.NOT_FOUND,),
    example={"batch_id": "batch_019eae3d7d1a"},
)
async def get_batch(context: Context, query: BatchQuery) -> HandlerResponse:
    """Return a batch."""
    return json_response(batch_object(await _batch(context, query.batch_id)))


@ROUTES.add(
    "POST",
    _BATCH_PATH,
    "Cancel a batch: its id, followed by `/cancel`.",
    answer=BatchObject,
    errors=(ErrorKind.NOT_FOUND,),
    example={"batch_id": "batch_019eae3d7d1a/cancel"},
)
async def cancel_batch(context: Context, query: CancelQuery) -> HandlerResponse:
    """Cancel a batch. Finished answers are kept."""
    name: str = query.batch_id.removesuffix(_CANCEL)
    await _batch(context, name)

    def cancelled(batch: Batch) -> Batch:
        if batch.status not in (Status.VALIDATING, Status.IN_PROGRESS):
            return batch
        return batch.with_status(Status.CANCELLING, int(time.time()))

    batch = await files.call_store(files.get_store(context).update, "the batch cannot be cancelled", name, cancelled)
    if batch.status in (Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.FINALIZING):
        message = f"the batch {name} is {batch.status} and cannot be cancelled"
        raise ServiceError(ErrorKind.INVALID_FIELD, message, field="batch_id", given=name)
    return json_response(batch_object(batch))
