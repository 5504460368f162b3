"""Return values of the library's calls, with vLLM's names. States are among them: immutable, continued by any calls.

A state is built on the engine's sessions. Without references, it is deleted from the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
import weakref
from pathlib import Path

import msgspec

from programs.library.engine_thread import EngineThread
from programs.library.params import LLMError
from routes.context import Context
from routes.response.generate import call_engine
from rwkv_batch.calls import DeleteSessions, ExportSession, ImportSession
from rwkv_batch.request import Finish, SessionTurn, TokenLogprob

_ROOT_DIALOGUE = 0
"""The empty dialogue, which the engine does not store."""
_PREFIX = "library-state-"


def new_name() -> str:
    """Returns a unique session name."""
    return _PREFIX + uuid.uuid4().hex


def is_state(session_id: str) -> bool:
    """Whether a session belongs to a State."""
    return session_id.startswith(_PREFIX)


class State:
    """An immutable state of a model.

    The engine keeps it as long as this object lives. It is a dialogue, which branches at no cost. A state from a file
    is a session, which is copied for every use.
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
        """Returns itself, because a state is immutable."""
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> State:
        return self

    @classmethod
    async def load(cls, engine: EngineThread, path: str | Path) -> State:
        """Loads a file of `save`, or of a service's `/state/export`. The service must have the same model."""
        content = await asyncio.to_thread(Path(path).read_bytes)
        name = new_name()
        await call_engine(engine.context, ImportSession(name, content))
        return cls(engine, name, None)

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file for `load_state` and `/state/import`. Raises LLMError or OSError."""
        Path(path).write_bytes(self._engine.wait(self._content()))

    def delete(self) -> None:
        """Deletes the state. States derived from it stay. Raises LLMError."""
        self._engine.wait(call_engine(self._engine.context, DeleteSessions(self._name)))
        self._finalizer.detach()

    async def fork(self, context: Context) -> State:
        """Returns the state, or a copy for one turn. Raises ServiceError."""
        if context is not self._engine.context:
            raise ValueError("this state belongs to another LLM; save it there and load it here")
        if self._dialogue is not None:
            return self
        copy = State(self._engine, new_name(), None)
        await call_engine(context, ImportSession(copy._session_id, await self._content()))
        return copy

    def turn(self, prompt: list[int]) -> SessionTurn:
        """Returns the turn that reads `prompt` (token ids) after this state. Call it on the result of `fork`."""
        return SessionTurn(session_id=self._session_id, resume_prompt=prompt, branch_from=self._dialogue)

    def after(self, finish: Finish) -> State:
        return self if self._dialogue is None else State(self._engine, self._session_id, finish.dialogue_idx)

    async def _content(self) -> bytes:
        return await call_engine(self._engine.context, ExportSession(self._session_id, self._dialogue))


def root(engine: EngineThread) -> State:
    return State(engine, new_name(), _ROOT_DIALOGUE)


def _delete_in_engine(engine: EngineThread, name: str) -> None:
    """Deletes a state without references. A finaliser calls it on any thread, so it must not block."""
    with contextlib.suppress(LLMError):  # the engine has ended together with its states
        engine.submit_work(call_engine(engine.context, DeleteSessions(name)))


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One answer to a prompt."""

    index: int
    """0 .. n - 1"""
    text: str = ""
    reasoning: str = ""
    """The thought before the answer of a conversation."""
    token_ids: list[int] | None = None
    """Tokens of the text (0: end of text), with `logprobs` only. Otherwise None: the engine returns text."""
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float | None = None
    num_tokens: int = 0
    """Sampled tokens, including the stop token."""
    finish_reason: str | None = None
    """"stop" | "length" | "timeout" | "cancelled" | "error"."""
    error: str | None = None
    """Error message of a failed answer."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """The answers to a prompt."""

    request_id: str
    prompt: str | None
    """None if the prompt was token ids or a conversation."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens restored from a state."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One per prompt token, None for the first one. With `prompt_logprobs` only."""
    state: State | None = None
    """State after prompt and answer, if the call passed a `State`."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """New text of an answer."""

    prompt: int
    """Index of the prompt in the call."""
    index: int
    """Index of the answer, 0 .. n - 1."""
    text: str
    reasoning: str = ""
    finish_reason: str | None = None
    error: str | None = None
    num_tokens: int = 0


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Likelihood of a candidate after its prompt."""

    logprob: float
    """Sum over the tokens, natural logarithm."""
    tokens: int
    is_greedy: bool
    """Whether every token is the most likely one."""
    token_logprobs: list[float] = []
    """With `logprobs` only."""
