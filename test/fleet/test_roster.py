"""Who is there, who is wanted, who leaves: a service's roster of a cluster that is played (`fake_ray`)."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest

from rwkv_batch.config import EngineConfig
from rwkv_batch.errors import StartupError
from rwkv_batch.fleet.actors import engine_directory, process, roster
from rwkv_batch.fleet.actors.address import ClusterAddress
from rwkv_batch.fleet.actors.driver import join
from rwkv_batch.fleet.actors.placement import place
from rwkv_batch.fleet.actors.plan import ClusterPlan
from rwkv_batch.fleet.actors.roster import Roster
from rwkv_batch.ipc.process import LogStyle
from rwkv_batch.ipc.served_model import ModelStatus
from state_pool.config import PoolConfig
from test.fleet.fake_ray import ActorUnavailableError, FakeRay, GetTimeoutError, RayActorError

STYLE = LogStyle()
CONFIG = EngineConfig(model_path="/x.pth", pool=PoolConfig(state_db=""))
PLAN = ClusterPlan(cluster=ClusterAddress("auto", "", "chat"), replicas=0, config=CONFIG, factory="m:E")
OTHER = "/y.pth (sessions in memory)"
READY, LOADING, FAILED, UNLOADING = ModelStatus.READY, ModelStatus.LOADING, ModelStatus.FAILED, ModelStatus.UNLOADING


class Made:
    """A roster whose names are looked at when the test says so."""

    def __init__(self, ray: FakeRay, replicas: int = 0, is_up: bool = False) -> None:
        self.ray = ray
        self.roster = Roster(msgspec.structs.replace(PLAN, replicas=replicas), STYLE)
        self.roster.begin(is_up)

    def poll(self) -> dict[str, ModelStatus]:
        """How the engines stand, once the head and each of them have been asked."""
        self.engine_directory.poll()
        for _ in range(2):
            table = self.roster.poll()
        return {told.engine: told.status for told in table}

    @property
    def engine_directory(self) -> engine_directory.EngineDirectory:
        return self.roster._directory


@pytest.fixture
def made(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Made]:
    monkeypatch.setattr(engine_directory.EngineDirectory, "_poll_loop", lambda self: None)
    monkeypatch.setattr(roster, "_PLACE_S", 0.0)
    monkeypatch.setattr(engine_directory, "_CURRENT_S", float("inf"))
    return lambda *arguments, **more: Made(ray, *arguments, **more)


# Who is there ------------------------------------------------------------------------------------------------


def test_a_service_of_another_model_places_nothing_and_is_no_watcher(made: Callable[..., Made], ray: FakeRay) -> None:
    engine = ray.engine("engine-0", OTHER)
    with pytest.raises(StartupError, match="engine-0 of the cluster serves"):
        made(replicas=4)
    assert list(ray.actors) == ["engine-0"] and engine.asked == [("info",)]


def test_an_engine_of_another_model_is_left_alone_by_a_service_that_runs(
    made: Callable[..., Made], ray: FakeRay
) -> None:
    ray.engine("engine-0", PLAN.serves)
    service = made()
    assert service.poll() == {"engine-0": READY}
    other = ray.engine("engine-1", OTHER)
    for _ in range(3):
        assert service.poll() == {"engine-0": READY}
    assert len(other.asked) == 1, "nobody asks for it any more: it leaves"
    service.roster.add(())
    service.poll()
    assert ray.actors["engine-1"] is other and ray.actors["engine-2"].serves == PLAN.serves


def test_of_two_services_that_come_at_once_the_one_with_the_first_engine_stays(
    made: Callable[..., Made], ray: FakeRay
) -> None:
    late, first = made(replicas=2), ray.engine("engine-0", OTHER)
    with pytest.raises(StartupError, match="engine-0 of the cluster serves"):
        late.poll()
    late.roster.remove_created()
    assert ray.actors == {"engine-0": first}, "the one that it had placed is gone"


def test_an_actor_that_has_died_is_looked_up_again(made: Callable[..., Made], ray: FakeRay) -> None:
    dead = ray.engine("engine-0", PLAN.serves)
    service = made()
    assert service.poll() == {"engine-0": READY}
    dead.dies = ActorUnavailableError()
    assert service.poll() == {"engine-0": LOADING}
    dead.dies = RayActorError()
    ray.engine("engine-0", PLAN.serves)  # placed anew by another machine between two looks
    service.poll()
    assert service.poll() == {"engine-0": READY}


# Who is wanted -----------------------------------------------------------------------------------------------


def test_what_leaves_as_a_service_comes_is_placed_again(made: Callable[..., Made], ray: FakeRay) -> None:
    ray.engine("engine-0", PLAN.serves, UNLOADING)
    service = made(replicas=2)
    assert service.poll() == {"engine-0": UNLOADING}
    assert list(ray.actors) == ["engine-0", "engine-1"]
    del ray.actors["engine-0"]  # it has drained
    service.poll()
    assert sorted(ray.actors) == ["engine-0", "engine-1"]


@pytest.mark.parametrize("replicas", [0, 3])
def test_where_all_have_left_all_are_placed_again(made: Callable[..., Made], ray: FakeRay, replicas: int) -> None:
    for number in range(max(1, replicas)):
        ray.engine(f"engine-{number}", PLAN.serves)
    service = made(replicas)
    placed = list(service.poll())
    ray.actors.clear()  # nobody had asked for them for a minute
    service.poll()
    assert list(ray.actors) == placed


def test_where_two_machines_remove_the_last_two_one_is_placed_anew(made: Callable[..., Made], ray: FakeRay) -> None:
    one, other = made(replicas=2), made()
    one.poll()
    for engine in ray.actors.values():
        engine.becomes(READY)
    assert one.poll() == other.poll() == {"engine-0": READY, "engine-1": READY}
    one.roster.remove("engine-0")
    other.roster.remove("engine-1")
    one.poll()
    other.poll()
    assert [engine.drains for engine in ray.actors.values()] == [[False], [False]]
    ray.actors.clear()
    one.poll()
    other.poll()
    assert list(ray.actors) == ["engine-1"], "which the first one wants still"


def test_what_was_removed_is_not_placed_again(made: Callable[..., Made], ray: FakeRay) -> None:
    service = made(replicas=2)
    service.poll()
    for engine in ray.actors.values():
        engine.becomes(READY)
    service.poll()
    service.roster.remove("engine-1")
    service.poll()
    assert ray.actors["engine-1"].drains == [False]
    del ray.actors["engine-1"]
    assert service.poll() == {"engine-0": READY} and list(ray.actors) == ["engine-0"]
    again = made(replicas=2, is_up=True)  # the process that follows the cluster was started again
    assert again.poll() == {"engine-0": READY} and list(ray.actors) == ["engine-0"]
    ray.actors.clear()
    service.poll()
    assert list(ray.actors) == ["engine-0"]


def test_two_that_are_added_at_once_are_two(made: Callable[..., Made], ray: FakeRay) -> None:
    ray.engine("engine-0", PLAN.serves)
    service = made()
    service.poll()
    ray.engine("engine-1", PLAN.serves)  # by another machine: the head has not told of it here
    service.roster.add(())
    service.roster.poll()
    service.roster.add(())
    service.roster.poll()
    assert list(ray.actors) == ["engine-0", "engine-1", "engine-2", "engine-3"]


def test_what_cannot_be_placed_now_is_placed_later(made: Callable[..., Made], ray: FakeRay) -> None:
    ray.engine("engine-0", PLAN.serves)
    service = made(replicas=2)
    service.roster.add(())
    ray.fault = GetTimeoutError("the head is slow")
    service.roster.poll()
    ray.fault = None
    service.poll()
    assert list(ray.actors) == ["engine-0", "engine-1", "engine-2"]


def test_an_engine_that_cannot_load_ends_a_service_that_never_served_and_no_other(
    made: Callable[..., Made], ray: FakeRay
) -> None:
    service = made()
    service.poll()
    ray.actors["engine-0"].becomes(FAILED, "no such file")
    with pytest.raises(StartupError, match="no such file"):
        service.poll()
    ray.actors["engine-0"].becomes(READY)
    service = made()
    service.poll()
    service.roster.add(("cuda:9",))
    service.poll()
    ray.actors["engine-1"].becomes(FAILED, "no such device")
    assert service.poll() == {"engine-0": READY, "engine-1": FAILED}
    assert [told.error for told in service.roster.poll()] == ["", "no such device"]


def test_that_an_engine_takes_cpus_for_want_of_a_gpu_is_told(ray: FakeRay, caplog: pytest.LogCaptureFixture) -> None:
    for gpus, device, lines in ((0, "auto", 1), (1, "auto", 1), (0, "cpu", 1)):
        ray.gpus = gpus
        place(f"engine-{device}{gpus}", EngineConfig(model_path="", devices=(device,)), "", STYLE, "")
        assert len([one for one in caplog.messages if "has no GPU:" in one]) == lines


# Who leaves --------------------------------------------------------------------------------------------------


@pytest.fixture
def waiting(made: Callable[..., Made], ray: FakeRay) -> Made:
    """A service with an engine that is ready and one for which no node has room."""
    service = made(replicas=2)
    service.poll()
    ray.actors["engine-0"].becomes(READY)
    ray.actors["engine-1"].has_process = False
    service.poll()
    assert service.poll() == {"engine-0": READY, "engine-1": LOADING}
    return service


def test_an_engine_without_a_node_holds_up_no_restart(waiting: Made, ray: FakeRay) -> None:
    assert "no node" in waiting.roster.poll()[1].error
    waiting.roster.restart("all")
    waiting.poll()
    ray.actors["engine-0"].becomes(READY)
    waiting.poll()
    waiting.poll()
    assert ray.actors["engine-0"].drains == [True] and ray.actors["engine-1"].drains == []


def test_an_engine_without_a_node_can_be_removed(waiting: Made, ray: FakeRay) -> None:
    waiting.roster.remove("engine-1")
    waiting.poll()
    assert waiting.poll() == {"engine-0": READY} and list(ray.actors) == ["engine-0"]


def test_an_engine_is_removed_when_the_head_is_back(
    made: Callable[..., Made], ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        ray.engine(f"engine-{number}", PLAN.serves)
    service = made()
    service.poll()
    monkeypatch.setattr(engine_directory, "_CURRENT_S", 0.0)  # it has said nothing for a while
    ray.fault = GetTimeoutError("the head is away")
    service.roster.remove("engine-1")
    service.roster.add(())
    service.roster.restart("engine-0")
    for _ in range(2):
        assert [told.status for told in service.roster.poll()] == [READY, READY], "it serves until then"
    assert not any(engine.drains for engine in ray.actors.values())
    monkeypatch.setattr(engine_directory, "_CURRENT_S", float("inf"))
    service.roster.poll()  # it stops answering in that moment
    ray.fault = None
    service.poll()
    assert ray.actors["engine-1"].drains == [False] and "engine-2" in ray.actors
    ray.actors["engine-1"].becomes(READY)  # the head was away when it left, and has had it started anew
    service.poll()
    service.poll()
    assert ray.actors["engine-1"].drains == [False, False]
    del ray.actors["engine-1"]
    service.poll()
    ray.engine("engine-1", PLAN.serves)  # another one
    service.poll()
    assert ray.actors["engine-1"].drains == []


def test_an_engine_that_has_the_name_of_one_that_was_removed_stays(made: Callable[..., Made], ray: FakeRay) -> None:
    for number in range(2):
        ray.engine(f"engine-{number}", PLAN.serves)
    service = made()
    service.poll()
    service.roster.remove("engine-1")
    service.poll()
    gone = ray.actors["engine-1"]
    assert gone.drains == [False]
    gone.dies = RayActorError("it has left")
    ray.engine("engine-1", PLAN.serves)  # placed by another machine between two looks of this one
    for _ in range(4):
        service.poll()
    assert service.poll() == {"engine-0": READY, "engine-1": READY} and ray.actors["engine-1"].drains == []


def test_engines_without_a_node_leave_with_the_service_that_placed_them(waiting: Made, ray: FakeRay) -> None:
    ray.actors["engine-0"].is_last = False
    assert not waiting.roster.leave() and len(ray.actors) == 2, "another service has them"
    ray.actors["engine-0"].has_process = False
    waiting.poll()
    ray.actors["engine-0"].dies = ActorUnavailableError()
    waiting.poll()
    ray.actors["engine-0"].dies = None
    waiting.poll()
    waiting.roster.leave()
    assert not ray.actors, "nobody can tell that it was the last"


# The process -------------------------------------------------------------------------------------------------


class Supervisor:
    """At the other end of the pipe of the process that follows the cluster."""

    def __init__(self) -> None:
        self.pipe, self._theirs = multiprocessing.Pipe()
        self.pipe.send(("begin", False))

    def runs(self) -> None:
        """The process, until it ends."""
        process.run_cluster(PLAN, STYLE, "cluster", self._theirs)


@pytest.fixture
def supervisor(made: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    poll = Roster.poll
    monkeypatch.setattr(Roster, "poll", lambda self: (self._directory.poll(), poll(self))[1])
    monkeypatch.setattr(process, "become_child", lambda name, style: None)
    monkeypatch.setattr(process, "POLL_INTERVAL_S", 0.0)
    return Supervisor()


@pytest.fixture
def departures(monkeypatch: pytest.MonkeyPatch) -> list[Roster]:
    """Rosters that have left."""
    left: list[Roster] = []
    monkeypatch.setattr(Roster, "leave", lambda self: left.append(self))
    return left


def test_a_service_that_cannot_start_leaves_nothing_behind(supervisor: Supervisor, ray: FakeRay) -> None:
    ray.begins_as = (FAILED, "no such file")
    supervisor.runs()
    told = [supervisor.pipe.recv() for _ in range(2)]
    assert told[-1] == ("failed", "no such file") and not ray.actors


@pytest.mark.parametrize("fault", [GetTimeoutError("slow"), OSError("the head"), RayActorError("away")])
def test_a_head_that_is_slow_is_no_supervisor_that_is_gone(
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
    monkeypatch.setattr(engine_directory.EngineDirectory, "poll", fails)
    supervisor.runs()
    assert departures == [], "nor if it is slow at once"


def test_a_supervisor_that_is_gone_has_left(supervisor: Supervisor, departures: list[Roster]) -> None:
    supervisor.pipe.close()
    supervisor.runs()
    assert len(departures) == 1


def test_a_signal_for_the_whole_service_is_the_supervisors_business(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        join(PLAN.cluster)
        assert ray.is_joined and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_thread_asks_for_errors_to_print_without_a_pause(ray: FakeRay) -> None:
    """`test_actors` has it with Ray itself."""
    stopped = threading.Event()
    ray._private = SimpleNamespace(worker=SimpleNamespace(global_worker=SimpleNamespace(threads_stopped=stopped)))
    before = signal.getsignal(signal.SIGTERM)
    try:
        join(PLAN.cluster)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ray.is_joined and stopped.is_set()


def test_services_with_other_databases_are_others_and_no_password_is_told() -> None:
    assert "memory" in PLAN.serves
    databases = ("postgresql://me:secret@h/one", "postgresql://h/one", "postgresql://h/two")
    configs = [msgspec.structs.replace(CONFIG, pool=PoolConfig(state_db=database)) for database in databases]
    first, same, other = (msgspec.structs.replace(PLAN, config=config).serves for config in configs)
    assert first == same != other and "secret" not in first
