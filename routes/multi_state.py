"""`POST /multi_state/chat/completions`: conversations that branch. An existing dialogue never changes."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from routes import state
from routes.context import Context
from routes.response.batch_formatter import BatchFormatter
from routes.response.generate import OutputDecoder, RowResult, RowUpdate, run
from routes.response.http_response import HandlerResponse, sse
from routes.response.response_models import BatchChunk, DialogueAnswer, DialogueMade
from routes.route import SESSION_ERRORS, Route
from rwkv_batch.request import Finish

PATH = "/multi_state/chat/completions"


class BranchBody(state.TurnBody):
    """A turn that creates a new dialogue of a session."""

    dialogue_idx: int = Field(0, ge=0, lt=2**31, description="The dialogue to continue. 0 is the empty root.")


class DialogueFormatter(BatchFormatter):
    """The batch format with the number of the new dialogue."""

    def __init__(self, body: BranchBody) -> None:
        super().__init__(body)
        self._session_id = body.session_id
        self._new_dialogue: int | None = None

    def chunk(self, updates: list[RowUpdate]) -> bytes:
        """See ResponseFormatter."""
        for row in updates:
            self._record_dialogue(row.finish)
        return super().chunk(updates)

    def stream_end(self) -> bytes:
        """See ResponseFormatter."""
        end = super().stream_end()
        if self._new_dialogue is None:
            return end
        name = f"{self._session_id}:{self._new_dialogue}"
        return end + sse({"object": "multi_state.dialogue_idx", "session_id": name, "dialogue_idx": self._new_dialogue})

    def full_body(self, rows: list[RowResult]) -> Any:
        """See ResponseFormatter."""
        for row in rows:
            self._record_dialogue(row.finish)
        return {**super().full_body(rows), "session_id": self._session_id, "dialogue_idx": self._new_dialogue}

    def _record_dialogue(self, finish: Finish | None) -> None:
        if finish is not None and finish.error is None:
            self._new_dialogue = finish.dialogue_idx


async def chat_completions(context: Context, body: BranchBody) -> HandlerResponse:
    """Continue a dialogue of a session. Prompt and answer become a new dialogue, whose number is returned."""
    job = await state.turn_job(context, body, PATH, branch_from=body.dialogue_idx)
    return await run(context, job, DialogueFormatter(body), OutputDecoder(1), body.stream)


ROUTES = (
    Route(
        "POST",
        PATH,
        chat_completions,
        BranchBody,
        "Branch off a dialogue of a session.",
        is_generation=True,
        answer=DialogueAnswer,
        events=(BatchChunk, DialogueMade),
        errors=SESSION_ERRORS,
        example={**state.EXAMPLE, "session_id": "story", "dialogue_idx": 0},
    ),
)
