"""States as values: what has been read so far, to go on from any number of times. Built on the engine's sessions.

What nobody has any more is deleted from the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
import weakref
from pathlib import Path

from programs.library.engine_thread import EngineThread
from programs.library.errors import LLMError
from routes.context import Context
from routes.response.event_stream import call_engine
from rwkv_batch.calls import DeleteSessions, ExportSession, ImportSession
from rwkv_batch.request import Finish, SessionTurn

_ROOT_DIALOGUE = 0
"""The dialogue in which nothing was read; the engine keeps none."""
_PREFIX = "library-state-"


def new_name() -> str:
    """Of a session that nobody else has."""
    return _PREFIX + uuid.uuid4().hex


def is_state(session_id: str) -> bool:
    """Whether a session is a state's, and no client's."""
    return session_id.startswith(_PREFIX)


class State:
    """What a model has read: immutable, so that it needs no copy to be gone on from twice. Its engine keeps it.

    It is a dialogue, which branches at no cost, or, come from a file, a session, which is copied for every use. The
    engine keeps it for as long as the program has this object.
    """

    def __init__(self, engine: EngineThread, session_id: str, dialogue: int | None) -> None:
        self._engine = engine
        self._session_id = session_id
        self._dialogue = dialogue
        self._name = session_id if dialogue is None else f"{session_id}:{dialogue}"
        self._finalizer = weakref.finalize(self, _delete_in_engine, engine, self._name)
        self._finalizer.atexit = False
        if dialogue == _ROOT_DIALOGUE:
            self._finalizer.detach()

    def __copy__(self) -> State:
        """Itself: nothing changes it."""
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> State:
        return self

    @classmethod
    async def load(cls, engine: EngineThread, path: str | Path) -> State:
        """The state of a file that `save`, or `/state/export` of a service with the same model, has written."""
        content = await asyncio.to_thread(Path(path).read_bytes)
        name = new_name()
        await call_engine(engine.context, ImportSession(name, content))
        return cls(engine, name, None)

    def save(self, path: str | Path) -> None:
        """Write it as a safetensors file, which `load_state` and `/state/import` take. Raises LLMError, OSError."""
        Path(path).write_bytes(self._engine.wait(self._content()))

    def delete(self) -> None:
        """Forget it; states that went on from it stay. All end with their engine. Raises LLMError."""
        self._engine.wait(call_engine(self._engine.context, DeleteSessions(self._name)))
        self._finalizer.detach()

    async def fork(self, context: Context) -> State:
        """Itself, or the copy that one turn uses up. Raises ServiceError."""
        if context is not self._engine.context:
            raise ValueError("a state belongs to the LLM that made it: save it, and load it into the other one")
        if self._dialogue is not None:
            return self
        copy = State(self._engine, new_name(), None)
        await call_engine(context, ImportSession(copy._session_id, await self._content()))
        return copy

    def turn(self, prompt: list[int]) -> SessionTurn:
        """The turn that reads `prompt` (token ids) behind it; of what `fork` gave."""
        return SessionTurn(session_id=self._session_id, resume_prompt=prompt, branch_from=self._dialogue)

    def after(self, finish: Finish) -> State:
        """The state that this turn has led to."""
        return self if self._dialogue is None else State(self._engine, self._session_id, finish.dialogue_idx)

    async def _content(self) -> bytes:
        return await call_engine(self._engine.context, ExportSession(self._session_id, self._dialogue))


def root(engine: EngineThread) -> State:
    """Nothing has been read."""
    return State(engine, new_name(), _ROOT_DIALOGUE)


def _delete_in_engine(engine: EngineThread, name: str) -> None:
    """Nobody has a state any more. Comes on any thread, wherever Python happens to be, so it waits for nothing."""
    with contextlib.suppress(LLMError):  # the engine has ended, and its states with it
        engine.submit_work(call_engine(engine.context, DeleteSessions(name)))
