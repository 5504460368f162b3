"""Transfers of sessions off the engine's thread: internal errors, shutdown, and the thread of their tasks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from rwkv_batch.core.file_thread import FileThread
from rwkv_batch.core.session_transfer import SessionTransfer
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.runner.state_copy import PipelineArena
from state_pool.config import PoolConfig
from state_pool.session_file import SessionFile
from state_pool.turns.import_export import MAX_CONCURRENT, ImportExport
from test.harness import WAIT_S, call, run, started_engine, submit, turn


def closed_error() -> ServiceError:
    return ServiceError(ErrorKind.DRAINING, "no more")


def test_an_internal_error_is_reported_and_frees_its_slot(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started_engine(model) as engine:
        run(engine, turn("s", "User: one"))
        content = call(engine, "session_export", session_id="s")

        def fails(*arguments: object) -> Any:
            raise RuntimeError("no memory for that")

        for target in (
            "rwkv_batch.core.session_transfer.decode",
            "state_pool.turns.import_export.ImportExport.import_session",
        ):
            for _ in range(2 * MAX_CONCURRENT):
                with monkeypatch.context() as patched, pytest.raises(ServiceError, match="no memory") as received:
                    patched.setattr(target, fails)
                    call(engine, "session_import", session_id="t", content=content)
                assert received.value.info.kind is ErrorKind.INTERNAL
        for target in (SessionFile, "encode"), (ImportExport, "export"):
            for _ in range(2 * MAX_CONCURRENT):
                with monkeypatch.context() as patched, pytest.raises(ServiceError, match="no memory"):
                    patched.setattr(*target, fails)
                    call(engine, "session_export", session_id="s")
        assert call(engine, "session_import", session_id="t", content=content) > 0


def test_a_check_without_a_file_encodes_none(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionFile, "encode", lambda file: pytest.fail("it was made"))
    with started_engine(model) as engine:
        run(engine, turn("s", "User: one"))
        for _ in range(2 * MAX_CONCURRENT):
            assert call(engine, "session_export", session_id="s", include_file=False) == b""
        with pytest.raises(ServiceError, match="nobody"):
            call(engine, "session_export", session_id="nobody", include_file=False)


def test_a_state_is_checked_and_copied_off_the_engines_thread(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other requests wait for that thread."""
    threads: set[str] = set()
    whole = PipelineArena.host_state

    def host_state(arena: PipelineArena, parts: Any) -> Any:
        threads.add(threading.current_thread().name)
        return whole(arena, parts)

    monkeypatch.setattr(PipelineArena, "host_state", host_state)
    with started_engine(model) as engine:
        run(engine, turn("s", "User: one"))
        content = call(engine, "session_export", session_id="s")
        assert call(engine, "session_import", session_id="t", content=content) > 0
    assert len(threads) == 1 and "session-files" in threads.pop()


def test_calls_during_shutdown_are_refused() -> None:
    busy, begun = threading.Event(), threading.Event()
    answers: list[object] = []
    transfer = SessionTransfer(lambda command: True, closed_error)
    transfer._thread.run(answers.append, lambda: (begun.set(), busy.wait(WAIT_S)), lambda _: None)
    assert begun.wait(WAIT_S)
    transfer.import_session(None, answers.append, "waits", b"")  # type: ignore[arg-type]
    transfer.close()
    transfer.import_session(None, answers.append, "comes later", b"")  # type: ignore[arg-type]
    busy.set()
    assert [type(answer) for answer in answers] == [ServiceError] * 2


def test_an_import_whose_file_is_read_when_the_engine_has_ended_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started_engine(model) as engine:
        run(engine, turn("s", "User: one"))
        content, pool = call(engine, "session_export", session_id="s"), engine.model_runner.pool
        transfer, answered = SessionTransfer(lambda command: False, closed_error), threading.Event()
        answers: list[object] = []
        transfer.import_session(pool, lambda answer: (answers.append(answer), answered.set()), "t", content)
        assert answered.wait(WAIT_S) and [str(answer) for answer in answers] == ["no more"]
        transfer.close()


def test_the_engine_ends_when_a_thread_of_its_pool_dies(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*arguments: object) -> None:
        raise SystemExit("a fault of the program")

    with started_engine(model, PoolConfig(state_db=str(tmp_path / "s.db"))) as engine:
        store = engine.model_runner.pool._store
        assert store is not None
        monkeypatch.setattr(store.writer, "_commit_group", dies)
        job = submit(engine, turn("s", "User: one")).wait()
        assert job.events[-1].error is not None
        assert job.events[-1].error.kind is ErrorKind.ENGINE_LOST
        engine._thread.join(WAIT_S)
        assert not engine.is_alive
        with pytest.raises(ServiceError, match="state-pool-writer has died"):
            call(engine, "session_status", limit=1, offset=0)


CLOSED = ServiceError(ErrorKind.DRAINING, "closed")
TASK_WAIT_S = 60


def make() -> FileThread:
    return FileThread("files", lambda: CLOSED, lambda error: ServiceError(ErrorKind.INTERNAL, str(error)))


def test_tasks_run_one_after_another() -> None:
    thread, done, replies = make(), threading.Event(), []
    seen: list[Any] = []
    thread.run(replies.append, lambda: seen.append("first") or 1, seen.append)  # type: ignore[func-returns-value]
    thread.run(replies.append, lambda: 1 // 0, seen.append)
    thread.run(replies.append, lambda: threading.current_thread().name, lambda name: (seen.append(name), done.set()))
    assert done.wait(TASK_WAIT_S)
    assert seen[:2] == ["first", 1] and seen[2].startswith("files")
    assert [str(reply) for reply in replies] == ["integer division or modulo by zero"]
    thread.close()


def test_tasks_that_do_not_start_are_refused() -> None:
    thread, begun, may_end, replies = make(), threading.Event(), threading.Event(), []
    ended = threading.Event()
    thread.run(replies.append, lambda: (begun.set(), may_end.wait(TASK_WAIT_S)), lambda _: ended.set())
    assert begun.wait(TASK_WAIT_S)
    for _ in range(2):
        thread.run(replies.append, lambda: replies.append("ran"), replies.append)
    thread.close()
    thread.run(replies.append, lambda: replies.append("ran"), replies.append)
    assert replies == [CLOSED] * 3
    may_end.set()
    assert ended.wait(TASK_WAIT_S) and replies == [CLOSED] * 3, "a task that runs ends"
