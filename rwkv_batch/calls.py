"""Calls to the engine other than generation: one struct per call, with the type of its answer.

To add a call: a struct here, a name in `AnyCall`, and a case in `engine_calls`. Plain data that crosses the socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, get_args

import msgspec

from rwkv_batch.errors import ServiceError
from rwkv_batch.request import Usage
from state_pool.session_key import SessionPage


class DecodeDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Defaults by the requests' field names. None: the route's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    alpha_presence: float | None = None
    alpha_frequency: float | None = None
    alpha_decay: float | None = None
    max_tokens: int | None = None
    stop_tokens: tuple[int | str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    """in addition to the others"""
    filters: dict[str, float] = {}
    """numbers of `sampling.params.Filters`"""
    template: dict[str, str] | None = None
    """words for system, user and assistant, and the start of an answer"""

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are set, as JSON values."""
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return {**values.pop("filters", {}), **values}


Answer = TypeVar("Answer")
Reply = Callable[[Answer | ServiceError], None]
"""Receives a call's answer or its error, on one of the engine's threads. Must not block or raise."""
Stats = dict[str, Any]
"""Names and numbers, nested. The keys depend on the model and the devices."""


def reply_on_error(
    reply: Reply[Any], as_error: Callable[[Exception], ServiceError], work: Callable[[], object]
) -> None:
    """Run `work`, which replies later. If it raises, reply with the translated error."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the caller waits for a reply in any case
        reply(as_error(error))


class EngineCall(msgspec.Struct, Generic[Answer], frozen=True, array_like=True):
    """A call to the engine. The type parameter is the answer's type."""

    @classmethod
    def answer_type(cls) -> type[Answer]:
        answer: type[Answer] = get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]  # typing.Generic's
        return answer


class GetStatus(EngineCall[Stats], tag="status", frozen=True, array_like=True):
    """Requests the engine's status. "jobs" counts jobs by label."""


class GetMetrics(EngineCall[str], tag="metrics", frozen=True, array_like=True):
    """The metrics of all processes in Prometheus' text format. Answered by the engine's process."""


class ListRequests(EngineCall[list[Stats]], tag="requests", frozen=True, array_like=True):
    """The access log's fields of the last requests, newest first. Answered by the engine's process."""


class ListSessions(EngineCall[SessionPage], tag="session_status", frozen=True, array_like=True):
    """Requests a page of sessions, newest first."""

    limit: int
    offset: int
    owner: str = ""
    """list this owner's sessions and shared ones; "": all"""


class FindSession(EngineCall[str | None], tag="session_find", frozen=True, array_like=True):
    """The first of these ids that a session has; None if there is none."""

    session_ids: tuple[str, ...]


class DeleteSessions(EngineCall[int], tag="session_delete", frozen=True, array_like=True):
    """Deletes one session, or all whose names have this prefix. Answers their number, once it is durable."""

    session_id: str
    delete_prefix: bool = False


class ExportSession(EngineCall[bytes], tag="session_export", frozen=True, array_like=True):
    session_id: str
    dialogue: int | None = None
    """None: the session without branches"""
    include_file: bool = True
    """False: check only whether the session can be exported; the answer is empty"""


class ImportSession(EngineCall[int], tag="session_import", frozen=True, array_like=True):
    """Create a session from a file. Answers its number of tokens, once it is durable."""

    session_id: str
    content: bytes


class LoadedFile(msgspec.Struct, frozen=True, kw_only=True):
    """What tuned states and adapters have in common. It is loaded, or failed to reload."""

    name: str
    digest: str = ""
    """of its numbers, and of an adapter's scale"""
    file: str = ""
    created: int = 0
    """Unix time in seconds, when loaded"""
    bytes: int = 0
    """in memory"""
    is_kept: bool = False
    """whether a restart of the service loads it again"""
    error: str = ""
    """why a kept one cannot be used"""


class StateInfo(LoadedFile, frozen=True, kw_only=True):
    """A tuned state."""

    orientation: str = ""
    """matrix layout of the file: "value_key" or "key_value" (transposed)"""
    orientation_reason: str = ""
    in_slot: bool = False
    mixture: list[tuple[str, float]] = []
    """for a named mixture: its members and their weights"""
    defaults: DecodeDefaults = DecodeDefaults()
    """of requests that name it"""


class ListStates(EngineCall[list[StateInfo]], tag="state_list", frozen=True, array_like=True):
    """Lists the tuned states in the order in which they were loaded."""


class AddState(EngineCall[StateInfo], tag="state_add", frozen=True, array_like=True):
    """Load a tuned state. Jobs submitted after the answer can use it."""

    name: str
    file: str = ""
    """path within the models folder; "": `content` is the file"""
    content: bytes = b""
    mixture: tuple[tuple[str, float], ...] = ()
    """names of states with weights, for a named mixture without a file"""
    orientation: str = "auto"
    """"auto" | "value_key" | "key_value"."""
    defaults: DecodeDefaults = DecodeDefaults()
    """of requests that name it"""
    replace: bool = False
    """whether a mixture may replace another mixture of the same name"""


class RemoveState(EngineCall[StateInfo], tag="state_remove", frozen=True, array_like=True):
    """Removes a tuned state. Admitted rows still start from it. Answers the removed state."""

    name: str


class AdapterInfo(LoadedFile, frozen=True, kw_only=True):
    """An adapter that rows may name."""

    scale: float | None = None
    """as configured; None: from the file"""
    rank: int = 0
    """the largest rank of its pairs"""


class ListAdapters(EngineCall[list[AdapterInfo]], tag="adapter_list", frozen=True, array_like=True):
    """Lists the adapters in the order in which they were loaded."""


class AddAdapter(EngineCall[AdapterInfo], tag="adapter_add", frozen=True, array_like=True):
    """Load an adapter. Jobs submitted after the answer can use it."""

    name: str
    file: str
    """within the models folder"""
    scale: float | None = None
    """None: from the file"""
    is_own: bool = False
    """whether `file` is an absolute path of the service's own; no request's"""


class RemoveAdapter(EngineCall[AdapterInfo], tag="adapter_remove", frozen=True, array_like=True):
    """Removes an adapter. Admitted rows keep it to their end. Answers the removed adapter."""

    name: str


class CheckModel(EngineCall[str], tag="model_check", frozen=True, array_like=True):
    """Check whether a model can be loaded from a file: opens it and compares it with its adapters.

    Answers a description of the model. An error's field is "file" or "adapters".
    """

    file: str
    """absolute"""
    adapters: tuple[str, ...] = ()


class CancelJobs(EngineCall[int], tag="cancel_label", frozen=True, array_like=True):
    """Cancel all jobs with a label. Answers their number. The jobs are those of one client or of all ("")."""

    label: str
    client: str = ""


class CountJobs(EngineCall[int], tag="count_label", frozen=True, array_like=True):
    """Jobs that run or wait, of one client or of all ("")."""

    label: str
    client: str = ""


class AcquireQuota(EngineCall[bool], tag="enter_client", frozen=True, array_like=True):
    """Count a job of any engine against its client's limits. Fails like `submit` if a limit is reached.

    A repetition counts once. `wire.UsageReport` reports its usage later. Answered by the engine's process.
    False: not all HTTP workers have restored the ledger after a loss. Send it again later.
    """

    usage: Usage


AnyCall = (
    GetStatus
    | GetMetrics
    | ListRequests
    | ListSessions
    | FindSession
    | DeleteSessions
    | ExportSession
    | ImportSession
    | ListStates
    | AddState
    | RemoveState
    | ListAdapters
    | AddAdapter
    | RemoveAdapter
    | CheckModel
    | CancelJobs
    | CountJobs
    | AcquireQuota
)
