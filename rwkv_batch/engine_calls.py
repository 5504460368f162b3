"""Answers the engine's calls. Engine thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rwkv_batch import calls
from rwkv_batch.core.error_mapping import as_service_error, describe_error
from rwkv_batch.core.session_transfer import SessionTransfer
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.runner.adapter_library import AdapterLibrary
from rwkv_batch.runner.model_files import ModelChecks
from rwkv_batch.runner.state_library import StateLibrary
from state_pool.errors import PoolError
from state_pool.pool import StatePool
from state_pool.session_key import SessionPage

logger = logging.getLogger(__name__)


class UserFiles:
    """The user's tuned states, adapters and model files. Each kind has a thread that reads files."""

    def __init__(self, states: StateLibrary, adapters: AdapterLibrary, models: ModelChecks) -> None:
        self.states = states
        self.adapters = adapters
        self.models = models

    def close(self) -> None:
        self.states.close()
        self.adapters.close()
        self.models.close()

    def handle(self, call: calls.EngineCall[Any], reply: calls.Reply[Any]) -> None:
        """Answer a call about user files. Some replies come after a file is read."""
        match call:
            case calls.ListStates():
                reply_with(reply, self.states.infos)
            case calls.AddState():
                self.states.add(call, reply)
            case calls.RemoveState(name):
                reply_with(reply, lambda: self.states.remove(name))
            case calls.ListAdapters():
                reply_with(reply, self.adapters.infos)
            case calls.AddAdapter():
                self.adapters.add(call, reply)
            case calls.RemoveAdapter(name):
                reply_with(reply, lambda: self.adapters.remove(name))
            case calls.CheckModel():
                self.models.check(call, reply)
            case _:
                reply(ServiceError(ErrorKind.NOT_FOUND, f"the engine does not answer {type(call).__name__}"))


class EngineCalls:
    """Answers calls. Each reply is called once; some after a copy or a database operation."""

    def __init__(
        self,
        status: Callable[[], dict[str, Any]],
        pool: StatePool,
        cancel_label: Callable[[str, str], int],
        count_by_label: Callable[[str], dict[str, int]],
        sessions: SessionTransfer,
        user_files: UserFiles,
    ) -> None:
        self._status = status
        self._pool = pool
        self._cancel_label = cancel_label
        self._count_by_label = count_by_label
        self._sessions = sessions
        self._user_files = user_files

    def handle(self, call: calls.EngineCall[Any], reply: calls.Reply[Any]) -> None:
        match call:
            case calls.GetStatus():
                reply_with(reply, self._status)
            case calls.ListSessions():
                self._list_sessions(reply, call)
            case calls.FindSession(session_ids):
                self._pool.listing.find_first(session_ids, _answer(reply))
            case calls.DeleteSessions(session_id, delete_prefix):
                self._delete_sessions(reply, session_id, delete_prefix)
            case calls.ExportSession():
                self._sessions.export(self._pool, reply, call)
            case calls.ImportSession(session_id, content):
                self._sessions.import_session(self._pool, reply, session_id, content)
            case calls.CancelJobs(label, client):
                reply_with(reply, lambda: self._cancel_label(label, client))
            case calls.CountJobs(label, client):
                reply_with(reply, lambda: self._count_by_label(client).get(label, 0))
            case _:
                self._user_files.handle(call, reply)

    def _list_sessions(self, reply: calls.Reply[SessionPage], call: calls.ListSessions) -> None:
        """Reply when the pool has read the page."""
        try:
            self._pool.listing.request(_answer(reply, field=None), call.limit, call.offset, call.owner)
        except PoolError as error:
            reply(as_service_error(error, field=None))

    def _delete_sessions(self, reply: calls.Reply[int], session_id: str, delete_prefix: bool) -> None:
        """Reply once the delete is durable."""

        def failed(error: Exception) -> ServiceError:
            if not isinstance(error, PoolError):
                logger.error("deleting a session failed", exc_info=error)
            return as_service_error(error, given=session_id)

        done = _answer(reply, given=session_id)
        calls.reply_on_error(reply, failed, lambda: self._pool.turns.delete(session_id, delete_prefix, done))


def _answer(
    reply: calls.Reply[Any], field: str | None = "session_id", given: str | None = None
) -> Callable[[Any], None]:
    """Return a function that replies with the pool's result, or with its translated error."""
    return lambda found: reply(as_service_error(found, field, given) if isinstance(found, Exception) else found)


def reply_with(reply: Callable[[Any], None], action: Callable[[], Any]) -> None:
    """Reply with the result of `action`, or with the ServiceError it raises."""
    try:
        value = action()
    except ServiceError as error:
        value = error
    except Exception as error:  # a fault in one command must not end the engine
        logger.exception("a command of the engine failed")
        value = ServiceError(ErrorKind.INTERNAL, f"the engine failed: {describe_error(error)}")
    reply(value)
