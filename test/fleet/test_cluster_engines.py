"""A service's side of a cluster, without Ray: settings, placement, commands to the cluster process."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from programs.serve.cluster_engines import ClusterEngines
from programs.settings import SettingsError, parse_settings
from rwkv_batch.config import EngineConfig
from rwkv_batch.errors import StartupError
from rwkv_batch.fleet.actors.placement import bundle_of, placed_config
from rwkv_batch.fleet.actors.plan import ClusterAddress, ClusterPlan, EngineAddress, parse_address
from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.ipc.served_model import ModelCommand, ModelStatus
from state_pool.config import PoolConfig
from test.fleet.fake_clients import engine_info
from test.serving import ROOT

CLUSTER = ClusterAddress("10.0.0.1:6379", "10.0.0.2", "chat")
CONFIG = EngineConfig(model_path="/models/a.pth", pool=PoolConfig(state_db="postgresql://h/d", service="s"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cluster", "auto"], "--state-db postgresql://"),
        (["--cluster", "auto", "--state-db", "/var/sessions.db"], "cannot share the file /var/sessions.db"),
        (["--cluster", "host", "--state-db", ""], "HOST:PORT"),
        (["--cluster", "ray://h:1|x:1", "--state-db", ""], "HOST:PORT"),
        (["--cluster", "auto", "--state-db", "", "--cluster-node", "here"], "--cluster-node must be an IP address"),
        (
            ["--cluster", "auto", "--state-db", "", "--cluster-service", "a|b"],
            "--cluster-service must consist of letters",
        ),
    ],
)
def test_invalid_cluster_settings_are_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse_settings(arguments, {})
    assert says in str(refused.value)


def test_engines_anywhere_may_share_a_server_or_keep_sessions_in_memory() -> None:
    for database in ("", "postgresql://user:secret@host/db"):
        service = parse_settings(["--cluster", "auto", "--state-db", database], {}).service
        assert (service.cluster, service.cluster_service, service.cluster_node) == ("auto", "rwkv-batch", "")


def test_an_address_survives_a_round_trip() -> None:
    address = EngineAddress(CLUSTER, "engine-3")
    assert parse_address(str(address)) == address
    assert parse_address(str(EngineAddress(ClusterAddress("auto", "", "x"), "engine-0"))).cluster.node == ""


@pytest.mark.parametrize(
    ("devices", "has_gpus", "bundle", "placed"),
    [
        (("auto",), True, {"GPU": 1.0}, ("cuda:0",)),
        (("auto",), False, {"CPU": 1.0}, ("cpu",)),
        (("cpu",), True, {"CPU": 1.0}, ("cpu",)),
        (("cuda:2", "cuda:3"), True, {"GPU": 2.0}, ("cuda:0", "cuda:1")),
        (("cuda:5", "cpu"), True, {"GPU": 1.0}, ("cuda:0", "cpu")),
    ],
)
def test_an_engine_sees_only_its_own_devices(
    devices: tuple[str, ...], has_gpus: bool, bundle: dict[str, float], placed: tuple[str, ...]
) -> None:
    config = msgspec.structs.replace(CONFIG, devices=devices, replica=3, replicas=8)
    assert bundle_of(config, has_gpus) == bundle
    there = placed_config(config, bundle)
    assert there.devices == placed and (there.replica, there.replicas) == (0, 1)
    assert there.threads == (1 if "CPU" in bundle else 0)


def test_each_engine_has_its_devices_and_its_name_in_the_database() -> None:
    plan = ClusterPlan(
        cluster=CLUSTER, replicas=2, replica_devices=(("cuda:0",), ("cuda:1",)), config=CONFIG, factory="m:E"
    )
    assert [plan.devices_of(number) for number in range(3)] == [("cuda:0",), ("cuda:1",), ("cuda:0",)]
    assert plan.config_of("engine-1", ("cuda:1",)).pool.engine == "engine-1"
    assert "/models/a.pth" in plan.serves and "postgresql://h/d" in plan.serves


def test_engines_find_files_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = msgspec.structs.replace(
        CONFIG, model_path="m.pth", adapters=("a.pth:0.5",), states=("poet=p.pth",), served_adapters=("x=/b.pth:2",)
    )
    plan = ClusterPlan(cluster=CLUSTER, replicas=1, config=config, factory="m:E").with_absolute_paths()
    assert plan.config.model_path == f"{tmp_path}/m.pth" and plan.config.adapters == (f"{tmp_path}/a.pth:0.5",)
    assert plan.config.states == (f"poet={tmp_path}/p.pth",) and plan.config.served_adapters == ("x=/b.pth:2",)


@pytest.mark.cluster
def test_a_process_outside_a_cluster_starts_none() -> None:
    pytest.importorskip("ray")
    says = "Ray has not been started"
    program = (
        "from rwkv_batch.fleet.actors.driver import load_ray\n"
        "ray = load_ray()\n"
        "try:\n    ray.get_actor('engine-0', 'chat')\nexcept ray.exceptions.RaySystemError as error:\n    print(error)"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert says in result.stdout, result.stderr


class FakeChild:
    def __init__(self) -> None:
        self.says: list[tuple[str, Any]] = []
        self.result: list[Any] = []
        self.process: object | None = object()
        self.is_alive = True
        self.restart_at = 0.0
        self.starts = 0
        self.can_start = True
        self.waitables: list[Any] = []

    def messages(self) -> list[tuple[str, Any]]:
        said, self.says = self.says, []
        return said

    def send_command(self, command: Any) -> None:
        self.result.append(command)

    def reap(self) -> str:
        self.process = None
        return "SIGKILL"

    def restart_later(self, cause: str) -> None:
        pass

    def try_start(self) -> bool:
        if self.can_start:
            self.process, self.is_alive = object(), True
            self.starts += 1
        return self.can_start


class NoModels:
    registered = ()
    any_alive = False
    handled: Any = None

    def poll(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def wait_s(self) -> None:
        return None

    def handle_command(self, command: ModelCommand) -> str:
        return "of this machine"


def make_engines(*names: str) -> tuple[ClusterEngines, FakeChild]:
    models: Any = NoModels()
    child: Any = FakeChild()
    engines = ClusterEngines(models, child, 7.0)
    child.says = [("engines", tuple(engine_info(name) for name in names))] if names else []
    engines.poll()
    return engines, child


def test_valid_commands_are_sent_to_the_cluster() -> None:
    engines, child = make_engines("engine-0", "engine-1")
    assert engines.is_up and [one.engine for one in engines.registered] == ["engine-0", "engine-1"]
    assert engines.handle_command(ModelCommand(1, add_engine=("cuda:1",))) is None
    assert engines.handle_command(ModelCommand(2, remove_engine="engine-1")) is None
    assert engines.handle_command(ModelCommand(3, restart_engine="all")) is None
    assert child.result == [("add", ("cuda:1",)), ("remove", "engine-1"), ("restart", "all")]
    assert "no engine 'engine-7'" in (engines.handle_command(ModelCommand(4, restart_engine="engine-7")) or "")
    assert engines.handle_command(ModelCommand(5, unload="x")) == "of this machine"
    child.says = [("engines", (engine_info("engine-0"),))]
    engines.poll()
    assert "last one" in (engines.handle_command(ModelCommand(6, remove_engine="engine-0")) or "")
    assert len(child.result) == 3


def test_the_last_remaining_engine_cannot_be_removed() -> None:
    engines, child = make_engines("engine-0", "engine-1")
    assert engines.handle_command(ModelCommand(1, remove_engine="engine-1")) is None
    child.says = [
        ("engines", (engine_info("engine-0"), engine_info("engine-1")))
    ]  # the head is unreachable: both continue
    engines.poll()
    assert "last one" in (engines.handle_command(ModelCommand(2, remove_engine="engine-0")) or "")
    assert engines.handle_command(ModelCommand(3, remove_engine="engine-1")) is None, "a command may be repeated"
    assert child.result == [("remove", "engine-1")] * 2
    child.says = [
        ("engines", (engine_info("engine-0"),)),
        ("engines", (engine_info("engine-0"), engine_info("engine-1"))),
    ]
    engines.poll()
    assert engines.handle_command(ModelCommand(4, remove_engine="engine-0")) is None, "a new engine has that name"


def test_commands_to_an_ended_process_are_dropped() -> None:
    engines, child = make_engines("engine-0", "engine-1")
    engines.handle_command(ModelCommand(1, remove_engine="engine-1"))
    child.is_alive = False
    engines.poll()
    assert engines.handle_command(ModelCommand(2, remove_engine="engine-0")) is None


def test_a_cluster_that_cannot_be_joined_ends_a_service_that_never_served() -> None:
    engines, child = make_engines()
    child.says = [("failed", "no such cluster")]
    with pytest.raises(StartupError, match="no such cluster"):
        engines.poll()
    engines, child = make_engines("engine-0")
    child.says = [("failed", "the cluster is gone")]
    engines.poll()
    assert engines.registered, "known engines continue"


def test_the_cluster_process_is_restarted_until_the_service_leaves() -> None:
    engines, child = make_engines("engine-0")
    child.is_alive = False
    engines.poll()
    assert child.starts == 1 and engines.registered
    engines.drain()
    assert child.result == [("begin", True), ("leave", 7.0)]
    child.is_alive = False
    engines.poll()
    assert child.starts == 1 and not engines.any_alive


def test_a_process_that_cannot_be_forked_does_not_end_the_service() -> None:
    engines, child = make_engines("engine-0")
    child.is_alive = child.can_start = False
    engines.poll()
    assert engines.registered and engines.wait_s() == 0.0
    child.can_start = True
    engines.poll()
    assert child.starts == 1 and child.result == [("begin", True)]


def test_a_service_without_an_engine_begins_again() -> None:
    engines, child = make_engines()
    child.is_alive = False
    engines.poll()
    assert child.result == [("begin", False)]


def test_an_engine_that_failed_can_be_restarted_and_one_that_loads_cannot() -> None:
    engines, child = make_engines()
    child.says = [
        ("engines", (engine_info("engine-0", ModelStatus.FAILED), engine_info("engine-1", ModelStatus.LOADING)))
    ]
    engines.poll()
    assert engines.handle_command(ModelCommand(1, restart_engine="engine-0")) is None
    assert "wait until it is ready" in (engines.handle_command(ModelCommand(2, restart_engine="engine-1")) or "")


def test_a_link_that_fails_unexpectedly_is_made_again() -> None:
    attempts: list[int] = []
    again = threading.Event()

    def connect() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("an unknown status")
        again.set()

    client = EngineClient(connect)
    client.start("http-0")
    assert again.wait(60)
    client.stop()
