"""Conversations with stored state: turns, branches, the list of sessions, deletion, export and import.

A branch never changes an existing dialogue.
"""

from __future__ import annotations

import io
import time
from typing import Annotated, Any

from pydantic import Field

from routes.context import Context
from routes.request.bodies import DEFAULT_STOPS, Body, SamplingBody, Texts
from routes.request.fields import NO_NUL, Fields, SessionId, TextFields
from routes.request.jobs import as_turn, make_job, make_rows, row_stops
from routes.request_context import current_request, own_id, reachable_ids
from routes.response import response_models
from routes.response.batch_formatter import BatchFormatter
from routes.response.event_stream import DecodedRow, OutputDecoder
from routes.response.generate import call_engine, run
from routes.response.http_response import (
    FILE,
    FileChunks,
    HandlerResponse,
    HttpResponse,
    StreamedResponse,
    json_response,
    sse,
)
from routes.route import SESSION_ERRORS, Routes, Upload
from rwkv_batch.calls import DeleteSessions, ExportSession, ImportSession, ListSessions
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.request import Finish
from state_pool.session_key import SessionEntry, Tier, owner_of

TURN_EXAMPLE = {
    "contents": ["User: What should we eat for dinner?\n\nAssistant: <think>\n</think>\n"],
    "session_id": "session_one",
    "stop_tokens": list(DEFAULT_STOPS),
    "max_tokens": 64,
    "stream": True,
}
_FILE_ERRORS = (*SESSION_ERRORS, ErrorKind.OVERLOADED, ErrorKind.DRAINING, ErrorKind.ENGINE_LOST)
ROUTES = Routes(waits_for_engine=True)

PATH = "/state/chat/completions"
CACHE_LEVELS = {Tier.SLOT: "L1 (VRAM)", Tier.HOST: "L2 (RAM)", Tier.DISK: "Database (Disk)"}
"""Names of the storage tiers in lists."""


class TurnBody(SamplingBody):
    """One turn of a session."""

    contents: Texts = Field(
        min_length=1,
        max_length=1,
        description="Exactly one prompt, used unchanged. For an existing session, a blank line is added "
        "unless the prompt begins with one.",
    )
    session_id: SessionId = Field(description="Any text. An unknown id starts a session.")
    wait: bool = Field(True, description="Wait for a running turn of the session. false: answer 409 instead.")

    @property
    def branch_from(self) -> int | None:
        """Number of the dialogue to branch from. None if the turn makes no new dialogue."""
        return None


class StatusBody(Body):
    """The part of the list to return."""

    limit: int = Field(100, ge=0, le=10_000, description="Number of sessions to return.")
    offset: int = Field(0, ge=0, lt=2**53, description="Number of sessions to skip, newest first.")


class DeleteBody(Body):
    """The session to delete."""

    session_id: Annotated[str, NO_NUL] = Field(
        min_length=1, max_length=1024, description="The session, or one dialogue with its listed name."
    )
    delete_prefix: bool = Field(False, description="Delete every session whose id begins with `session_id`.")


async def _respond(context: Context, body: TurnBody, label: str, formatter: BatchFormatter) -> HandlerResponse:
    """Run one turn. Raises ServiceError."""
    prompt, stops = body.contents[0], row_stops(body, DEFAULT_STOPS)
    rows = await make_rows(context, body, [prompt], stops, "contents")
    rows = await as_turn(
        context, rows, prompt, body.session_id, prompt, "contents[0]", branch_from=body.branch_from, wait=body.wait
    )
    return await run(context, make_job(rows, body, label), formatter, OutputDecoder(1), body.stream)


@ROUTES.add(
    "POST",
    PATH,
    "Continue a session with stored state.",
    is_generation=True,
    answer=response_models.BatchAnswer,
    events=(response_models.BatchChunk,),
    errors=SESSION_ERRORS,
    example=TURN_EXAMPLE,
)
async def continue_session(context: Context, body: TurnBody) -> HandlerResponse:
    """Continue a session with one prompt. Prompt and answer are stored durably when the answer ends."""
    return await _respond(context, body, PATH, BatchFormatter(body))


@ROUTES.add(
    "POST",
    "/state/status",
    "List the sessions.",
    answer=response_models.SessionList,
    errors=(ErrorKind.OVERLOADED, ErrorKind.TIMEOUT, ErrorKind.ENGINE_LOST),
    example={"limit": 10},
)
async def status(context: Context, body: StatusBody) -> HandlerResponse:
    """List the stored sessions, newest first, with their storage tier."""
    page = await call_engine(context, ListSessions(body.limit, body.offset, current_request().owner))
    counts = {
        "total_sessions": page.total,
        "l1_cache_count": page.in_slots,
        "l2_cache_count": page.in_host_memory,
        "database_count": page.on_disk,
        "sessions": [_session_entry(entry) for entry in page.sessions],
    }
    return json_response({"status": "success", **counts})


def _session_entry(entry: SessionEntry) -> dict[str, object]:
    return {
        "session_id": entry.session_id.removeprefix(own_id("")),
        "dialogue_idx": entry.dialogue,
        "owner": owner_of(entry.session_id) or None,
        "cache_level": CACHE_LEVELS[entry.tier],
        "last_updated": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.updated)),
        "timestamp": entry.updated,
    }


@ROUTES.add(
    "POST",
    "/state/delete",
    "Delete a session.",
    answer=response_models.Deleted,
    errors=(ErrorKind.SESSION_NOT_FOUND, ErrorKind.ENGINE_LOST),
    example={"session_id": "your_session_id_to_delete"},
)
async def delete(context: Context, body: DeleteBody) -> HandlerResponse:
    """Delete a session from every tier. A running turn of it ends with an error."""
    name, count = body.session_id, 0
    for stored_id in reachable_ids(name):
        if not count or body.delete_prefix:
            count += await call_engine(context, DeleteSessions(stored_id, body.delete_prefix))
    if not count:
        message = f"Session {name} not found"
        return json_response({"status": "not_found", "message": message, "error": message}, 404)
    message = f"Session {name} deleted successfully"
    if body.delete_prefix:
        message = f"Sessions that begin with {name} deleted successfully"
    return json_response({"status": "success", "message": message, "deleted": count})


BRANCH_PATH = "/multi_state/chat/completions"


class BranchBody(TurnBody):
    """A turn that creates a new dialogue of a session."""

    dialogue_idx: int = Field(0, ge=0, lt=2**31, description="The dialogue to continue. 0 is the empty root.")

    @property
    def branch_from(self) -> int:
        return self.dialogue_idx


class DialogueFormatter(BatchFormatter):
    """The batch format with the number of the new dialogue."""

    def __init__(self, body: BranchBody) -> None:
        super().__init__(body)
        self._session_id = body.session_id
        self._new_dialogue: int | None = None

    def chunk(self, updates: list[DecodedRow]) -> bytes:
        for row in updates:
            self._record_dialogue(row.finish)
        return super().chunk(updates)

    def stream_end(self) -> bytes:
        end = super().stream_end()
        if self._new_dialogue is None:
            return end
        name = f"{self._session_id}:{self._new_dialogue}"
        return end + sse({"object": "multi_state.dialogue_idx", "session_id": name, "dialogue_idx": self._new_dialogue})

    def full_body(self, rows: list[DecodedRow]) -> Any:
        for row in rows:
            self._record_dialogue(row.finish)
        return {**super().full_body(rows), "session_id": self._session_id, "dialogue_idx": self._new_dialogue}

    def _record_dialogue(self, finish: Finish | None) -> None:
        if finish is not None and finish.error is None:
            self._new_dialogue = finish.dialogue_idx


@ROUTES.add(
    "POST",
    BRANCH_PATH,
    "Branch off a dialogue of a session.",
    is_generation=True,
    answer=response_models.DialogueAnswer,
    events=(response_models.BatchChunk, response_models.DialogueMade),
    errors=SESSION_ERRORS,
    example={**TURN_EXAMPLE, "session_id": "story", "dialogue_idx": 0},
)
async def branch(context: Context, body: BranchBody) -> HandlerResponse:
    """Continue a dialogue of a session. Prompt and answer become a new dialogue, whose number is returned."""
    return await _respond(context, body, BRANCH_PATH, DialogueFormatter(body))


class ExportQuery(TextFields):
    """The session to export."""

    session_id: SessionId = Field(description="The session.")
    dialogue_idx: int | None = Field(None, ge=1, lt=2**63, description="One dialogue of a branching session.")


class ImportQuery(Fields):
    """Name of the imported session."""

    session_id: SessionId = Field(description="A name that no session has.")


@ROUTES.add(
    "GET",
    "/state/export",
    "Export a session as a file.",
    errors=_FILE_ERRORS,
    content_type=FILE,
    example={"session_id": "session_one"},
)
async def export_session(context: Context, query: ExportQuery) -> HandlerResponse:
    """Export a session as a safetensors file.

    The file has the turns that are stored durably. HEAD creates no file.
    """
    client, headers = current_request().client, {"Content-Disposition": 'attachment; filename="session.safetensors"'}
    if current_request().method == "HEAD":
        with context.session_files.place(client):
            await _export(context, query, include_file=False)
        return HttpResponse(b"", content_type=FILE, headers=headers)
    release = context.session_files.acquire(client)
    try:
        content = await _export(context, query, include_file=True)
    except BaseException:
        release()
        raise
    return StreamedResponse(FileChunks(io.BytesIO(content), release), FILE, headers)


async def _export(context: Context, query: ExportQuery, include_file: bool) -> bytes:
    """Return the file of the client's own session. Falls back to the shared session. Raises ServiceError."""
    own, *shared = reachable_ids(query.session_id)
    try:
        return await call_engine(context, ExportSession(own, query.dialogue_idx, include_file))
    except ServiceError as error:
        if not shared or error.info.kind is not ErrorKind.SESSION_NOT_FOUND:
            raise
    return await call_engine(context, ExportSession(shared[0], query.dialogue_idx, include_file))


@ROUTES.add(
    "POST",
    "/state/import",
    "Import a session from a file.",
    uploads=FILE,
    answer=response_models.Imported,
    errors=_FILE_ERRORS,
    example={"session_id": "session_brought_back"},
)
async def import_session(context: Context, upload: Upload[ImportQuery]) -> HandlerResponse:
    """Create a session from a file of `/state/export`. The exporting service must have the same model."""
    query: ImportQuery = upload.query
    with context.session_files.place(current_request().client):
        num_tokens = await call_engine(context, ImportSession(own_id(query.session_id), upload.content))
    return json_response({"status": "success", "session_id": query.session_id, "num_tokens": num_tokens})
