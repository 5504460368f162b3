"""States as values: what has been read so far, to go on from any number of times. Built on the engine's sessions."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

from library.engine_thread import EngineThread
from routes.context import Context
from routes.response.event_stream import ask
from rwkv_batch.calls import DeleteSessions, ExportSession, ImportSession
from rwkv_batch.request import Finish, SessionTurn

_PREFIX = "library-state-"


def new_name() -> str:
    """Of a session that nobody else has."""
    return _PREFIX + uuid.uuid4().hex


def is_state(session_id: str) -> bool:
    """Whether a session is a state's, and no client's."""
    return session_id.startswith(_PREFIX)


class State:
    """What a model has read: immutable, so that it needs no copy to be gone on from twice. Its engine keeps it.

    It is a dialogue, which branches at no cost, or, come from a file, a session, which is copied for every use.
    """

    def __init__(self, engine: EngineThread, session_id: str, dialogue: int | None) -> None:
        self._engine = engine
        self._session_id = session_id
        self._dialogue = dialogue

    @classmethod
    async def load(cls, engine: EngineThread, path: str | Path) -> State:
        """The state of a file that `save`, or `/state/export` of a service with the same model, has written."""
        content = await asyncio.to_thread(Path(path).read_bytes)
        name = new_name()
        await ask(engine.context, ImportSession(name, content))
        return cls(engine, name, None)

    def save(self, path: str | Path) -> None:
        """Write it as a safetensors file, which `load_state` and `/state/import` take. Raises LLMError, OSError."""
        Path(path).write_bytes(self._engine.wait(self._content()))

    def delete(self) -> None:
        """Forget it; states that went on from it stay. All end with their engine. Raises LLMError."""
        name = self._session_id if self._dialogue is None else f"{self._session_id}:{self._dialogue}"
        self._engine.wait(ask(self._engine.context, DeleteSessions(name)))

    async def turn(self, context: Context, prompt: list[int]) -> SessionTurn:
        """The turn that reads `prompt` (token ids) behind it and leaves it as it was. Raises ServiceError."""
        if context is not self._engine.context:
            raise ValueError("a state belongs to the LLM that made it: save it, and load it into the other one")
        if self._dialogue is not None:
            return SessionTurn(session_id=self._session_id, resume_prompt=prompt, branch_from=self._dialogue)
        copy = new_name()
        await ask(context, ImportSession(copy, await self._content()))
        return SessionTurn(session_id=copy, resume_prompt=prompt)

    def after(self, finish: Finish) -> State:
        """The state that a turn from this one has led to."""
        assert finish.session_id is not None
        return State(self._engine, finish.session_id, finish.dialogue_idx)

    async def _content(self) -> bytes:
        return await ask(self._engine.context, ExportSession(self._session_id, self._dialogue))


def root(engine: EngineThread) -> State:
    """Nothing has been read."""
    return State(engine, new_name(), 0)
