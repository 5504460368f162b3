"""Sends a call to the engines that can answer it.

Merges their answers: /status gets an entry per engine, /metrics an engine label.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec

from rwkv_batch import calls
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.fleet.in_flight_job import ENGINE_GONE
from rwkv_batch.fleet.member import Member
from rwkv_batch.ipc.served_model import ModelStatus
from state_pool.session_key import SessionEntry, SessionPage

_SUMMED = (
    "running_rows",
    "waiting_rows",
    "waiting_interactive_rows",
    "paused_rows",
    "free_slots",
    "max_running",
    "steps",
    "queued_prompt_tokens",
    "generated_tokens",
    "computed_tokens",
    "generated_tokens_per_s",
    "computed_tokens_per_s",
    "drawn_tokens",
    "read_tokens",
    "drawn_tokens_per_s",
    "read_tokens_per_s",
)
_LARGEST = ("prompt_backlog_s",)
_OF_THE_SERVICE = ("rwkv_http_", "rwkv_client_")
"""Prefixes of metrics that belong to the service. Any engine may count them."""


def merged_status(answers: list[tuple[Member, dict[str, Any]]], all_members: list[Member]) -> dict[str, Any]:
    """Return one status for all engines.

    The result has the first engine's status with summed counters, and an entry per engine.
    """
    merged = dict(answers[0][1])
    info = {member.name: stats for member, stats in answers}
    if len(answers) > 1:
        for name in _SUMMED:
            if name in merged:
                merged[name] = round(sum(stats.get(name, 0) for _, stats in answers), 1)
        for name in _LARGEST:
            merged[name] = max(stats.get(name, 0.0) for _, stats in answers)
        labels = {label for _, stats in answers for label in stats.get("jobs", {})}
        merged["jobs"] = {label: sum(stats["jobs"].get(label, 0) for _, stats in answers) for label in labels}
        merged["draining"] = all(stats.get("draining") for _, stats in answers)
    merged["engines"] = [_engine_status(member, info.get(member.name)) for member in all_members]
    return merged


def _engine_status(member: Member, stats: dict[str, Any] | None) -> dict[str, Any]:
    """Return one engine's entry in the status.

    stats: None if the engine does not answer
    """
    report = member.report
    status: dict[str, Any] = {
        "engine": member.name,
        "status": "ready" if member.is_available else "lost" if member.info.status == "ready" else member.info.status,
        "pid": member.info.pid,
        "node": member.info.node,
        "error": member.info.error,
        "rows": report.rows,
        "queued_prompt_tokens": report.prompt_tokens,
        "devices": [],
        "sessions": 0,
    }
    if stats is not None:
        status["devices"] = stats.get("devices", [])
        status["sessions"] = stats.get("pool", {}).get("sessions", 0)
        status["generated_tokens_per_s"] = stats.get("generated_tokens_per_s", 0.0)
    return status


def merged_metrics(answers: list[tuple[Member, str]]) -> str:
    """Return one Prometheus text for all engines. Samples of a family stay together, each with its engine's name."""
    families: dict[str, tuple[list[str], dict[str, float]]] = {}
    for member, text in answers:
        for headers, samples in _families(text):
            known = families.setdefault(headers[0], (headers, {}))[1]
            for name, value in samples:
                key = name if name.startswith(_OF_THE_SERVICE) else _labelled(name, member.name)
                known[key] = known.get(key, 0.0) + value
    lines = []
    for headers, samples_of in families.values():
        lines += [*headers, *(f"{name} {value!r}" for name, value in samples_of.items())]
    return "\n".join([*lines, ""])


def _families(text: str) -> Iterator[tuple[list[str], list[tuple[str, float]]]]:
    """Yield metric families: their comment lines, then samples as (name and labels, value)."""
    headers: list[str] = []
    samples: list[tuple[str, float]] = []
    for line in text.splitlines():
        if line.startswith("#"):
            if line.startswith("# HELP") and headers:  # the previous family may have no samples
                yield headers, samples
                headers, samples = [], []
            headers.append(line)
        elif line:
            name, _, value = line.rpartition(" ")
            samples.append((name, float(value)))
    if headers:
        yield headers, samples


def _labelled(name: str, engine: str) -> str:
    if name.endswith("}"):
        return f'{name[:-1]},engine="{engine}"}}'
    return f'{name}{{engine="{engine}"}}'


MAX_LISTED_SESSIONS = 100_000
"""Maximum sessions that each engine lists for one page, if engines have separate sessions."""
Combine = Callable[[list[tuple[Member, Any]]], Any]


def gather(
    call: calls.EngineCall[Any],
    reply: calls.Reply[Any],
    members: list[Member],
    list_members: Callable[[], list[Member]],
    session_member: Callable[[str], Member | None],
    shares_sessions: bool,
) -> None:
    """Answer a call from `members`, the connected engines (at least one).

    list_members: returns all engines, also disconnected ones
    session_member: returns the engine that has a session
    shares_sessions: whether every engine lists all sessions
    """
    match call:
        case calls.GetStatus():
            _call_members(call, reply, members, lambda answers: merged_status(answers, list_members()))
        case calls.GetMetrics():
            _call_members(call, reply, members, merged_metrics)
        case calls.ListRequests():
            _call_members(call, reply, members, _newest_requests)
        case calls.ListSessions(limit, offset) if shares_sessions and len(members) > 1:
            _call_members(call, reply, members, _page(limit, 0, shared=True))
        case calls.ListSessions(limit, offset) if len(members) > 1:
            if limit + offset > MAX_LISTED_SESSIONS:
                reply(_offset_error(limit, offset))
            else:
                first_rows = msgspec.structs.replace(call, limit=limit + offset, offset=0)
                _call_members(first_rows, reply, members, _page(limit, offset, shared=False))
        case calls.FindSession(session_ids):
            _call_members(call, reply, members, lambda answers: _first_found(session_ids, answers))
        case calls.DeleteSessions() | calls.CancelJobs() | calls.CountJobs() if not (
            # One engine deletes shared sessions: a second delete would remove what turns have stored meanwhile.
            shares_sessions and isinstance(call, calls.DeleteSessions)
        ):
            _call_members(call, reply, members, lambda answers: sum(value for _, value in answers))
        case calls.AddState() | calls.RemoveState() | calls.AddAdapter() | calls.RemoveAdapter():
            _change_all(call, reply, members, list_members)
        case calls.ExportSession(session_id) | calls.ImportSession(session_id) | calls.DeleteSessions(session_id):
            at = session_member(session_id)
            _call_members(call, reply, [at if at in members and at is not None else members[0]], _first)
        case _:
            _call_members(call, reply, members[:1], _first)


def _call_members(
    call: calls.EngineCall[Any],
    reply: calls.Reply[Any],
    members: list[Member],
    combine: Combine,
    ignored: Collection[ErrorKind] = ENGINE_GONE,
) -> None:
    """Send a call to all `members` and reply after the last answer.

    An engine with an error of an `ignored` kind is left out, unless all have one. Any other error becomes the reply.
    """
    lock = threading.Lock()
    answers: dict[int, Any] = {}

    def collect(number: int, value: Any) -> None:
        with lock:
            answers[number] = value
            if len(answers) < len(members):
                return
        values = [(members[i], answers[i]) for i in range(len(members))]
        failures = [value for _, value in values if isinstance(value, ServiceError)]
        successes = [(member, value) for member, value in values if not isinstance(value, ServiceError)]
        fatal = [error for error in failures if error.info.kind not in ignored]
        if fatal or not successes:
            reply((fatal or failures)[0])
        else:
            reply(combine(successes))

    for number, member in enumerate(members):
        member.client.call(call, lambda value, number=number: collect(number, value))  # type: ignore[misc]


_DONE_BEFORE: dict[type, ErrorKind] = {
    calls.AddState: ErrorKind.NAME_TAKEN,
    calls.RemoveState: ErrorKind.STATE_NOT_FOUND,
    calls.AddAdapter: ErrorKind.NAME_TAKEN,
    calls.RemoveAdapter: ErrorKind.ADAPTER_NOT_FOUND,
}
"""The error of an engine that has made a change, when a client sends it once more because another engine lacks it."""


def _change_all(
    call: Any, reply: calls.Reply[Any], members: list[Member], list_members: Callable[[], list[Member]]
) -> None:
    """Send a change of states or adapters to all engines. It succeeds once every engine has it.

    An engine that starts meanwhile may have read its files before the change, so the client must send it once more.
    """

    def find_missing() -> ServiceError | None:
        names = [one.name for one in list_members() if one not in members and one.info.status in _SERVES_SOON]
        return _missing_error(names) if names else None

    def answered(answer: list[tuple[Member, Any]] | ServiceError) -> None:
        if isinstance(answer, ServiceError):
            reply(answer)
        elif (error := find_missing()) is not None:
            reply(error)
        elif len(answer) == len(members) or isinstance(call, calls.RemoveState | calls.RemoveAdapter):
            reply(_first(answer))
        else:
            _compare(call.name, _first(answer), reply, members)

    if (error := find_missing()) is not None:
        reply(error)
    else:
        _call_members(call, answered, members, lambda answers: answers, (_DONE_BEFORE[type(call)],))


def _compare(name: str, added: Any, reply: calls.Reply[Any], members: list[Member]) -> None:
    """Reply with the added state or adapter.

    The reply is an error if an engine already had another one of that name.
    """

    def combine(answers: list[tuple[Member, Any]]) -> Any:
        infos = [info for _, listed in answers for info in listed if info.name == name]
        if all(_content(info) == _content(added) for info in infos):
            return added
        message = f"some engines have another {name!r} already; delete it first, or choose another name"
        return ServiceError(ErrorKind.NAME_TAKEN, message, field="name", given=name)

    listing = calls.ListStates() if isinstance(added, calls.StateInfo) else calls.ListAdapters()
    _call_members(listing, reply, members, combine, ())


def _content(info: calls.StateInfo | calls.AdapterInfo) -> tuple[Any, ...]:
    return (info.digest, info.mixture, info.defaults) if isinstance(info, calls.StateInfo) else (info.digest,)


_SERVES_SOON = (ModelStatus.LOADING, ModelStatus.READY)


def _missing_error(names: list[str]) -> ServiceError:
    message = (
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} being started, and every engine must know a "
        "tuned state or adapter; retry in 2 s"
    )
    return ServiceError.from_info(ErrorInfo(kind=ErrorKind.ENGINE_LOST, message=message, retry_after_s=2.0))


def _first(answers: list[tuple[Member, Any]]) -> Any:
    return answers[0][1]


def _newest_requests(answers: list[tuple[Member, list[calls.Stats]]]) -> list[calls.Stats]:
    """Return one list. An engine gets a request's entry while it is the first that is connected."""
    return sorted((entry for _, listed in answers for entry in listed), key=lambda entry: -entry["at"])


def _first_found(session_ids: tuple[str, ...], answers: list[tuple[Member, Any]]) -> str | None:
    found = {value for _, value in answers}
    return next((session_id for session_id in session_ids if session_id in found), None)


def _offset_error(limit: int, offset: int) -> ServiceError:
    message = (
        f"offset: limit + offset is {limit + offset}, the maximum is {MAX_LISTED_SESSIONS} because each engine has its "
        "own sessions; list fewer, or let the engines share a database"
    )
    return ServiceError(ErrorKind.INVALID_FIELD, message, field="offset", given=offset)


def _page(limit: int, offset: int, shared: bool) -> Combine:
    """Return a function that merges the engines' lists into one page. Duplicate sessions are listed once.

    shared: whether all engines return the same list
    """

    def combine(answers: list[tuple[Member, Any]]) -> SessionPage:
        pages: list[SessionPage] = [value for _, value in answers]
        found: dict[tuple[str, int | None], SessionEntry] = {}
        for page in pages:
            for entry in page.sessions:
                key = (entry.session_id, entry.dialogue)
                known = found.get(key)
                if known is None or entry.updated > known.updated:
                    found[key] = entry
        newest = sorted(found.values(), key=lambda entry: entry.updated, reverse=True)
        if shared:
            total = max(page.total for page in pages)
        else:
            is_whole = all(page.total <= limit + offset for page in pages)
            total = len(found) if is_whole else sum(page.total for page in pages)
        return msgspec.structs.replace(
            pages[0],
            total=total,
            in_slots=sum(page.in_slots for page in pages),
            in_host_memory=sum(page.in_host_memory for page in pages),
            on_disk=max(page.on_disk for page in pages),
            sessions=newest[offset : offset + limit],
        )

    return combine
