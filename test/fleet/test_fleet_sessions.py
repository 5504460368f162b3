"""A fleet's sessions: their engines, and the merged list. Engines are fake clients."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from rwkv_batch.calls import DeleteSessions, FindSession, ListSessions
from rwkv_batch.errors import MAY_BE_KEPT, ErrorInfo, ErrorKind
from rwkv_batch.fleet.fleet import Fleet
from rwkv_batch.fleet.routing import FleetLimits
from rwkv_batch.request import Delta, JobEvents
from state_pool.session_key import SessionEntry, SessionPage, Tier
from test.fleet.fake_clients import FakeClient, FakeFleet, client_with_job, make_fleet, submit, use_fake_clients
from test.harness import turn


def page_of(fleet: Fleet, offset: int) -> Any:
    answers: list[Any] = []
    fleet.call(ListSessions(5, offset), answers.append)
    return answers[0]


class Listing(FakeClient):
    """Lists sessions, newest first by number."""

    names: ClassVar[dict[str, range]] = {}

    def call(self, call: Any, reply: Any) -> None:
        self.received_calls.append(call)
        mine = [SessionEntry(f"s{number}", Tier.DISK, 1000.0 - number) for number in self.names[self.name]]
        part = mine[call.offset : call.offset + call.limit]
        reply(SessionPage(total=len(mine), in_slots=1, in_host_memory=0, on_disk=9, sessions=part))


@pytest.mark.parametrize("shares", [True, False])
def test_an_offset_does_not_make_engines_list_everything(monkeypatch: pytest.MonkeyPatch, shares: bool) -> None:
    use_fake_clients(monkeypatch, Listing)
    both = range(40)
    names = (both, both) if shares else (range(0, 40, 2), range(1, 40, 2))
    monkeypatch.setattr(Listing, "names", {f"engine-{number}": names[number] for number in range(2)})
    fleet, engines = make_fleet(FleetLimits(shares_sessions=shares))
    for offset in (0, 10, 38, 50):
        page = page_of(fleet, offset)
        assert [one.session_id for one in page.sessions] == [f"s{n}" for n in range(offset, min(offset + 5, 40))]
        assert (page.total, page.in_slots, page.on_disk) == (40, 2, 9)
    far = page_of(fleet, 2**52)
    if shares:
        assert far.sessions == [] and far.total == 40
        assert all(call.limit == 5 for one in engines for call in one.received_calls)
    else:
        assert far.info.kind is ErrorKind.INVALID_FIELD and far.info.field == "offset" and "100000" in far.info.message
        assert all(call.limit < 100 for one in engines for call in one.received_calls)


@pytest.mark.parametrize("shares", [True, False])
def test_one_engine_deletes_a_shared_session(two_engines: FakeFleet, shares: bool) -> None:
    """A second delete would remove what a turn stored between the two."""
    fleet, engines = make_fleet(FleetLimits(shares_sessions=shares))
    fleet.call(DeleteSessions("s", False), lambda answer: None)
    assert sum(len(one.received_calls) for one in engines) == (1 if shares else 2)


def test_a_turn_is_repeated_only_if_its_session_is_unchanged(two_engines: FakeFleet) -> None:
    fleet, engines = make_fleet(FleetLimits(shares_sessions=True))
    running = submit(fleet, turn("s", "Hello"))
    first = client_with_job(engines)
    first.jobs[0][1](JobEvents(job_id="job", deltas=[Delta(0, b"", 0, session_history=(7, 2))]))
    assert not running.events, "the caller does not see the session's length"
    assert first.confirmed == ["job"]
    first.lose()
    (row,) = client_with_job(engines).jobs[0][0].rows
    assert row.session is not None and row.session.expected_history == (7, 2) and row.resumed is None


def test_a_turn_of_a_lost_engine_that_another_refuses_may_be_kept(two_engines: FakeFleet) -> None:
    """The lost engine may have stored it. So its client must not take it for refused and send it again."""
    fleet, engines = make_fleet(FleetLimits(shares_sessions=True))
    running = submit(fleet, turn("s", "Once"))
    first = client_with_job(engines)
    for engine in engines:
        engine.refusal_info = ErrorInfo(kind=ErrorKind.OVERLOADED, message="the queue is full", retry_after_s=1)
    first.lose()
    error = running.events[-1].error
    assert error is not None and error.kind is ErrorKind.ENGINE_LOST and error.retry_after_s is None
    assert "the queue is full" in error.message and MAY_BE_KEPT in error.message


def test_an_unshared_session_stays_with_its_engine(two_engines: FakeFleet) -> None:
    fleet, engines = two_engines
    homes = set()
    for number in range(40):
        submit(fleet, turn(f"s{number}", "Hello"))
        homes.add(client_with_job(engines).name)
        home = client_with_job(engines)
        home.send_text(b"", [], ends=True)
        home.jobs.clear()
        submit(fleet, turn(f"s{number}", "Hello"))
        assert client_with_job(engines) is home
        home.send_text(b"", [], ends=True)
        home.jobs.clear()
    assert homes == {"engine-0", "engine-1"}


class Finding(FakeClient):
    def call(self, call: Any, reply: Any) -> None:
        known = {"engine-0": {"s"}, "engine-1": {"owner=anna/s"}}[self.name]
        reply(next((name for name in call.session_ids if name in known), None))


@pytest.mark.parametrize("shares", [True, False])
def test_the_first_id_that_any_engine_knows_is_found(monkeypatch: pytest.MonkeyPatch, shares: bool) -> None:
    use_fake_clients(monkeypatch, Finding)
    fleet, _ = make_fleet(FleetLimits(shares_sessions=shares))
    answers: list[Any] = []
    for session_ids in (("owner=anna/s", "s"), ("owner=bert/s", "s"), ("owner=bert/t", "t")):
        fleet.call(FindSession(session_ids), answers.append)
    assert answers == ["owner=anna/s", "s", None]


class Colliding(FakeClient):
    """Lists a session whose id is the name of another engine's dialogue."""

    def call(self, call: Any, reply: Any) -> None:
        entry = SessionEntry("fam:1", Tier.DISK, 1.0, 1 if self.name == "engine-0" else None)
        reply(SessionPage(total=1, in_slots=0, in_host_memory=0, on_disk=1, sessions=[entry]))


def test_a_dialogue_and_a_session_of_its_name_are_both_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_clients(monkeypatch, Colliding)
    fleet, _ = make_fleet(FleetLimits(shares_sessions=False))
    page = page_of(fleet, 0)
    assert page.total == 2 and {one.dialogue for one in page.sessions} == {1, None}
