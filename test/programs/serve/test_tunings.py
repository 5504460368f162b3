"""Jobs that cannot succeed: they fail with their reason, and the next one runs. Limits of jobs."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from programs import tune
from programs.serve.batches import tunings
from programs.serve.batches.tunings import TuningRunner
from routes.config import HttpConfig
from routes.context import Context, Readiness, RequestLimiter
from routes.file_store import Purpose, Store, StoredFile, StoreFullError
from routes.fine_tuning.jobs import JobBody, create_job, job_object
from routes.fine_tuning.store import MAX_ACTIVE_PER_OWNER, MAX_MODELS_PER_KEY, Job, JobStatus, JobStore, make_event
from routes.request.json_body import validate
from routes.request_context import RequestContext, set_current_request
from rwkv_batch.config import EngineConfig
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.tuning import paced_path
from test.serving import ROOT


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "files", 1 << 30, 100)
    content = "\n".join(json.dumps({"prompt": f"{i}", "completion": f"{i}"}) for i in range(10)).encode()
    about = {"id": "file-1", "owner": "", "created_at": 1, "filename": "a.jsonl", "purpose": Purpose.FINE_TUNE}
    made.add_file(StoredFile(bytes=len(content), **about), content)  # type: ignore[arg-type]
    return made


PLACES: dict[str, Any] = {
    "database": {},
    "tuned_states": {"loaded": 0, "limit": 1},
    "adapters": {"loaded": 1, "limit": 1},
}
"""A pool with a place for a state and none for an adapter."""


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def status(*_: object) -> dict[str, object]:
        return {"pool": PLACES}

    monkeypatch.setattr("routes.fine_tuning.jobs.call_engine", status)


def job(number: int, file: str = "file-1", owner: str = "") -> Job:
    return Job(
        id=f"ftjob-{number}", owner=owner, model="rwkv7", training_file=file, tuning="state", rank=4, epochs=1,
        batch_size=0, multiplier=0.0, seed=1, created_at=number,
    )  # fmt: skip


def context_of(store: Store, tune_device: str = "cpu") -> Context:
    context = Context(None, HttpConfig(tune_device=tune_device), RequestLimiter(8), Readiness(0))  # type: ignore[arg-type]
    context.files = store
    return context


def request_job(store: Store, owner: str = "", tune_device: str = "cpu", **fields: object) -> None:
    """Asks for a job as a client does."""
    request_context = RequestContext("id", "POST", "http://x", "/", "127.0.0.1")
    request_context.owner = owner
    set_current_request(request_context)
    body = validate(JobBody, {"model": "rwkv7", "training_file": "file-1", **fields})
    asyncio.run(create_job(context_of(store, tune_device), body))


async def run_until_ended(runner: TuningRunner, jobs: JobStore) -> None:
    stop = asyncio.Event()
    task = asyncio.create_task(runner.run(stop))
    while jobs.active():  # noqa: ASYNC110 - the runner polls the same records
        await asyncio.sleep(0.05)
    stop.set()
    await task


@pytest.mark.slow
def test_jobs_that_cannot_run_fail_with_the_reason_and_others_follow(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # as the supervisor does
    jobs = JobStore(store)
    for one in (job(1), job(2, "file-gone"), job(3, owner="removed"), job(4)):
        jobs.add(one)
    runner = TuningRunner(store, context_of(store), EngineConfig(model_path=str(tmp_path / "none.pth")))
    runner.set_key_names(frozenset({"other"}))
    options = runner._options

    def broken(one: Job) -> list[str]:
        if one.id == "ftjob-4":
            raise ValueError("a bug")
        return options(one)

    monkeypatch.setattr(runner, "_options", broken)

    asyncio.run(asyncio.wait_for(run_until_ended(runner, jobs), 240))
    ended = {one.id: one for one in jobs.jobs("")}
    assert {one.status for one in ended.values()} == {JobStatus.FAILED}
    errors = {name: one.error or {} for name, one in ended.items()}
    assert "none.pth" in errors["ftjob-1"]["message"] and errors["ftjob-1"]["code"] == "training_failed"
    assert errors["ftjob-2"]["param"] == "training_file" and "file-gone was deleted" in errors["ftjob-2"]["message"]
    assert errors["ftjob-3"]["code"] == "api_key_removed"
    assert errors["ftjob-4"]["message"] == "the job failed: ValueError: a bug"
    assert jobs.events("ftjob-1", "", 1)[0]["level"] == "error"


def test_jobs_of_a_key_and_of_a_service_without_tuning_are_limited(store: Store) -> None:
    jobs = JobStore(store)
    for number in range(MAX_ACTIVE_PER_OWNER):
        jobs.add(job(number, owner="anna"))
    with pytest.raises(StoreFullError, match="8 jobs of this key"):
        jobs.add(job(99, owner="anna"))
    jobs.add(job(100, owner="bert"))
    with pytest.raises(ServiceError, match="--tune-device none") as refused:
        request_job(store, tune_device="none")
    assert refused.value.info.kind is ErrorKind.FORBIDDEN


def test_a_job_that_cannot_be_loaded_lets_others_run_and_keys_alternate(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tried 30 times, every 10 s, before any other job ran; a key's second job ran before another's first."""
    jobs = JobStore(store)
    for number, owner in enumerate(("anna", "anna", "anna", "bert")):
        jobs.add(job(number, owner=owner))
    runner, order, stop = TuningRunner(store, context_of(store), EngineConfig(model_path="")), [], asyncio.Event()

    async def run_job(one: Job, _: asyncio.Event) -> None:
        order.append(one.id)
        if one.id == "ftjob-0":
            await runner._update(one, status=JobStatus.RUNNING)
            raise ServiceError(ErrorKind.OVERLOADED, "64 adapters are loaded, the limit")
        await runner._update(one, status=JobStatus.SUCCEEDED)
        if len(order) == 4:
            stop.set()

    monkeypatch.setattr(runner, "_run_job", run_job)
    monkeypatch.setattr(tunings, "_POLL_S", 0.01)
    asyncio.run(asyncio.wait_for(runner.run(stop), 60))
    assert order == ["ftjob-0", "ftjob-3", "ftjob-1", "ftjob-2"]


def test_the_process_stops_while_interactive_requests_wait(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, waiting = TuningRunner(store, context_of(store), EngineConfig(model_path="")), {"rows": 3}

    async def status(*_: object) -> dict[str, int]:
        if waiting["rows"] < 0:
            raise KeyError("a bug")
        return {"waiting_rows": 9, "waiting_interactive_rows": waiting["rows"], "running_rows": waiting["rows"]}

    folder = store.runs / job(1).id
    folder.mkdir(parents=True)
    paced = paced_path(folder / "result")

    async def run() -> None:
        process = await asyncio.create_subprocess_exec("sleep", "600")
        pacer = asyncio.create_task(tunings._restarted(lambda: runner._leave_time(job(1), process)))

        async def until(letter: str) -> None:
            while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != letter:  # noqa: ASYNC110, ASYNC240
                await asyncio.sleep(0.01)

        try:
            # -1: its thread died, and the process stayed stopped
            for rows, letter in ((3, "T"), (0, "S"), (1, "T"), (-1, "S"), (2, "T")):
                waiting["rows"] = rows
                await asyncio.wait_for(until(letter), 60)
                assert rows < 0 or paced.exists() is (rows > 0)
        finally:
            pacer.cancel()
            process.kill()
            await process.wait()

    monkeypatch.setattr(tunings, "call_engine", status)
    monkeypatch.setattr(tunings, "_PACE_S", 0.01)
    monkeypatch.setattr(tunings, "_RETRY_S", 0.01)
    asyncio.run(run())


def test_a_job_that_can_never_be_loaded_fails(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, runner = JobStore(store), TuningRunner(store, context_of(store), EngineConfig(model_path=""))
    jobs.add(job(1))

    async def run_job(one: Job, _: asyncio.Event) -> None:
        raise ServiceError(ErrorKind.OVERLOADED, "64 adapters are loaded, the limit")

    monkeypatch.setattr(runner, "_run_job", run_job)
    for name in ("_POLL_S", "_RETRY_S"):
        monkeypatch.setattr(tunings, name, 0.001)
    asyncio.run(asyncio.wait_for(run_until_ended(runner, jobs), 120))
    ended = jobs.job("", "ftjob-1")
    assert ended is not None and ended.error is not None and "64 adapters are loaded" in ended.error["message"]


def test_a_job_waits_for_space_on_the_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed after 30 tries, and its checkpoint was removed."""
    jobs, runner = JobStore(store), TuningRunner(store, context_of(store), EngineConfig(model_path=""))
    jobs.add(job(1))

    async def run_job(one: Job, _: asyncio.Event) -> None:
        if runner._retry_at:
            raise OSError(errno.ENOSPC, "the disk of --files-dir is full")
        await runner._end(one, tune.NO_SPACE, {}, "the disk is full")

    async def run() -> None:
        await runner._update(job(1), status=JobStatus.RUNNING)
        for _ in range(2 * tunings._MAX_TRIES):
            await runner._run_or_fail(job(1), asyncio.Event())

    monkeypatch.setattr(runner, "_run_job", run_job)
    asyncio.run(run())
    assert [one.id for one in jobs.active()] == ["ftjob-1"] and runner._retry_at


def test_a_job_keeps_its_data_when_the_file_is_deleted(store: Store) -> None:
    """Its process was killed, and the job failed: its file had been deleted."""
    runner = TuningRunner(store, context_of(store), EngineConfig(model_path=""))
    path = runner._as_named_file(job(1), "file-1")
    store.delete_file("", "file-1")
    assert path is not None and runner._as_named_file(job(1), "file-1") == path and path.exists()
    assert runner._as_named_file(job(2), "file-1") is None


@pytest.mark.parametrize(("name", "kind"), [(".csv", ".csv"), ("TMX", ".tmx"), ("a.csv.txt", ".jsonl")])
def test_a_job_reads_a_file_as_its_upload_did(store: Store, name: str, kind: str) -> None:
    about = {"id": "file-2", "owner": "", "created_at": 1, "filename": name, "purpose": Purpose.FINE_TUNE}
    store.add_file(StoredFile(bytes=1, **about), b"a")  # type: ignore[arg-type]
    path = TuningRunner(store, context_of(store), EngineConfig(model_path=""))._as_named_file(job(1), "file-2")
    assert path is not None and path.suffix == kind


def test_an_error_of_a_job_has_no_path_of_the_machine(store: Store) -> None:
    jobs, runner = JobStore(store), TuningRunner(store, context_of(store), EngineConfig(model_path=""))
    jobs.add(job(1))
    asyncio.run(runner._update(job(1), status=JobStatus.RUNNING))
    asyncio.run(runner._end(job(1), 1, {}, f"{runner._folder(job(1))}/file-1.jsonl has errors; correct these lines"))
    failed = jobs.job("", "ftjob-1")
    assert failed is not None and failed.error is not None and failed.error["code"] == "invalid_training_file"
    assert failed.error["message"] == "file-1.jsonl has errors; correct these lines"


def test_a_job_has_the_numbers_and_the_model_that_were_asked_for(store: Store) -> None:
    """A method without numbers dropped the outer ones, and the base was tuned for `rwkv7:pirate`."""
    asked = {"n_epochs": 3}
    for fields, epochs in (({"type": "supervised"}, 3), ({"supervised": {"hyperparameters": {"n_epochs": 5}}}, 5)):
        request_job(store, hyperparameters=asked, method=fields)
        assert max(JobStore(store).jobs(""), key=lambda one: one.epochs).epochs == epochs
    for name in ("rwkv7:pirate", "rwkv7+french"):
        with pytest.raises(ServiceError, match="not found"):
            request_job(store, hyperparameters=asked, model=name)


def test_a_job_that_is_cancelled_while_it_is_loaded_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state stayed in the engine, and an event said that it had succeeded."""
    jobs, runner, calls = JobStore(store), TuningRunner(store, context_of(store), EngineConfig(model_path="")), []
    folder = store.runs / "ftjob-1"
    folder.mkdir(parents=True)
    names = [folder / "result.csv", folder / "result.state.pth"]
    for name in names:
        name.write_bytes(b"x")

    async def call_engine(_: Context, call: object) -> None:
        calls.append(type(call).__name__)
        jobs.update("ftjob-1", lambda one: msgspec.structs.replace(one, status=JobStatus.CANCELLED))

    monkeypatch.setattr(tunings, "call_engine", call_engine)
    monkeypatch.setattr("routes.fine_tuning.jobs.call_engine", call_engine)
    jobs.add(job(1))
    result = {"files": list(map(str, names)), "steps": 1, "warnings": [], "trained_tokens": 1}
    (folder / tunings._DONE).write_bytes(msgspec.json.encode(result))
    asyncio.run(runner._run_job(job(1), asyncio.Event()))
    assert len(store.files("", "", "", 9, True)) == 3
    asyncio.run(runner._remove_ended())
    assert calls == ["AddState", "RemoveState"] and jobs.events("ftjob-1", "", 9) == []
    assert [one.id for one in store.files("", "", "", 9, True)] == ["file-1"]


def test_a_job_without_a_place_for_its_result_is_not_trained(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was trained, and then could not be loaded."""
    jobs, runner = JobStore(store), TuningRunner(store, context_of(store), EngineConfig(model_path=""))
    request_job(store)
    full = r"1 adapters are loaded, the limit is 1; delete .* or let the operator raise --max-adapters"
    for tuning in ("lora", "state+lora"):
        with pytest.raises(ServiceError, match=full) as refused:
            request_job(store, tuning=tuning)
        assert refused.value.info.kind is ErrorKind.OVERLOADED
    with (
        monkeypatch.context() as no_database,
        pytest.raises(ServiceError, match="start the service with --state-db FILE"),
    ):
        no_database.setitem(PLACES, "database", None)  # an engine's restart lost the tuned model
        request_job(store)
    one = msgspec.structs.replace(job(1), tuning="lora")  # its place was taken while it waited
    jobs.add(one)

    async def started(*_: str, **__: object) -> None:
        raise OSError("a process")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    asyncio.run(runner._run_or_fail(one, asyncio.Event()))
    failed = jobs.job("", "ftjob-1")
    assert failed is not None and failed.error is not None and failed.error["code"] == "no_place"
    assert "the limit is 1" in failed.error["message"]
    jobs.add(msgspec.structs.replace(job(2), tuning="lora"))

    async def full_link(*_: object) -> None:
        raise ServiceError(ErrorKind.OVERLOADED, f"the request cannot be sent; {next(numbers)} bytes are waiting")

    numbers = itertools.count(100)
    monkeypatch.setattr("routes.fine_tuning.jobs.call_engine", full_link)
    for _ in range(3):
        asyncio.run(runner._run_or_fail(msgspec.structs.replace(job(2), tuning="lora"), asyncio.Event()))
    waiting = jobs.job("", "ftjob-2")
    assert waiting is not None and waiting.status is JobStatus.QUEUED
    (event,) = jobs.events("ftjob-2", "", 9)
    assert event["message"].endswith("100 bytes are waiting")


def test_a_model_is_loaded_if_the_store_is_full(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its job waited for room for the result files, which are links, without end."""
    jobs, runner, calls = JobStore(store), TuningRunner(store, context_of(store), EngineConfig(model_path="")), []
    one = msgspec.structs.replace(job(1), tuning="lora")
    folder = store.runs / one.id
    folder.mkdir(parents=True)
    (folder / "result.lora.pth").write_bytes(b"a LoRA")
    (folder / tunings._DONE).write_bytes(msgspec.json.encode({"steps": 1, "warnings": [], "trained_tokens": 1}))
    jobs.add(one)

    async def call_engine(_: Context, call: object) -> None:
        calls.append(type(call).__name__)

    monkeypatch.setattr(tunings, "call_engine", call_engine)
    monkeypatch.setattr(store, "_max_bytes", 0)
    asyncio.run(runner._run_or_fail(one, asyncio.Event()))
    (ended,) = jobs.jobs("")
    assert calls == ["AddAdapter"] and ended.status is JobStatus.SUCCEEDED, jobs.events(one.id, "", 9)
    assert [store.content(name).read_bytes() for name in ended.result_files] == [b"a LoRA"]


def test_a_trained_result_without_a_place_is_kept_and_nothing_stays_loaded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job was "running" without a reason, then it lost its result, and its state and the LoRA's file stayed."""
    jobs, runner, loaded = JobStore(store), TuningRunner(store, context_of(store), EngineConfig(model_path="")), set()
    one = msgspec.structs.replace(job(1), tuning="state+lora")
    folder = store.runs / one.id
    folder.mkdir(parents=True)
    for ending in ("csv", "state.pth", "lora.pth"):
        (folder / f"result.{ending}").write_text(ending)
    result = {"steps": 1, "warnings": [], "trained_tokens": 1}
    (folder / tunings._DONE).write_bytes(msgspec.json.encode(result))
    jobs.add(one)

    async def call_engine(_: Context, call: object) -> None:
        kind = type(call).__name__
        if kind == "AddAdapter":
            raise ServiceError(ErrorKind.OVERLOADED, "1 adapters are loaded, the limit is 1")
        if kind == "RemoveAdapter":
            raise ServiceError(ErrorKind.ADAPTER_NOT_FOUND, "no adapter")
        (loaded.add if kind == "AddState" else loaded.remove)("state")

    monkeypatch.setattr(tunings, "call_engine", call_engine)
    monkeypatch.setattr("routes.fine_tuning.jobs.call_engine", call_engine)
    for _ in range(tunings._MAX_TRIES):
        (waiting,) = jobs.active()
        asyncio.run(runner._run_or_fail(waiting, asyncio.Event()))
    assert loaded
    asyncio.run(runner._remove_ended())
    failed, events = jobs.job("", one.id), [event["message"] for event in jobs.events(one.id, "", 99)]
    assert failed is not None and failed.error is not None and not jobs.active() and not loaded
    assert failed.error["message"].startswith("the result could not be loaded: 1 adapters are loaded, the limit is 1")
    assert all(name in failed.error["message"] for name in failed.result_files)
    assert [store.content(name).read_text() for name in failed.result_files] == ["csv", "state.pth", "lora.pth"]
    assert not folder.exists() and not list((store.runs.parent / "adapters").iterdir())
    assert events[1:] == ["The job waits and is tried again: 1 adapters are loaded, the limit is 1"]


def test_what_a_cancelled_job_loaded_is_removed_when_the_engine_is_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine ended while a job was loaded; the job was cancelled, and its state stayed."""
    jobs, runner, calls = JobStore(store), TuningRunner(store, context_of(store), EngineConfig(model_path="")), []
    folder = store.runs / "ftjob-1"
    folder.mkdir(parents=True)
    (folder / tunings._DONE).write_bytes(b"{}")
    jobs.add(job(1))

    async def call_engine(_: Context, call: object) -> None:
        calls.append(type(call).__name__)
        if len(calls) == 1:
            raise ServiceError(ErrorKind.ENGINE_LOST, "the engine is away")

    monkeypatch.setattr("routes.fine_tuning.jobs.call_engine", call_engine)
    asyncio.run(runner._remove_ended())
    assert folder.exists() and not calls, "it waits"
    jobs.update("ftjob-1", lambda one: msgspec.structs.replace(one, status=JobStatus.CANCELLED))
    for is_kept in (True, False):
        asyncio.run(runner._remove_ended())
        assert folder.exists() is is_kept
    assert calls == ["RemoveState", "RemoveState"]


def test_result_files_stay_with_their_model_also_if_the_service_ended_before(store: Store) -> None:
    jobs, runner = JobStore(store), TuningRunner(store, context_of(store), EngineConfig(model_path=""))
    ended = {"status": JobStatus.SUCCEEDED, "result_files": ["file-1"]}
    for number, is_deleted, expires_at in ((1, True, 9), (2, False, None)):
        (store.runs / f"ftjob-{number}").mkdir(parents=True)
        jobs.add(job(number))
        change = {**ended, "is_deleted": is_deleted}
        made = jobs.update(f"ftjob-{number}", lambda one, now=change: msgspec.structs.replace(one, **now))  # type: ignore[misc]
        jobs.expire_results(made, 9)
        asyncio.run(runner._remove_ended())
        file = store.file("", "file-1")
        assert file is not None and file.expires_at == expires_at and not list(store.runs.glob("ftjob-*"))


def test_one_key_cannot_fill_the_places_of_models(store: Store) -> None:
    """A key could have 64 models, as many as the engine has places for adapters."""
    jobs = JobStore(store)
    for number in range(MAX_MODELS_PER_KEY):
        jobs.add(job(number, owner="anna"))
        status = JobStatus.SUCCEEDED if number else JobStatus.PAUSED  # the first one still waits
        jobs.update(f"ftjob-{number}", lambda one, now=status: msgspec.structs.replace(one, status=now))  # type: ignore[misc]
    about = {"bytes": 2, "created_at": 1, "filename": "a.jsonl", "purpose": Purpose.FINE_TUNE}
    for owner in ("anna", "bert"):
        store.add_file(StoredFile(id=f"file-{owner}", owner=owner, **about), b"{}")  # type: ignore[arg-type]
    with pytest.raises(ServiceError, match="16 tuned models and jobs of this key"):
        request_job(store, "anna", training_file="file-anna")
    request_job(store, "bert", training_file="file-bert")


def test_progress_names_all_steps_and_the_end_without_the_time_of_loading(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, runner = JobStore(store), TuningRunner(store, context_of(store), EngineConfig(model_path=""))
    jobs.add(job(1))
    clock = iter((100.0, 101.0, 104.0))  # the first step, the time of its report, the second step
    monkeypatch.setattr(tunings, "time", SimpleNamespace(monotonic=lambda: next(clock), time=lambda: 1000.0))
    data = {"event": "data", "steps": 11, "epochs": 1, "batch_lines": 1, "warnings": [], "lines": 1}
    data |= {"held_out_lines": 0, "answer_tokens": 1, "tokens": 2}
    steps = [{"event": "step", "step": step, "train_loss": 1.0} for step in (1, 2)]

    async def follow() -> None:
        await runner._update(job(1), status=JobStatus.RUNNING)
        reader = asyncio.StreamReader()
        reader.feed_data(b"\n".join(map(msgspec.json.encode, [data, *steps])))
        reader.feed_eof()
        await runner._follow(job(1), SimpleNamespace(stdout=reader))  # type: ignore[arg-type]

    asyncio.run(follow())
    followed = jobs.job("", "ftjob-1")
    assert followed is not None and followed.estimated_finish == 1000 + 4 * 9
    numbers = {"n_epochs": 1, "batch_size": 1, "learning_rate_multiplier": 1.0}
    assert job_object(followed)["hyperparameters"] == numbers
    # A checkpoint belongs to the numbers that were asked for: a job with automatic ones did not continue from its own.
    assert runner._options(followed) == runner._options(job(1))
    assert jobs.events("ftjob-1", "", 1)[0]["data"]["total_steps"] == 11


def test_a_continued_process_adds_no_figures_again_and_pages_end(store: Store) -> None:
    """Each continuation repeated all evaluations. A page after an unknown entry was the first one."""
    jobs = JobStore(store)
    jobs.add(job(1))
    figures = [make_event(f"Step {step}: held-out loss 1.5", data={"step": step}) for step in (0, 4)]
    for one in (make_event("The job is running"), *figures) * 2:
        jobs.update("ftjob-1", lambda before: before, one)
    events = jobs.events("ftjob-1", "", 9)
    assert [one["message"] for one in events] == [
        "The job is running", figures[1]["message"], figures[0]["message"], "The job is running",
    ]  # fmt: skip
    assert jobs.events("ftjob-1", events[1]["id"], 9) == events[2:]
    for unknown in ("ftevent-none", "ftevent-000099", "000002"):
        assert jobs.events("ftjob-1", unknown, 9) == []


@pytest.mark.parametrize(("served", "tuned"), [("auto", "auto"), ("int8", "int8"), ("fp8", "fp8"), ("int4", "auto")])
def test_a_job_keeps_the_type_of_the_served_weights(store: Store, served: str, tuned: str) -> None:
    options = TuningRunner(store, context_of(store), EngineConfig(model_path="", dtype=served))._options(job(1))
    assert options[options.index("--dtype") + 1] == tuned


def test_a_job_that_began_with_other_weights_keeps_their_type(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart with another --dtype it failed: its checkpoint has the type."""
    jobs, seen = JobStore(store), []
    jobs.add(job(1))

    async def started(*command: str, **_: object) -> None:
        seen.append(command[command.index("--dtype") + 1])
        raise OSError("no process")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    for dtype in ("int8", "fp8", "auto"):
        runner = TuningRunner(store, context_of(store), EngineConfig(model_path="", dtype=dtype))
        (one,) = jobs.active()
        asyncio.run(runner._run_or_fail(one, asyncio.Event()))
    assert seen == ["int8"] * 3
