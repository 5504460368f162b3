"""A service's roster of a fake cluster: existing, desired and leaving engines."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import msgspec
import pytest

from rwkv_batch.config import EngineConfig
from rwkv_batch.errors import StartupError
from rwkv_batch.fleet.actors import process, roster
from rwkv_batch.fleet.actors.driver import join
from rwkv_batch.fleet.actors.placement import place
from rwkv_batch.fleet.actors.plan import ClusterAddress, ClusterPlan
from rwkv_batch.fleet.actors.roster import Roster
from rwkv_batch.ipc.process import LogConfig
from rwkv_batch.ipc.served_model import ModelStatus
from state_pool.config import PoolConfig
from test.fleet.fake_ray import ActorUnavailableError, FakeRay, GetTimeoutError, RayActorError

STYLE = LogConfig()
CONFIG = EngineConfig(model_path="/x.pth", pool=PoolConfig(state_db=""))
PLAN = ClusterPlan(cluster=ClusterAddress("auto", "", "chat"), replicas=0, config=CONFIG, factory="m:E")
OTHER = "/y.pth (sessions in memory)"
READY, LOADING, FAILED, UNLOADING = ModelStatus.READY, ModelStatus.LOADING, ModelStatus.FAILED, ModelStatus.UNLOADING


class Service:
    """A roster that polls only when the test decides."""

    def __init__(self, ray: FakeRay, replicas: int = 0, is_up: bool = False) -> None:
        self.ray = ray
        self.roster = Roster(msgspec.structs.replace(PLAN, replicas=replicas), STYLE)
        self.roster.begin(is_up)

    def poll(self) -> dict[str, ModelStatus]:
        """Poll the head and each engine. Returns the engines' status."""
        self.engine_directory.poll()
        for _ in range(2):
            table = self.roster.poll()
        return {info.engine: info.status for info in table}

    @property
    def engine_directory(self) -> roster.EngineDirectory:
        return self.roster._directory


MakeService = Callable[..., Service]


@pytest.fixture
def make_service(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> MakeService:
    monkeypatch.setattr(roster.EngineDirectory, "_poll_loop", lambda self: None)
    monkeypatch.setattr(roster, "_PLACE_S", 0.0)
    monkeypatch.setattr(roster, "_CURRENT_S", float("inf"))
    return lambda *arguments, **more: Service(ray, *arguments, **more)


# Polling -----------------------------------------------------------------------------------------------------


def test_a_service_with_another_model_neither_places_nor_watches(make_service: MakeService, ray: FakeRay) -> None:
    engine = ray.engine("engine-0", OTHER)
    with pytest.raises(StartupError, match="engine-0 of the cluster serves"):
        make_service(replicas=4)
    assert list(ray.actors) == ["engine-0"] and engine.received == [("info",)]


def test_a_running_service_ignores_an_engine_of_another_model(make_service: MakeService, ray: FakeRay) -> None:
    ray.engine("engine-0", PLAN.serves)
    service = make_service()
    assert service.poll() == {"engine-0": READY}
    other = ray.engine("engine-1", OTHER)
    for _ in range(3):
        assert service.poll() == {"engine-0": READY}
    assert len(other.received) == 1, "it is polled no more, so it leaves"
    service.roster.add(())
    service.poll()
    assert ray.actors["engine-1"] is other and ray.actors["engine-2"].serves == PLAN.serves


def test_of_two_starting_services_the_one_with_the_first_engine_stays(make_service: MakeService, ray: FakeRay) -> None:
    late, first = make_service(replicas=2), ray.engine("engine-0", OTHER)
    with pytest.raises(StartupError, match="engine-0 of the cluster serves"):
        late.poll()
    late.roster.remove_created()
    assert ray.actors == {"engine-0": first}, "its own engine is removed"


def test_an_actor_that_has_died_is_looked_up_again(make_service: MakeService, ray: FakeRay) -> None:
    dead = ray.engine("engine-0", PLAN.serves)
    service = make_service()
    assert service.poll() == {"engine-0": READY}
    dead.failure = ActorUnavailableError()
    assert service.poll() == {"engine-0": LOADING}
    dead.failure = RayActorError()
    ray.engine("engine-0", PLAN.serves)  # placed again by another machine between two polls
    service.poll()
    assert service.poll() == {"engine-0": READY}


# Placement ---------------------------------------------------------------------------------------------------


def test_engines_that_leave_while_a_service_starts_are_placed_again(make_service: MakeService, ray: FakeRay) -> None:
    ray.engine("engine-0", PLAN.serves, UNLOADING)
    service = make_service(replicas=2)
    assert service.poll() == {"engine-0": UNLOADING}
    assert list(ray.actors) == ["engine-0", "engine-1"]
    del ray.actors["engine-0"]  # it has drained
    service.poll()
    assert sorted(ray.actors) == ["engine-0", "engine-1"]


@pytest.mark.parametrize("replicas", [0, 3])
def test_if_all_engines_left_all_are_placed_again(make_service: MakeService, ray: FakeRay, replicas: int) -> None:
    for number in range(max(1, replicas)):
        ray.engine(f"engine-{number}", PLAN.serves)
    service = make_service(replicas)
    placed = list(service.poll())
    ray.actors.clear()  # without a watcher for a minute
    service.poll()
    assert list(ray.actors) == placed


def test_if_two_machines_remove_the_last_two_engines_one_is_placed_again(
    make_service: MakeService, ray: FakeRay
) -> None:
    one, other = make_service(replicas=2), make_service()
    one.poll()
    for engine in ray.actors.values():
        engine.set_status(READY)
    assert one.poll() == other.poll() == {"engine-0": READY, "engine-1": READY}
    one.roster.remove("engine-0")
    other.roster.remove("engine-1")
    one.poll()
    other.poll()
    assert [engine.drains for engine in ray.actors.values()] == [[False], [False]]
    ray.actors.clear()
    one.poll()
    other.poll()
    assert list(ray.actors) == ["engine-1"], "the first service still needs it"


def test_removed_engines_are_not_placed_again(make_service: MakeService, ray: FakeRay) -> None:
    service = make_service(replicas=2)
    service.poll()
    for engine in ray.actors.values():
        engine.set_status(READY)
    service.poll()
    service.roster.remove("engine-1")
    service.poll()
    assert ray.actors["engine-1"].drains == [False]
    del ray.actors["engine-1"]
    assert service.poll() == {"engine-0": READY} and list(ray.actors) == ["engine-0"]
    again = make_service(replicas=2, is_up=True)  # the cluster process was restarted
    assert again.poll() == {"engine-0": READY} and list(ray.actors) == ["engine-0"]
    ray.actors.clear()
    service.poll()
    assert list(ray.actors) == ["engine-0"]


def test_two_engines_added_at_once_are_both_placed(make_service: MakeService, ray: FakeRay) -> None:
    ray.engine("engine-0", PLAN.serves)
    service = make_service()
    service.poll()
    ray.engine("engine-1", PLAN.serves)  # by another machine; this one has not polled it yet
    service.roster.add(())
    service.roster.poll()
    service.roster.add(())
    service.roster.poll()
    assert list(ray.actors) == ["engine-0", "engine-1", "engine-2", "engine-3"]


def test_failed_placements_are_retried(make_service: MakeService, ray: FakeRay) -> None:
    ray.engine("engine-0", PLAN.serves)
    service = make_service(replicas=2)
    service.roster.add(())
    ray.fault = GetTimeoutError("the head is slow")
    service.roster.poll()
    ray.fault = None
    service.poll()
    assert list(ray.actors) == ["engine-0", "engine-1", "engine-2"]


def test_a_failed_first_engine_ends_only_a_service_that_never_served(make_service: MakeService, ray: FakeRay) -> None:
    service = make_service()
    service.poll()
    ray.actors["engine-0"].set_status(FAILED, "no such file")
    with pytest.raises(StartupError, match="no such file"):
        service.poll()
    ray.actors["engine-0"].set_status(READY)
    service = make_service()
    service.poll()
    service.roster.add(("cuda:9",))
    service.poll()
    ray.actors["engine-1"].set_status(FAILED, "no such device")
    assert service.poll() == {"engine-0": READY, "engine-1": FAILED}
    assert [info.error for info in service.roster.poll()] == ["", "no such device"]


def test_a_missing_gpu_is_logged(ray: FakeRay, caplog: pytest.LogCaptureFixture) -> None:
    for gpus, device, lines in ((0, "auto", 1), (1, "auto", 1), (0, "cpu", 1)):
        ray.gpus = gpus
        place(f"engine-{device}{gpus}", EngineConfig(model_path="", devices=(device,)), "", STYLE, "")
        assert len([one for one in caplog.messages if "has no GPU:" in one]) == lines


# Removal -----------------------------------------------------------------------------------------------------


@pytest.fixture
def waiting(make_service: MakeService, ray: FakeRay) -> Service:
    """A service with one ready engine. No node has room for the other engine."""
    service = make_service(replicas=2)
    service.poll()
    ray.actors["engine-0"].set_status(READY)
    ray.actors["engine-1"].has_process = False
    service.poll()
    assert service.poll() == {"engine-0": READY, "engine-1": LOADING}
    return service


def test_an_engine_without_a_node_blocks_no_restart(waiting: Service, ray: FakeRay) -> None:
    assert "no node" in waiting.roster.poll()[1].error
    waiting.roster.restart("all")
    waiting.poll()
    ray.actors["engine-0"].set_status(READY)
    waiting.poll()
    waiting.poll()
    assert ray.actors["engine-0"].drains == [True] and ray.actors["engine-1"].drains == []


def test_an_engine_without_a_node_can_be_removed(waiting: Service, ray: FakeRay) -> None:
    waiting.roster.remove("engine-1")
    waiting.poll()
    assert waiting.poll() == {"engine-0": READY} and list(ray.actors) == ["engine-0"]


def test_an_engine_is_removed_when_the_head_answers_again(
    make_service: MakeService, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        ray.engine(f"engine-{number}", PLAN.serves)
    service = make_service()
    service.poll()
    monkeypatch.setattr(roster, "_CURRENT_S", 0.0)  # no answer for a while
    ray.fault = GetTimeoutError("the head is away")
    service.roster.remove("engine-1")
    service.roster.add(())
    service.roster.restart("engine-0")
    for _ in range(2):
        assert [info.status for info in service.roster.poll()] == [READY, READY], "it serves until then"
    assert not any(engine.drains for engine in ray.actors.values())
    monkeypatch.setattr(roster, "_CURRENT_S", float("inf"))
    service.roster.poll()  # the head stops answering here
    ray.fault = None
    service.poll()
    assert ray.actors["engine-1"].drains == [False] and "engine-2" in ray.actors
    ray.actors["engine-1"].set_status(READY)  # the head missed its leaving and restarted it
    service.poll()
    service.poll()
    assert ray.actors["engine-1"].drains == [False, False]
    del ray.actors["engine-1"]
    service.poll()
    ray.engine("engine-1", PLAN.serves)  # a new engine
    service.poll()
    assert ray.actors["engine-1"].drains == []


def test_a_new_engine_with_the_name_of_a_removed_one_stays(make_service: MakeService, ray: FakeRay) -> None:
    for number in range(2):
        ray.engine(f"engine-{number}", PLAN.serves)
    service = make_service()
    service.poll()
    service.roster.remove("engine-1")
    service.poll()
    gone = ray.actors["engine-1"]
    assert gone.drains == [False]
    gone.failure = RayActorError("it has left")
    ray.engine("engine-1", PLAN.serves)  # placed by another machine between two polls
    for _ in range(4):
        service.poll()
    assert service.poll() == {"engine-0": READY, "engine-1": READY} and ray.actors["engine-1"].drains == []


def test_engines_without_a_node_leave_with_the_service_that_placed_them(waiting: Service, ray: FakeRay) -> None:
    ray.actors["engine-0"].is_last = False
    assert not waiting.roster.leave() and len(ray.actors) == 2, "another service uses them"
    ray.actors["engine-0"].has_process = False
    waiting.poll()
    ray.actors["engine-0"].failure = ActorUnavailableError()
    waiting.poll()
    ray.actors["engine-0"].failure = None
    waiting.poll()
    waiting.roster.leave()
    assert not ray.actors, "it is unknown whether it was the last"


# The process -------------------------------------------------------------------------------------------------


class Supervisor:
    """The supervisor's end of the cluster process's pipe."""

    def __init__(self) -> None:
        self.pipe, self._theirs = multiprocessing.Pipe()
        self.pipe.send(("begin", False))

    def runs(self) -> None:
        process.run_cluster(PLAN, STYLE, "cluster", self._theirs)


@pytest.fixture
def supervisor(make_service: MakeService, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    poll = Roster.poll
    monkeypatch.setattr(Roster, "poll", lambda self: (self._directory.poll(), poll(self))[1])
    monkeypatch.setattr(process, "become_child", lambda name, log_config: None)
    monkeypatch.setattr(process, "POLL_INTERVAL_S", 0.0)
    return Supervisor()


@pytest.fixture
def departures(monkeypatch: pytest.MonkeyPatch) -> list[Roster]:
    left: list[Roster] = []
    monkeypatch.setattr(Roster, "leave", lambda self: left.append(self))
    return left


def test_a_service_that_cannot_start_leaves_nothing_behind(supervisor: Supervisor, ray: FakeRay) -> None:
    ray.initial_status = (FAILED, "no such file")
    supervisor.runs()
    info = [supervisor.pipe.recv() for _ in range(2)]
    assert info[-1] == ("failed", "no such file") and not ray.actors


@pytest.mark.parametrize("fault", [GetTimeoutError("slow"), OSError("the head"), RayActorError("away")])
def test_a_slow_head_is_not_a_dead_supervisor(
    supervisor: Supervisor,
    departures: list[Roster],
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*arguments: object) -> None:
        raise fault

    monkeypatch.setattr(roster, "remove_engine_actor", fails)
    monkeypatch.setattr(Roster, "remove", lambda self, name: roster.remove_engine_actor(name))
    supervisor.pipe.send(("remove", "engine-0"))
    supervisor.runs()
    assert departures == [] and "the cluster's head does not answer" in caplog.text
    monkeypatch.setattr(roster.EngineDirectory, "poll", fails)
    supervisor.runs()
    assert departures == [], "also if it is slow at once"


def test_a_dead_supervisor_counts_as_leaving(supervisor: Supervisor, departures: list[Roster]) -> None:
    supervisor.pipe.close()
    supervisor.runs()
    assert len(departures) == 1


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Restores the handler."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
def test_signals_to_the_group_are_ignored(ray: FakeRay) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    join(PLAN.cluster)
    assert ray.is_joined and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@pytest.mark.usefixtures("sigterm")
def test_rays_error_thread_is_stopped(ray: FakeRay) -> None:
    """`test_actors` checks it with Ray itself."""
    stopped = threading.Event()
    ray._private = SimpleNamespace(worker=SimpleNamespace(global_worker=SimpleNamespace(threads_stopped=stopped)))
    join(PLAN.cluster)
    assert ray.is_joined and stopped.is_set()


def test_the_session_database_identifies_a_service_without_its_password() -> None:
    assert "memory" in PLAN.serves
    databases = ("postgresql://me:secret@h/one", "postgresql://h/one", "postgresql://h/two")
    configs = [msgspec.structs.replace(CONFIG, pool=PoolConfig(state_db=database)) for database in databases]
    first, same, other = (msgspec.structs.replace(PLAN, config=config).serves for config in configs)
    assert first == same != other and "secret" not in first
