"""`/state/export` and `/state/import`: sessions as files."""

from __future__ import annotations

import io

from pydantic import ConfigDict, Field

from routes.context import Context
from routes.request.fields import Fields, SessionId
from routes.request_context import current_request
from routes.response.generate import call_engine
from routes.response.http_response import (
    FILE,
    FileChunks,
    HandlerResponse,
    HttpResponse,
    StreamedResponse,
    json_response,
)
from routes.response.response_models import Imported
from routes.route import SESSION_ERRORS, Route, Upload
from rwkv_batch.calls import ExportSession, ImportSession
from rwkv_batch.errors import ErrorKind


class ExportQuery(Fields):
    """The session to export."""

    model_config = ConfigDict(strict=False, extra="ignore")  # a query is text

    session_id: SessionId = Field(description="The session.")
    dialogue_idx: int | None = Field(None, ge=1, lt=2**63, description="One dialogue of a branching session.")


class ImportQuery(Fields):
    """Name of the imported session."""

    session_id: SessionId = Field(description="A name that no session has.")


async def export_session(context: Context, upload: Upload) -> HandlerResponse:
    """Export a session as a safetensors file, with the turns that are stored durably. HEAD creates no file."""
    query: ExportQuery = upload.query
    include_file = current_request().method != "HEAD"
    release = context.session_files.acquire(current_request().client)
    try:
        content = await call_engine(context, ExportSession(query.session_id, query.dialogue_idx, include_file))
    except BaseException:
        release()
        raise
    headers = {"Content-Disposition": 'attachment; filename="session.safetensors"'}
    if not include_file:
        release()
        return HttpResponse(b"", content_type=FILE, headers=headers)
    return StreamedResponse(FileChunks(io.BytesIO(content), release), FILE, headers)


async def import_session(context: Context, upload: Upload) -> HandlerResponse:
    """Create a session from a file of `/state/export`. The exporting service must have the same model."""
    query: ImportQuery = upload.query
    release = context.session_files.acquire(current_request().client)
    try:
        num_tokens = await call_engine(context, ImportSession(query.session_id, upload.content))
    finally:
        release()
    return json_response({"status": "success", "session_id": query.session_id, "num_tokens": num_tokens})


_ERRORS = (*SESSION_ERRORS, ErrorKind.OVERLOADED, ErrorKind.DRAINING, ErrorKind.ENGINE_LOST)
ROUTES = (
    Route(
        "GET",
        "/state/export",
        export_session,
        None,
        "Export a session as a file.",
        query=ExportQuery,
        errors=_ERRORS,
        content_type=FILE,
        example={"session_id": "session_one"},
        waits_for_engine=True,
    ),
    Route(
        "POST",
        "/state/import",
        import_session,
        None,
        "Import a session from a file.",
        query=ImportQuery,
        uploads=FILE,
        answer=Imported,
        errors=_ERRORS,
        example={"session_id": "session_brought_back"},
        waits_for_engine=True,
    ),
)
