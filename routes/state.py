"""`/state`: conversations with stored state, the list of sessions and their deletion."""

from __future__ import annotations

import time
from typing import Annotated

from pydantic import Field

from routes.context import Context
from routes.request.bodies import DEFAULT_STOPS, Body, SamplingBody, Texts
from routes.request.fields import NO_NUL, SessionId
from routes.request.jobs import as_turn, build_rows, make_job, offload_if_large, row_stops
from routes.response.batch_formatter import BatchFormatter
from routes.response.generate import OutputDecoder, call_engine, run
from routes.response.http_response import HandlerResponse, json_response
from routes.response.response_models import BatchAnswer, BatchChunk, Deleted, SessionList
from routes.route import SESSION_ERRORS, Route
from rwkv_batch.calls import DeleteSessions, ListSessions
from rwkv_batch.errors import ErrorKind
from rwkv_batch.request import Job
from state_pool.session_page import SessionEntry, Tier

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


async def turn_job(context: Context, body: TurnBody, label: str, branch_from: int | None = None) -> Job:
    """Build the job of one turn. Raises ServiceError."""
    prompt, stops = body.contents[0], row_stops(body, DEFAULT_STOPS)
    rows = await offload_if_large(
        len(prompt), build_rows, context.tokenizer, context.config, body, [prompt], stops, "contents"
    )
    rows = await as_turn(
        context, rows, prompt, body.session_id, prompt, "contents[0]", branch_from=branch_from, wait=body.wait
    )
    return make_job(rows, body, label)


async def chat_completions(context: Context, body: TurnBody) -> HandlerResponse:
    """Continue a session with one prompt. Prompt and answer are stored durably when the answer ends."""
    job = await turn_job(context, body, PATH)
    return await run(context, job, BatchFormatter(body), OutputDecoder(1), body.stream)


async def status(context: Context, body: StatusBody) -> HandlerResponse:
    """List the stored sessions, newest first, with their storage tier."""
    page = await call_engine(context, ListSessions(body.limit, body.offset))
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
        "session_id": entry.session_id,
        "cache_level": CACHE_LEVELS[entry.tier],
        "last_updated": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.updated)),
        "timestamp": entry.updated,
    }


async def delete(context: Context, body: DeleteBody) -> HandlerResponse:
    """Delete a session from every tier. A running turn of it ends with an error."""
    name = body.session_id
    count = await call_engine(context, DeleteSessions(name, body.delete_prefix))
    if not count:
        message = f"Session {name} not found"
        return json_response({"status": "not_found", "message": message, "error": message}, 404)
    message = f"Session {name} deleted successfully"
    if body.delete_prefix:
        message = f"Sessions that begin with {name} deleted successfully"
    return json_response({"status": "success", "message": message, "deleted": count})


EXAMPLE = {
    "contents": ["User: What should we eat for dinner?\n\nAssistant: <think>\n</think>\n"],
    "session_id": "session_one",
    "stop_tokens": list(DEFAULT_STOPS),
    "max_tokens": 64,
    "stream": True,
}
ROUTES = (
    Route(
        "POST",
        PATH,
        chat_completions,
        TurnBody,
        "Continue a session with stored state.",
        is_generation=True,
        answer=BatchAnswer,
        events=(BatchChunk,),
        errors=SESSION_ERRORS,
        example=EXAMPLE,
    ),
    Route(
        "POST",
        "/state/status",
        status,
        StatusBody,
        "List the sessions.",
        answer=SessionList,
        errors=(ErrorKind.OVERLOADED, ErrorKind.TIMEOUT, ErrorKind.ENGINE_LOST),
        example={"limit": 10},
        waits_for_engine=True,
    ),
    Route(
        "POST",
        "/state/delete",
        delete,
        DeleteBody,
        "Delete a session.",
        answer=Deleted,
        errors=(ErrorKind.SESSION_NOT_FOUND, ErrorKind.ENGINE_LOST),
        example={"session_id": "your_session_id_to_delete"},
        waits_for_engine=True,
    ),
)
