"""`/state/export` and `/state/import`: a session as a file that can be carried away and brought back."""

from __future__ import annotations

import threading

from pydantic import ConfigDict, Field

from routes.context import Context
from routes.request.fields import Fields, SessionId
from routes.response.event_stream import ask
from routes.response.reply import FILE, Reply, Stream, json_answer
from routes.response.response_models import Imported
from routes.route import SESSION_ERRORS, Route, Upload
from rwkv_batch.calls import ExportSession, ImportSession
from rwkv_batch.errors import ErrorKind, ServiceError

AT_ONCE = 2
"""Files that an HTTP worker has under way: each is in memory here, on its way and in the engine."""
PIECE_BYTES = 1 << 18
"""Of a file that is handed to Robyn at a time."""


class ExportQuery(Fields):
    """Which session is wanted."""

    model_config = ConfigDict(strict=False, extra="ignore")  # a query is text

    session_id: SessionId = Field(description="The session.")
    dialogue_idx: int | None = Field(None, ge=1, lt=2**63, description="One dialogue of a branching session.")


class ImportQuery(Fields):
    """What the session will be called."""

    session_id: SessionId = Field(description="A name that no session has yet.")


class Place:
    """One of the worker's places for files. Any thread may leave it."""

    _lock = threading.Lock()

    def __init__(self, context: Context) -> None:
        """Raises ServiceError (overloaded) if all are taken."""
        self._context = context
        with self._lock:
            if context.session_files >= AT_ONCE:
                raise ServiceError(
                    ErrorKind.OVERLOADED,
                    f"this HTTP worker has {AT_ONCE} sessions' files under way; try again in a moment",
                    retry_after_s=1.0,
                )
            context.session_files += 1

    def leave(self) -> None:
        """The file is no longer in memory."""
        with self._lock:
            self._context.session_files -= 1


class FileChunks:
    """A file as it is read by its client; its place is taken until then, or until the client has gone."""

    def __init__(self, content: bytes, place: Place) -> None:
        self._content = memoryview(content)
        self._place = place
        self._at = 0
        self.ended = False

    def __iter__(self) -> FileChunks:
        return self

    def __next__(self) -> bytes:
        """The next piece."""
        if self.ended:
            raise StopIteration
        piece = bytes(self._content[self._at : self._at + PIECE_BYTES])
        self._at += len(piece)
        self.ended = self._at >= len(self._content)
        return piece

    def close(self) -> None:
        """See Chunks."""
        self._content.release()
        self._place.leave()


async def export_session(context: Context, upload: Upload) -> Reply:
    """The session as it was after its last durable turn: a safetensors file."""
    query: ExportQuery = upload.query
    place = Place(context)
    try:
        content = await ask(context, ExportSession(query.session_id, query.dialogue_idx))
    except BaseException:
        place.leave()
        raise
    headers = {"Content-Disposition": 'attachment; filename="session.safetensors"'}
    return Stream(FileChunks(content, place), FILE, headers)


async def import_session(context: Context, upload: Upload) -> Reply:
    """Make a session of a file that `/state/export` of a service with the same model has written."""
    query: ImportQuery = upload.query
    place = Place(context)
    try:
        num_tokens = await ask(context, ImportSession(query.session_id, upload.content))
    finally:
        place.leave()
    return json_answer({"status": "success", "session_id": query.session_id, "num_tokens": num_tokens})


_ERRORS = (*SESSION_ERRORS, ErrorKind.OVERLOADED, ErrorKind.DRAINING, ErrorKind.ENGINE_LOST)
ROUTES = (
    Route(
        "GET",
        "/state/export",
        export_session,
        None,
        "Carry a session away as a file.",
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
        "Bring a session back from a file.",
        query=ImportQuery,
        uploads=FILE,
        answer=Imported,
        errors=_ERRORS,
        example={"session_id": "session_brought_back"},
        waits_for_engine=True,
    ),
)
