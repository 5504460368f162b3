"""What may be asked of the engine beside generating: one struct for each call, with the type of its answer.

A new call is a struct here, a name in `AnyCall`, and a case in `Engine.call`. Plain data: it crosses the socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, get_args

import msgspec

from rwkv_batch.decode_defaults import DecodeDefaults
from rwkv_batch.errors import ServiceError
from rwkv_batch.request import Usage
from state_pool.session_page import SessionPage

Answer = TypeVar("Answer")
Reply = Callable[[Answer | ServiceError], None]
"""Receives a call's answer, or why there is none, on a thread of the engine's own; returns at once, does not raise."""
Stats = dict[str, Any]
"""Names and numbers, nested; which ones there are depends on the model and the devices."""


def reply_on_error(reply: Reply[Any], as_error: Callable[[Exception], ServiceError], work: Callable[[], None]) -> None:
    """Do what answers when it is done; if it fails, that is the answer, and the thread goes on."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - whatever it was, somebody waits for an answer
        reply(as_error(error))


class EngineCall(msgspec.Struct, Generic[Answer], frozen=True, array_like=True):
    """A question to the engine; the type parameter is the answer's."""

    @classmethod
    def answer_type(cls) -> type[Answer]:
        """The type of the answer."""
        answer: type[Answer] = get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]  # typing.Generic's
        return answer


class GetStatus(EngineCall[Stats], tag="status", frozen=True, array_like=True):
    """Figures of model, devices, rows, pool and processes; "jobs" counts those that run or wait by their label."""


class GetMetrics(EngineCall[str], tag="metrics", frozen=True, array_like=True):
    """The figures of all processes in Prometheus' text form. Answered by the engine's process."""


class ListSessions(EngineCall[SessionPage], tag="session_status", frozen=True, array_like=True):
    """A page of the stored sessions, newest first."""

    limit: int
    offset: int


class DeleteSessions(EngineCall[int], tag="session_delete", frozen=True, array_like=True):
    """Delete a session, or all whose names begin so; answers how many, once a crash cannot undo it."""

    session_id: str
    delete_prefix: bool = False


class ExportSession(EngineCall[bytes], tag="session_export", frozen=True, array_like=True):
    """A session as the bytes of a file."""

    session_id: str
    dialogue: int | None = None
    """None: the plain session."""
    include_file: bool = True
    """Whether the file is made; if not, the answer is empty, or why there would be none."""


class ImportSession(EngineCall[int], tag="session_import", frozen=True, array_like=True):
    """Make a session of a file; answers the number of tokens that it stands for, once it is durable."""

    session_id: str
    content: bytes


class StateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A tuned state that is loaded, or kept and of no use."""

    name: str
    digest: str = ""
    """Of its numbers."""
    file: str = ""
    """What it was read from."""
    orientation: str = ""
    """How the file had its matrices: "value_key" or "key_value" (transposed)."""
    orientation_reason: str = ""
    created: int = 0
    """Unix time in seconds at which it was loaded."""
    bytes: int = 0
    """Of the state, in memory."""
    is_kept: bool = False
    """Whether it is there again after a restart of the service without being named."""
    in_slot: bool = False
    mixture: list[tuple[str, float]] = []
    """Where it is a mixture under a name: its members and their weights."""
    defaults: DecodeDefaults = DecodeDefaults()
    """Of requests that name it."""
    error: str = ""
    """Why a kept state cannot be used."""


class ListStates(EngineCall[list[StateInfo]], tag="state_list", frozen=True, array_like=True):
    """The tuned states, in the order in which they were loaded."""


class AddState(EngineCall[StateInfo], tag="state_add", frozen=True, array_like=True):
    """Load a tuned state; it is there for the jobs that come after the answer."""

    name: str
    file: str = ""
    """Path within `--models-dir`; "": `content` is the file."""
    content: bytes = b""
    mixture: tuple[tuple[str, float], ...] = ()
    """Names of states with weights: this is the name of a mixture of them, and there is no file."""
    orientation: str = "auto"
    """"auto" | "value_key" | "key_value"."""
    defaults: DecodeDefaults = DecodeDefaults()
    """Of requests that name it."""
    replace: bool = False
    """A mixture may take the place of the mixture that has the name."""


class RemoveState(EngineCall[StateInfo], tag="state_remove", frozen=True, array_like=True):
    """Forget a tuned state; rows that were admitted before still begin from it. Answers what it was."""

    name: str


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that rows may name, or one that was loaded before and is of no use."""

    name: str
    digest: str = ""
    """Of its numbers and its scale."""
    file: str = ""
    """What it was read from."""
    scale: float | None = None
    """As it was given; None: the file says it."""
    rank: int = 0
    """The largest of its pairs."""
    created: int = 0
    """Unix time in seconds at which it was loaded."""
    bytes: int = 0
    """In the devices' memory."""
    is_kept: bool = False
    """Whether it is loaded again after a restart of the service without being named."""
    error: str = ""
    """Why one that was loaded before cannot be used."""


class ListAdapters(EngineCall[list[AdapterInfo]], tag="adapter_list", frozen=True, array_like=True):
    """The adapters that rows may name, in the order in which they were loaded."""


class AddAdapter(EngineCall[AdapterInfo], tag="adapter_add", frozen=True, array_like=True):
    """Load an adapter beside the weights; it is there for the jobs that come after the answer."""

    name: str
    file: str
    """Path within `--models-dir`."""
    scale: float | None = None
    """None: the file says it."""


class RemoveAdapter(EngineCall[AdapterInfo], tag="adapter_remove", frozen=True, array_like=True):
    """Forget an adapter; rows that were admitted before keep it to their end. Answers what it was."""

    name: str


class CheckModel(EngineCall[str], tag="model_check", frozen=True, array_like=True):
    """Whether a model could be loaded from a file: opened and compared with its adapters, computed nothing.

    Answers what it is, in words; of what is wrong the field is "file" or "adapters".
    """

    file: str
    """Absolute path of the weights."""
    adapters: tuple[str, ...] = ()
    """As --adapter."""


class CancelJobs(EngineCall[int], tag="cancel_label", frozen=True, array_like=True):
    """Cancel every job that has this label, of one client or of all (""); answers how many there were."""

    label: str
    client: str = ""


class CountJobs(EngineCall[int], tag="count_label", frozen=True, array_like=True):
    """How many jobs with this label run or wait."""

    label: str


class AcquireQuota(EngineCall[bool], tag="enter_client", frozen=True, array_like=True):
    """Hold a job, which another engine runs, to its client's limits; fails as `submit` does if it may not come in.

    What it uses is told by `wire.UsageReport`. Answered by the engine's process.
    """

    usage: Usage


AnyCall = (
    GetStatus
    | GetMetrics
    | ListSessions
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
