"""Questions to a fleet: asked of the engines that can answer, and their answers made into one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from cluster.figures import merged_metrics, merged_status
from cluster.member import Member
from rwkv_batch import calls
from rwkv_batch.errors import ErrorKind, ServiceError
from state_pool.session_page import SessionEntry, SessionPage

Combine = Callable[[list[tuple[Member, Any]]], Any]


def gather(
    call: calls.EngineCall[Any],
    reply: calls.Reply[Any],
    members: list[Member],
    every: list[Member],
    home: Callable[[str], Member | None],
) -> None:
    """Answer a call from `members`, which are there, at least one; `every`: those too that are not.

    `home`: the engine that has a session.
    """
    match call:
        case calls.GetStatus():
            _ask(call, reply, members, lambda answers: merged_status(answers, every))
        case calls.GetMetrics():
            _ask(call, reply, members, merged_metrics)
        case calls.ListSessions(limit, offset):
            whole = calls.ListSessions(limit + offset, 0) if len(members) > 1 else call
            combine = _page(limit, offset) if len(members) > 1 else _first
            _ask(whole, reply, members, combine)
        case calls.DeleteSessions() | calls.CancelJobs() | calls.CountJobs():
            _ask(call, reply, members, lambda answers: sum(value for _, value in answers))
        case calls.AddState() | calls.RemoveState() | calls.AddAdapter() | calls.RemoveAdapter():
            _ask(call, reply, members, _first, all_must=True)
        case calls.ExportSession(session_id) | calls.ImportSession(session_id):
            at = home(session_id)
            _ask(call, reply, [at if at in members and at is not None else members[0]], _first)
        case _:
            _ask(call, reply, members[:1], _first)


def _ask(
    call: calls.EngineCall[Any],
    reply: calls.Reply[Any],
    members: list[Member],
    combine: Combine,
    all_must: bool = False,
) -> None:
    """Ask all of `members`, and reply when the last has answered.

    An engine that is lost meanwhile is left out, unless all are or `all_must` answer; any other failure is the reply.
    """
    lock = threading.Lock()
    answers: dict[int, Any] = {}

    def take(number: int, value: Any) -> None:
        with lock:
            answers[number] = value
            if len(answers) < len(members):
                return
        values = [(members[i], answers[i]) for i in range(len(members))]
        failures = [value for _, value in values if isinstance(value, ServiceError)]
        good = [(member, value) for member, value in values if not isinstance(value, ServiceError)]
        fatal = [error for error in failures if all_must or error.info.kind is not ErrorKind.ENGINE_LOST]
        if fatal or not good:
            reply((fatal or failures)[0])
        else:
            reply(combine(good))

    for number, member in enumerate(members):
        member.client.call(call, lambda value, number=number: take(number, value))  # type: ignore[misc]


def _first(answers: list[tuple[Member, Any]]) -> Any:
    return answers[0][1]


def _page(limit: int, offset: int) -> Combine:
    """A page of all engines' lists; a session that several of them list is one."""

    def combine(answers: list[tuple[Member, Any]]) -> SessionPage:
        pages: list[SessionPage] = [value for _, value in answers]
        found: dict[str, SessionEntry] = {}
        for page in pages:
            for entry in page.sessions:
                known = found.get(entry.session_id)
                if known is None or entry.updated > known.updated:
                    found[entry.session_id] = entry
        newest = sorted(found.values(), key=lambda entry: entry.updated, reverse=True)
        listed = sum(len(page.sessions) for page in pages)
        return msgspec.structs.replace(
            pages[0],
            # Of a database that they share every engine tells the same total; of lists that are whole, the union is it.
            total=len(found) if all(page.total <= limit + offset for page in pages) else _total(pages, listed, found),
            in_slots=sum(page.in_slots for page in pages),
            in_host_memory=sum(page.in_host_memory for page in pages),
            on_disk=max(page.on_disk for page in pages),
            sessions=newest[offset : offset + limit],
        )

    return combine


def _total(pages: list[SessionPage], listed: int, found: dict[str, Any]) -> int:
    """Of lists that were cut: the same sessions if what was listed was, else all of them."""
    return max(page.total for page in pages) if len(found) < listed else sum(page.total for page in pages)
