"""/loadmodel for a name that is in use: which engine checks the files, and which commands the supervisor gets."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from routes.config import HttpConfig
from routes.context import Context, Readiness, RequestLimiter
from routes.model_registry import ModelRegistry, connect_model
from routes.models import LoadBody, ModelQuery, model, model_spec, models
from routes.rwkv_infer import LoadModelBody, load
from rwkv_batch.calls import CheckModel
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.fleet.quota_ledger import QuotaLedger
from rwkv_batch.ipc.served_model import ModelCommand, ModelSpec, ModelStatus, ServedModel
from rwkv_batch.ipc.wire import NO_LOAD, Heartbeat, SocketLink, ToEngine, ToWorker, to_engine_decoder
from test.serving import wait_for

READY = ModelStatus.READY
ELSEWHERE = "10.0.0.7"


class Engine:
    """The engine of a machine that has the files or not."""

    num_jobs = 0
    is_connected = True

    def __init__(self, has_files: bool) -> None:
        self.has_files = has_files
        self.checked: list[str] = []

    def call(self, call: CheckModel, reply: Any) -> None:
        self.checked.append(Path(call.file).name)
        wrong = ServiceError(ErrorKind.INVALID_FIELD, f"file: {call.file} does not exist", field="file")
        reply("a model" if self.has_files else wrong)

    def update(self, engines: object) -> None: ...

    def stop(self) -> None: ...


class Machine:
    """An HTTP worker, and a supervisor that executes commands at once."""

    def __init__(self, folder: Path, node: str, **loaded: ModelStatus) -> None:
        """Create the machine.

        node: machine of the service's own engine
        loaded: models loaded on this machine
        """
        (folder / "new.pth").touch()
        config = HttpConfig(models_dir=str(folder), model_name="rwkv7")
        own = ServedModel(spec=ModelSpec(name="rwkv7", file=""), status=READY, address="own", since=0, is_own=True)
        self.own, self.other = Engine(not node), Engine(True)
        self.commands: list[str] = []
        self.models = ModelRegistry(self.send_command, lambda model: (self.context_of(self.other, config), self.other))  # type: ignore[arg-type,return-value]
        self.context = self.context_of(self.own, config)
        self.context.models = self.models
        loaded = [
            ServedModel(spec=ModelSpec(name=name, file=""), status=status, address=name, since=0)
            for name, status in loaded.items()
        ]
        self.registered = [msgspec.structs.replace(own, node=node), *loaded]
        self.models.update(self.registered)

    def context_of(self, engine: Engine, config: HttpConfig) -> Context:
        return Context(engine, config, RequestLimiter(8), Readiness(0))  # type: ignore[arg-type]

    def has(self, name: str) -> bool:
        return any(one.spec.name == name for one in self.registered)

    def send_command(self, command: ModelCommand) -> None:
        if command.is_barrier:
            self.models.command_answered(command.number, None)
            return
        name = command.spec.name if command.spec is not None else command.unload
        self.commands.append(f"{'load' if command.spec is not None else 'unload'} {name}")
        refusal = f"name: {name} is here" if self.has(name) else None
        if command.unload:
            refusal = None if self.has(name) else f"name: no {name} here"
            self.registered = [one for one in self.registered if one.spec.name != name]
        elif command.spec is not None and refusal is None:
            self.registered.append(ServedModel(spec=command.spec, status=READY, address=f"new {name}", since=1))
        self.models.command_answered(command.number, refusal)  # before the list, like the supervisor
        if refusal is None:
            self.models.update(self.registered)

    def load(self, name: str) -> int:
        body = LoadModelBody(model_filename="new.pth", model_viewname=name)
        return asyncio.run(load(self.context, body)).status


def test_a_single_machine_uses_its_own_engine(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "", small=READY)
    assert machine.load("small") == 200 and machine.commands == ["unload small", "load small"]
    assert (machine.own.checked, machine.other.checked) == (["new.pth"], [])


def test_file_errors_name_the_requests_fields(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "", small=READY)
    machine.own.has_files = False
    with pytest.raises(ServiceError) as refused:
        machine.load("small")
    info = refused.value.info
    assert (info.message, info.field) == ("model_filename: new.pth does not exist", "model_filename")
    assert info.given == "new.pth" and machine.commands == []


@pytest.mark.parametrize("name", ["small", "large"])
def test_in_a_cluster_only_local_engines_check_files(tmp_path: Path, name: str) -> None:
    """It lacks this machine's files. A model loaded here has them, whatever its name."""
    machine = Machine(tmp_path, ELSEWHERE, small=READY)
    assert machine.load(name) == 200
    assert machine.commands == (["unload small", "load small"] if name == "small" else ["load large"])
    assert (machine.own.checked, machine.other.checked) == ([], ["new.pth"])


def test_in_a_cluster_unchecked_files_unload_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ELSEWHERE, small=ModelStatus.LOADING)
    with pytest.raises(ServiceError) as refused:
        machine.load("small")
    assert refused.value.info.kind is ErrorKind.NAME_TAKEN and refused.value.info.field == "model_viewname"
    assert machine.commands == ["load small"] and machine.load("large") == 200


def test_a_model_already_unloaded_is_replaced_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "", small=READY)
    machine.registered.pop()  # and this worker does not know it yet
    assert machine.load("small") == 200 and machine.commands == ["unload small", "load small"]


def test_other_unload_errors_are_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, "", small=READY)

    async def unload(name: str, timeout_s: float | None) -> None:
        raise ServiceError(ErrorKind.DRAINING, "the service ends")

    monkeypatch.setattr(machine.models, "unload", unload)
    with pytest.raises(ServiceError, match="the service ends"):
        machine.load("small")
    assert machine.commands == []


def test_an_adapter_with_outside_configuration_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    machine = Machine(folder, "")
    adapter = folder / "adapter_model.safetensors"
    adapter.touch()
    for entry in (adapter.name, f"{adapter.name}:2"):
        spec = model_spec(machine.context, LoadBody(file="new.pth", adapters=[entry]))
        assert spec.adapters == (str(folder / entry),)
    (tmp_path / "adapter_config.json").write_text("{}")
    (folder / "adapter_config.json").symlink_to(tmp_path / "adapter_config.json")
    for entry in (adapter.name, f"{adapter.name}:2"):
        with pytest.raises(ServiceError, match="without links that lead out") as refused:
            model_spec(machine.context, LoadBody(file="new.pth", adapters=[entry]))
        assert refused.value.info.field == "adapters"


def test_a_request_may_choose_wkv_state_and_kernels(tmp_path: Path) -> None:
    context = Machine(tmp_path, "").context
    spec = model_spec(context, LoadBody(file="new.pth", wkv_state="fp32", kernels="cpu"))
    assert (spec.wkv_state, spec.kernels) == ("fp32", "cpu")
    spec = model_spec(context, LoadBody(file="new.pth"))
    assert (spec.wkv_state, spec.kernels) == ("", "")
    for field in ("wkv_state", "kernels"):
        with pytest.raises(ValueError, match=field):
            LoadBody(file="new.pth", **{field: "int9"})  # type: ignore[arg-type]


def test_an_unloaded_model_is_unknown_before_its_engine_stops(tmp_path: Path) -> None:
    """Otherwise requests in between would get the answer "is being loaded"."""
    machine, seen = Machine(tmp_path, "", small=READY), list[object]()
    machine.other.stop = lambda: seen.append(machine.models.find("small"))  # type: ignore[method-assign]
    machine.models.update(machine.registered[:1])
    assert seen == [None]


LOADING = ModelStatus.LOADING


def test_requests_for_a_loading_model_wait_for_the_list(tmp_path: Path) -> None:
    """Another worker may have reported it ready before this worker knew."""
    machine = Machine(tmp_path, "", small=LOADING, large=LOADING)
    machine.models._send_command = lambda command: None

    async def ask() -> list[object]:
        requested = [asyncio.ensure_future(machine.context.wait_for_model(name)) for name in ("small", "large:tuned")]
        await asyncio.sleep(0.01)
        assert not any(one.done() for one in requested)
        ends = {"small": (READY, ""), "large": (ModelStatus.FAILED, "is not a model")}
        commands = [(one, *ends.get(one.spec.name, (READY, ""))) for one in machine.registered]
        machine.models.update([msgspec.structs.replace(one, status=to, error=why) for one, to, why in commands])
        return await asyncio.gather(*requested, return_exceptions=True)

    small, large = asyncio.run(ask())
    assert isinstance(small, Context) and small is machine.models.select_model(machine.context, "small")
    assert isinstance(large, ServiceError) and large.info.kind is ErrorKind.MODEL_NOT_FOUND
    assert "is not a model" in large.info.message


@pytest.mark.parametrize("status", [LOADING, READY])
def test_a_model_known_to_another_worker_is_awaited(tmp_path: Path, status: ModelStatus) -> None:
    """Another worker may have reported the model before this worker knew it."""
    machine = Machine(tmp_path, "")
    requested: list[ModelCommand] = []

    def send_command(command: ModelCommand) -> None:
        requested.append(command)
        if len(requested) == 1:  # the list arrives before the answer
            new = ServedModel(spec=ModelSpec(name="small", file=""), status=status, address="small", since=0)
            machine.models.update([*machine.registered, new])
        machine.models.command_answered(command.number, None)

    machine.models._send_command = send_command
    try:
        found = asyncio.run(machine.context.wait_for_model("small"))
    except ServiceError as error:
        assert status is LOADING and error.info.kind is ErrorKind.ENGINE_LOST
    else:
        assert status is READY and found is not machine.context
    assert [command.is_barrier for command in requested] == [True]
    with pytest.raises(ServiceError, match="model 'other' not found"):
        asyncio.run(machine.context.wait_for_model("other"))
    assert len(requested) == 2
    assert asyncio.run(machine.context.wait_for_model("rwkv7:warm")) is machine.context
    assert len(requested) == 2, "nobody else knows more of the service's own model"


def test_get_model_waits_for_the_list_before_404(tmp_path: Path) -> None:
    """GET /v1/models/{name} after another worker has started to load it."""
    machine = Machine(tmp_path, "")

    def prompt_functions(call: object, reply: Any) -> None:
        reply([])

    machine.own.call = prompt_functions  # type: ignore[method-assign,assignment]
    commands = ServedModel(spec=ModelSpec(name="small", file=""), status=LOADING, address="small", since=0)

    def send_command(command: ModelCommand) -> None:
        machine.models.update([*machine.registered, commands])
        machine.models.command_answered(command.number, None)

    machine.models._send_command = send_command
    answer = asyncio.run(model(machine.context, ModelQuery(model="small")))
    assert json.loads(answer.body)["status"] == "loading"  # type: ignore[union-attr]


@pytest.mark.parametrize(("engine_wait_s", "known_after_s"), [(0.01, 3600.0), (3600.0, 0.01)])
def test_the_wait_for_a_model_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_wait_s: float, known_after_s: float
) -> None:
    """A waiting request occupies a stream that other models' requests need."""
    machine = Machine(tmp_path, "", small=LOADING)
    machine.models._send_command = lambda command: None
    machine.context.config = msgspec.structs.replace(machine.context.config, engine_wait_s=engine_wait_s)
    monkeypatch.setattr("routes.model_registry._POLL_S", known_after_s)
    with pytest.raises(ServiceError) as refused:
        asyncio.run(machine.context.wait_for_model("small"))
    assert refused.value.info.kind is ErrorKind.ENGINE_LOST and refused.value.info.retry_after_s


def test_many_requests_for_a_loading_model_are_refused_quickly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client has 420 streams. Waiting requests must not use them up."""
    machine = Machine(tmp_path, "", small=LOADING)
    machine.context.config = msgspec.structs.replace(machine.context.config, engine_wait_s=3600)
    monkeypatch.setattr("routes.model_registry._POLL_S", 3600.0)

    async def ask() -> list[object]:
        questions: asyncio.Queue[ModelCommand] = asyncio.Queue()
        machine.models._send_command = questions.put_nowait
        requested = [asyncio.ensure_future(machine.context.wait_for_model("small"))]
        first = await questions.get()
        requested += [asyncio.ensure_future(machine.context.wait_for_model("small")) for _ in range(420)]
        await asyncio.sleep(0.01)
        machine.models.command_answered(first.number, None)
        second = await questions.get()  # for all requests since
        machine.models.command_answered(second.number, None)
        commands = await asyncio.gather(*requested, return_exceptions=True)
        assert first.is_barrier and second.is_barrier and questions.empty()
        return commands

    refused = asyncio.run(asyncio.wait_for(ask(), 30))
    assert [getattr(error, "info", error).kind for error in refused] == [ErrorKind.ENGINE_LOST] * 421


def test_a_list_between_check_and_wait_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, "", small=LOADING)
    monkeypatch.setattr("routes.model_registry._POLL_S", 3600.0)
    look = machine.models._find_by_request

    def look_too_early(requested: str) -> ServedModel | None:
        seen = look(requested)
        machine.models.update([msgspec.structs.replace(one, status=READY) for one in machine.registered])
        return seen

    monkeypatch.setattr(machine.models, "_find_by_request", look_too_early)
    asyncio.run(asyncio.wait_for(machine.models.wait_until_known(machine.context, "small", 3600), 60))


def test_a_wait_for_a_model_loaded_and_unloaded_ends(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "")
    send_command = machine.send_command

    def tell_and_undo(command: ModelCommand) -> None:
        send_command(command)
        machine.models.update(machine.registered[:-1])

    machine.models._send_command = tell_and_undo
    waits = machine.models.load(ModelSpec(name="new", file="new.pth"), 3600)
    with pytest.raises(ServiceError, match="was unloaded before it was ready"):
        asyncio.run(asyncio.wait_for(waits, 60))


@pytest.mark.parametrize("leaves", [True, False])
def test_models_are_listed_during_an_unload_or_engine_loss(tmp_path: Path, leaves: bool) -> None:
    machine = Machine(tmp_path, "", small=READY, large=READY)
    own, small, large = machine.registered

    def lost(call: Any, reply: Any) -> None:
        reply([] if leaves else ServiceError(ErrorKind.ENGINE_LOST, "lost"))

    def leaving(call: Any, reply: Any) -> None:
        if leaves:
            machine.models.update([own, small, msgspec.structs.replace(large, status=ModelStatus.UNLOADING)])
        lost(call, reply)

    machine.own.call, machine.other.call = lost, leaving  # type: ignore[method-assign]
    answer: Any = asyncio.run(models(machine.context))
    prompt_functions = {one["id"]: one.get("status") for one in json.loads(answer.body)["data"]}
    assert prompt_functions == {"rwkv7": None, "small": "ready", "large": "unloading" if leaves else "ready"}
    assert machine.models.pop_used() == (), "a list is no use of models, which are unloaded when nobody uses them"
    machine.context.for_model("small")
    assert machine.models.pop_used() == ("small",)


WARM, ROUNDS = 3, 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, because a socket's path has at most 100 characters."""
    with TemporaryDirectory() as path:
        yield Path(path)


def engine_at(address: str) -> threading.Thread:
    """An engine that reports ready until the worker is gone."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()

    def serve() -> None:
        with listener:
            link: SocketLink[ToEngine, ToWorker] = SocketLink(listener.accept()[0], to_engine_decoder, "engine")
        link.send(Heartbeat(NO_LOAD))
        for _ in link.receive():
            pass

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def kept() -> tuple[int, int, int]:
    """Count the objects, threads and descriptors of this process."""
    gc.collect()
    return len(gc.get_objects()), threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not list the descriptors of a process")
def test_a_worker_keeps_nothing_of_unloaded_models(folder: Path) -> None:
    context = Context(None, HttpConfig(models_dir=str(folder)), RequestLimiter(4, 0), Readiness(1.0))  # type: ignore[arg-type]
    models = ModelRegistry(lambda command: None, lambda model: connect_model(context, model, "http-0", QuotaLedger()))

    def one_round(number: int) -> None:
        address = str(folder / f"{number}")
        engine = engine_at(address)
        spec = ModelSpec(name=f"round-{number}", file="file")
        ready = ServedModel(spec=spec, status=ModelStatus.READY, address=address, since=0)
        models.update([msgspec.structs.replace(ready, status=ModelStatus.LOADING)])
        models.update([ready])
        wait_for(lambda: models.select_model(context, spec.name).engine.is_connected, 10, "a connection")
        assert models.pop_used() == (spec.name,)
        models.update([])
        engine.join(10)
        assert not engine.is_alive()

    for number in range(WARM):
        one_round(number)
    wait_for(
        lambda: not any(thread.name in ("fleet", "engine-client") for thread in threading.enumerate()), 10, "their end"
    )
    before = kept()
    for number in range(WARM, WARM + ROUNDS):
        one_round(number)
    wait_for(lambda: kept()[1] <= before[1], 10, "the end of threads")
    after = kept()
    assert after[0] < before[0] + ROUNDS, "objects are left by every round"
    assert after[1:] <= before[1:], "threads or descriptors are left"
