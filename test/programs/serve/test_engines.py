"""The supervisor's table of engines: start, stop, restart and setup of each. No engine runs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from programs.serve.engine_process import model_config, reason_for_request
from programs.serve.engines import MIN_IDLE_S, Engines, ModelLimits
from rwkv_batch.config import EngineConfig
from rwkv_batch.ipc.process import LogConfig
from rwkv_batch.ipc.served_model import ModelCommand, ModelSpec, ModelStatus
from state_pool.config import PoolConfig


class NoProcesses:
    """A multiprocessing context that cannot create processes."""

    def Pipe(self) -> Any:  # noqa: N802 - as multiprocessing calls it
        return multiprocessing.Pipe()

    def Process(self, **arguments: Any) -> Any:  # noqa: N802 - likewise
        raise BlockingIOError(11, "Resource temporarily unavailable")


class Processes:
    """A multiprocessing context of fake processes that live until `ended`."""

    class Process:
        """A process with the methods that the supervisor calls."""

        sentinel, exitcode, pid, ended = 0, 0, 0, False

        def __init__(self, **_: Any) -> None:
            pass

        def start(self) -> None:
            """It has begun."""

        def join(self, timeout: float | None = None) -> None:
            """It has ended."""

        def is_alive(self) -> bool:
            return not self.ended

        def kill(self) -> None:
            self.ended = True

    def Pipe(self) -> Any:  # noqa: N802 - as multiprocessing calls it
        return multiprocessing.Pipe()


OURS = EngineConfig(model_path="", model_name="ours")


def table_of(
    folder: Path,
    context: Any,
    count: int = 4,
    idle_s: float = 0,
    replicas: Sequence[tuple[str, ...]] = (),
    config: EngineConfig = OURS,
) -> Engines:
    """Of a service with up to `count` more models."""
    limits = ModelLimits(count, idle_s, kill_grace_s=1)
    return Engines(config, str(folder), LogConfig(), context, lambda *_: None, "", limits, replicas)


def test_a_start_error_names_the_fields_of_the_request() -> None:
    reason = "/models/a/b.pth: name another in --pp-devices, like cpu, or lower --max-running; check --model-path"
    info = "a/b.pth: name another in `devices`, like cpu, or lower `max_running`; check `file`"
    assert reason_for_request(reason, "/models", is_own=False) == info
    assert reason_for_request(f"{reason} and --max-rows", "", is_own=False) == f"/models/{info} and --max-rows"
    assert reason_for_request(reason, "", is_own=True) == reason.replace("--pp-devices", "`devices`")


def test_a_system_without_processes_fails_the_model_and_not_the_supervisor(tmp_path: Path) -> None:
    models = table_of(tmp_path, NoProcesses())
    assert models.handle_command(ModelCommand(1, ModelSpec(name="small", file="x.pth"))) is None
    models.poll()
    (info,) = models.registered
    assert info.status is ModelStatus.FAILED and "Resource temporarily unavailable" in info.error
    assert models.wait_s() is None and not models.any_alive


def test_an_idle_model_is_unloaded_before_the_next_starts(tmp_path: Path) -> None:
    models = table_of(tmp_path, Processes(), count=2, idle_s=3600)

    def ask(name: str) -> str | None:
        return models.handle_command(ModelCommand(1, ModelSpec(name=name, file="x.pth")))

    assert ask("a") is None and ask("b") is None
    models.poll()
    a, b = models._model("a"), models._model("b")
    assert a is not None and b is not None
    for engine in (a, b):
        engine.set_status(ModelStatus.READY, has_served=True)
    assert "the limit is 2" in str(ask("c")), "both were used just now"
    a.last_used -= MIN_IDLE_S + 1
    assert ask("c") is None and [a.status, b.status] == [ModelStatus.UNLOADING, ModelStatus.READY]
    assert "wait for its end" in str(ask("a")) and "unload it first" in str(ask("b"))
    models.poll()
    c = models._model("c")
    assert c is not None and c.child.process is None and models.wait_s() != 0
    Path(a.info.address).touch()  # as its process does
    process: Any = a.child.process
    process.ended = True
    models.poll()
    assert list(tmp_path.iterdir()) == [], "its socket is removed"
    models.poll()
    assert models._model("a") is None and c.child.process is not None
    assert "the limit is 2" in str(ask("d"))


def test_engines_that_are_ready_or_failed_are_restarted(tmp_path: Path) -> None:
    engines = table_of(tmp_path, Processes(), count=0, replicas=[(), ()])
    engines.poll()
    ready, other = engines._engines.values()
    ready.set_status(ModelStatus.READY, has_served=True)
    for status in (ModelStatus.LOADING, ModelStatus.UNLOADING):
        other.set_status(status)
        refusal = engines.handle_command(ModelCommand(1, restart_engine="engine-1"))
        assert refusal is not None and "'engine-1'" in refusal and status in refusal
    other.set_status(ModelStatus.LOADING)
    assert engines.handle_command(ModelCommand(1, restart_engine="all")) is None
    engines.poll()
    assert ready.status is ModelStatus.READY, "it alone serves while the other one loads"
    other.set_status(ModelStatus.FAILED, error="no memory")
    engines.poll()
    assert ready.status is ModelStatus.UNLOADING and other.status is ModelStatus.FAILED
    process: Any = ready.child.process
    process.ended = True
    engines.poll()
    engines.poll()
    assert ready.status is ModelStatus.LOADING and other.status is ModelStatus.FAILED, "one after the other"
    ready.set_status(ModelStatus.READY, has_served=True)
    failed: Any = other.child.process
    engines.poll()
    assert ready.status is ModelStatus.READY and other.status is ModelStatus.LOADING and other.info.error == ""
    engines.poll()
    assert other.child.process not in (None, failed)


def test_the_only_ready_engine_stays_until_another_is_ready(tmp_path: Path) -> None:
    engines = table_of(tmp_path, Processes(), count=0, replicas=[(), (), ()])
    engines.poll()
    ready, other, third = engines._engines.values()
    ready.set_status(ModelStatus.READY, has_served=True)
    assert "last one" in str(engines.handle_command(ModelCommand(1, remove_engine="engine-0"))), "the others load"
    assert engines.handle_command(ModelCommand(2, remove_engine="engine-2")) is None, "nobody waits for one that loads"
    other.set_status(ModelStatus.READY, has_served=True)
    assert engines.handle_command(ModelCommand(3, remove_engine="engine-0")) is None
    assert [ready.status, other.status] == [ModelStatus.UNLOADING, ModelStatus.READY]
    assert third not in engines._engines.values()


@pytest.mark.parametrize("database", ["postgresql://db/sessions", "s.db"])
def test_two_models_never_share_file_names(tmp_path: Path, database: str) -> None:
    config = EngineConfig(model_path="", model_name="ours", pool=PoolConfig(state_db=database))
    models = table_of(tmp_path, Processes(), config=config)
    for name in ("a", "b"):
        assert models.handle_command(ModelCommand(1, ModelSpec(name=name, file="x.pth"))) is None
    found = [models._model(name) for name in ("a", "b")]
    stems = {engine.child.arguments[0].pool.files_stem for engine in found if engine is not None}
    assert len({*stems, config.pool.files_stem}) == 3


@pytest.mark.parametrize("name", ["ours", "rwkv7"])
def test_no_model_takes_a_name_of_the_services_own_model(tmp_path: Path, name: str) -> None:
    models = table_of(tmp_path, NoProcesses())
    assert "is loaded" in str(models.handle_command(ModelCommand(1, ModelSpec(name=name, file="x.pth"))))
    assert models.registered == ()


@pytest.mark.parametrize(
    ("threads", "device", "engines", "left"),
    [(0, "cpu", 1, False), (4, "cpu", 1, True), (5, "cpu", 1, False), (4, "cpu", 2, False), (0, "cuda:1", 4, True)],
)
def test_loading_uses_only_idle_cores_if_there_are_any(
    threads: int, device: str, engines: int, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading on idle cores only would never end if all were busy. Serving may use every core."""
    monkeypatch.setattr("programs.serve.engine_process.cores", lambda: 8)
    base = EngineConfig(model_path="a", threads=threads, devices=(device,))
    config = model_config(base, ModelSpec(name="b", file="/b"), engines)
    assert config.loads_at_low_priority and config.only_idle_cores is left


@pytest.mark.parametrize(("pieces", "kept"), [(2, 0), (0, 0), (-1, -1)])
def test_layer_settings_do_not_apply_to_other_models(pieces: int, kept: int) -> None:
    """Another model has other layers and devices; its engine would fail at start."""
    base = EngineConfig(model_path="a", devices=("cuda:0",), layers=(32,), resident=(20,), batch_step_layers=pieces)
    config = model_config(base, ModelSpec(name="b", file="/b", devices=("cpu",)))
    assert (config.layers, config.resident, config.batch_step_layers) == ((), (), kept)
    assert model_config(base, ModelSpec(name="b", file="/b")).resident == (20,)


@pytest.mark.parametrize(("dtype", "bits"), [("", 16), ("int8", 16), ("int4", 8)])
def test_bits_of_inputs_apply_to_int8_models(dtype: str, bits: int) -> None:
    base = EngineConfig(model_path="a", dtype="int8", activation_bits=16)
    assert model_config(base, ModelSpec(name="b", file="/b", dtype=dtype)).activation_bits == bits


def test_other_models_inherit_state_format_and_kernels_by_default() -> None:
    base = EngineConfig(model_path="a", wkv_state="int8", kernels="cuda")
    taken = model_config(base, ModelSpec(name="b", file="/b"))
    assert (taken.wkv_state, taken.kernels, taken.auto_fallback_fields) == ("int8", "cuda", ("wkv_state", "kernels"))
    asked = model_config(base, ModelSpec(name="b", file="/b", wkv_state="fp16"))
    assert (asked.wkv_state, asked.kernels, asked.auto_fallback_fields) == ("fp16", "cuda", ("kernels",))
