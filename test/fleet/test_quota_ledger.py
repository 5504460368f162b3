"""The ledger of API keys' limits. It covers several engines and HTTP workers; engines come and go."""

from __future__ import annotations

import pytest

from rwkv_batch.errors import ServiceError
from rwkv_batch.fleet.member import Member
from rwkv_batch.ipc.served_model import ModelStatus
from test.conftest import IS_LONG
from test.fleet.quota_world import FULL, ROWS, TOKENS, Engine, World

SEEDS = 40 if IS_LONG else 16


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_key_pays_once_for_what_it_uses(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is charged once. Engines join late or are lost, and queues are full."""
    world = World(seed, monkeypatch)
    world.start(0, world.rng.randrange(2))
    for step in range(120):
        world.act()
        if seed % 3:
            world.check_rows()
        elif step % 30 == 29:  # what the others know of the ledger is up to date
            world.connect_all()
            world.settle()
            world.kill(world.rng.randrange(2))
            world.settle()
    world.connect_all()
    world.finish()
    assert not any(isinstance(request.answer, ServiceError) and request.tokens for request in world.requests)
    spent = world.spent()
    assert spent + world.remaining() == TOKENS


@pytest.mark.parametrize("seed", range(10))
def test_requests_that_no_engine_admitted_count_when_sent_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is lost before it reads the requests of a key. The next one admits as many rows as the key may have."""
    world = World(seed, monkeypatch)
    world.start(0)
    world.settle()
    requests = [world.submit(number % 2, rows=4, max_tokens=2) for number in range(15)]
    world.kill(0)
    world.start(0)
    while world.deliver_one():
        world.check_rows()
    world.settle()
    refused = [request for request in requests if isinstance(request.answer, ServiceError)]
    assert len(refused) == 14 and all("6 at once" in str(request.answer) for request in refused)
    world.finish()
    assert world.spent() == 4 * 2 + 2


def test_a_key_that_has_used_all_stays_refused_when_engines_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, monkeypatch)
    world.start(0)
    world.submit(0, prompt=TOKENS, max_tokens=1)
    world.finish()
    for number in (1, 0, 1):
        world.connect_all()
        world.settle()
        for worker in range(2):
            request = world.submit(worker)
            world.finish()
            assert isinstance(request.answer, ServiceError) and "tokens a minute" in str(request.answer)
        world.kill(number)
        world.settle()


def test_a_request_refused_by_a_full_queue_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, monkeypatch)
    world.connect_all()
    for engine in world.engines.values():
        engine.fake.is_full = True
    for number in range(8):  # some of them by the engine that holds the ledger
        request = world.submit(number % 2, rows=ROWS, prompt=5)
        world.settle()
        assert isinstance(request.answer, ServiceError) and request.answer.info == FULL.info
    assert world.remaining() == TOKENS


def test_a_request_that_no_engine_admitted_waits_for_room_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted, then its engine is lost before it is admitted. The next engine's queue is full."""
    world = World(3, monkeypatch)
    world.start(0)
    request = world.submit(0)
    while not world.workers[0]._in_flight_jobs["job0"].member:
        world.deliver_one()
    world.kill(0)
    world.start(0)
    world.engines[0].fake.is_full = True
    world.settle()
    assert isinstance(request.answer, ServiceError) and request.answer.info == FULL.info
    assert world.remaining() == TOKENS


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("resubmit", [0, 2])
def test_tokens_of_a_session_that_are_read_again_are_charged(
    number: int, resubmit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engine that holds the ledger, or by another one. The client receives nothing of it."""
    world = World(4, monkeypatch)
    for fleet in world.workers:
        fleet._limits = fleet._limits._replace(resubmit=resubmit)
    world.connect_all()
    world.settle()
    world.kill(1 - number)
    world.engines[number].fake.replayed_tokens = 30
    for fleet in world.workers:
        fleet.quotas.poll()
    request = world.submit(0)
    world.finish()
    world.engines[number].fake.replayed_tokens = 0
    assert request.answer is True and world.spent() == 5
    assert world.remaining() == TOKENS - 5 - 30


def test_a_worker_that_reconnects_keeps_its_rows_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then its earlier connection ends. The earlier run of its job ends with it."""
    world = World(5, monkeypatch)
    world.start(0)
    world.settle()
    request = world.submit(0, rows=ROWS, max_tokens=9)
    world.settle()
    engine = world.engines[0]
    earlier, _, _ = engine.peers[0]
    client = next(iter(world.workers[0].members)).client
    client._report_engine_lost()
    engine.connect(0)
    world.settle()
    earlier.serve(lambda call, reply: None)  # it finds its link closed
    for worker in range(2):
        other = world.submit(worker)
        world.settle()
        assert isinstance(other.answer, ServiceError) and "6 rows in progress" in str(other.answer)
    world.finish()
    assert request.answer is True


def test_a_request_whose_count_is_not_answered_pays_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link breaks while the answer is under way. The worker reconnects and counts the request again."""
    world = World(7, monkeypatch)
    world.start(0)
    world.settle()
    request = world.submit(0, rows=ROWS, prompt=5)
    engine = world.engines[0]
    earlier, _, sent = engine.peers[0]
    while sent.sent:
        earlier._handle(sent.sent.popleft(), lambda call, reply: None)
        earlier.flush_answers()
    next(iter(world.workers[0].members)).client._report_engine_lost()
    earlier.serve(lambda call, reply: None)
    engine.connect(0)
    world.finish()
    assert request.answer is True and world.spent() == 5 * ROWS + 3
    assert world.remaining() == TOKENS - (5 * ROWS + 3)


def test_a_request_waits_until_the_ledgers_holder_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second engine is ready and may have run longer. Requests wait for its connection, also with no other wait."""
    world = World(6, monkeypatch)
    for fleet in world.workers:
        fleet._limits = fleet._limits._replace(wait_s=0.0)
    world.start(0)
    world.settle()
    world.start(1, 1)
    request = world.submit(0)
    world.settle()
    assert request.answer is None
    world.connect_all()
    world.settle()
    assert request.answer is True


def test_a_request_waits_while_an_older_engine_may_be_seen_as_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines become ready at once. The news of the older one comes later."""
    world = World(6, monkeypatch)
    world._announce(0, ModelStatus.LOADING)
    world.now = 1.0
    world.start(1)
    request = world.submit(0)
    world.settle()
    assert request.answer is None
    world.now = 0.0
    world.connect_all()
    world.finish()
    spent = world.spent()
    assert request.answer is True and world.remaining() == TOKENS - spent


def test_an_engine_that_lost_the_ledger_meanwhile_counts_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger moves while the answer to a request is under way."""
    world = World(6, monkeypatch)
    world.now = 1.0
    world.start(0)
    world.settle()
    request = world.submit(0, rows=ROWS)
    earlier = world.engines[0]
    peer, _, sent = earlier.peers[0]
    while sent.sent:
        peer._handle(sent.sent.popleft(), lambda call, reply: None)
        peer.flush_answers()
    world.now = 0.0
    world.start(1)
    _, heartbeats, theirs = world.engines[1].peers[0]
    world._client(0, world.engines[1])._handle(theirs, heartbeats.sent.popleft())
    world.poll(0)
    world.settle()
    assert request.answer is True and not request.done and not earlier.server._ledger._quotas.jobs()


def test_jobs_that_end_while_an_engine_is_loading_count_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger has moved, and the earlier holder's answer to another request comes late."""
    world = World(6, monkeypatch, num_engines=3)
    world.now = 1.0
    world.start(0)
    world.settle()
    world.submit(0)
    world.settle()
    world.submit(0)
    peer, _, sent = world.engines[0].peers[0]
    while sent.sent:
        peer._handle(sent.sent.popleft(), lambda call, reply: None)
        peer.flush_answers()
    world.now = 0.0
    world.start(1)
    _, heartbeats, theirs = world.engines[1].peers[0]
    world._client(0, world.engines[1])._handle(theirs, heartbeats.sent.popleft())
    world.poll(0)
    world._announce(2, ModelStatus.LOADING)
    world.finish()
    world.start(2)
    world.settle()
    assert not any(one.server._ledger._quotas.jobs() for one in world.engines.values())
    spent = world.spent()
    assert spent == 10 and spent + world.remaining() == TOKENS


def test_a_connection_counts_once_its_change_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then its number may change. The end of a request would then not reach the engine that counts it."""
    world = World(6, monkeypatch)
    world.now = 1.0
    world.start(0)
    world.settle()
    changed = Member._changed
    unreported: list[Member] = []
    monkeypatch.setattr(Member, "_changed", lambda self, is_connected: unreported.append(self))
    world.now = 0.0
    world.start(1)
    world.settle()
    request = world.submit(0)
    world.settle()
    assert len(unreported) == 2 and request.answer is None
    for member in unreported:
        changed(member, True)
    world.finish()
    assert request.answer is True and not any(one.server._ledger._quotas.jobs() for one in world.engines.values())


def use_all_tokens(world: World, worker: int) -> None:
    """Spend all the key's tokens. No heartbeat tells the other worker."""
    world.submit(worker, prompt=TOKENS, max_tokens=1)
    while world.deliver_one():
        pass
    for engine in world.engines.values():
        engine.step()
    while world.deliver_one():
        pass


def check_spent_tokens_count(world: World, lost: Engine, *, user: int) -> None:
    """The other worker notices first that the holder is lost. Its request waits for what the user's worker knows."""
    other = 1 - user
    world.lose(other, lost)
    request = world.submit(other)
    for _ in range(3):
        while world.deliver_one():
            pass
        world.poll(other)
    assert request.answer is None
    world.lose(user, lost)
    world.finish()
    assert isinstance(request.answer, ServiceError) and "tokens a minute" in str(request.answer)


@pytest.mark.parametrize("user", [0, 1])
def test_a_request_waits_until_all_workers_know_of_the_lost_holder(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(8, monkeypatch)
    world.connect_all()
    world.settle()
    use_all_tokens(world, user)
    check_spent_tokens_count(world, world.engines.pop(0), user=user)


@pytest.mark.parametrize("num_heartbeats", [0, 1, 3])
def test_tokens_that_several_workers_used_since_the_last_heartbeat_add_up(
    num_heartbeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker knew of its own ones. The next holder counts both, and each once."""
    world = World(8, monkeypatch)
    world.connect_all()
    world.settle()
    for worker in range(2):
        world.submit(worker, prompt=60, max_tokens=1)
    while world.deliver_one():
        pass
    for _ in range(num_heartbeats):
        world.settle()
    world.kill(0)
    for engine in world.engines.values():
        engine.step()
    world.settle()
    spent = world.spent()
    assert spent > 100 and spent + world.remaining() == TOKENS


@pytest.mark.parametrize("user", [0, 1])
def test_a_second_move_of_the_ledger_waits_for_all_workers_again(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers lose the holder for a moment. Later it ends."""
    world = World(9, monkeypatch)
    world.connect_all()
    world.settle()
    for worker in range(2):
        world.lose(worker, world.engines[0])
    world.settle()
    for worker in range(2):
        world.engines[0].connect(worker)
    world.settle()
    use_all_tokens(world, user)
    check_spent_tokens_count(world, world.engines.pop(0), user=user)
