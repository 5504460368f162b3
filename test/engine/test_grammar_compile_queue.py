"""Who waits for the compiler of grammars: clients in turn, each with a bound, all of them told."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rwkv_batch.core import grammar_compile_queue
from rwkv_batch.core.grammar_compile_queue import GrammarCompileQueue
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.request import Job
from rwkv_batch.tokenizer import VOCAB_SIZE, Tokenizer
from sampling.grammar import compile_sandbox
from sampling.grammar.compile_sandbox import CompileSandbox
from sampling.grammar.compiler import GrammarCompiler
from sampling.grammar.constraint import Constraint, Form
from test.harness import WAIT_S, make_request

SHUTTING_DOWN = ServiceError(ErrorKind.DRAINING, "it ends")


class SlowCompiler:
    """Compiles when it may, and remembers in which order."""

    def __init__(self) -> None:
        self.may = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.order: list[str] = []

    def cached(self, constraint: Constraint) -> None:
        return None

    def compile(self, constraint: Constraint) -> str:
        self.order.append(constraint.source)
        self.begun.release()
        assert self.may.acquire(timeout=WAIT_S)
        return constraint.source

    def add_lexers(self, constraint: Constraint, grammar: str, rows: int) -> None:
        return None

    def close(self) -> None:
        return None


class Clients:
    """Asks a desk, and gathers what is told."""

    def __init__(self, compiler: Any) -> None:
        self.desk = GrammarCompileQueue(lambda: compiler, lambda: SHUTTING_DOWN)
        self.told: dict[str, Any] = {}
        self._news = threading.Condition()

    def make_request(self, client: str, name: str, source: str = "", **fields: Any) -> None:
        row = make_request("x", constraint=Constraint(form=Form.REGEX, source=source or name, field="regex"))
        self.desk.prepare(
            Job(job_id=name, rows=[row], client=client, **fields),
            lambda refusal: self._hear(name, refusal),
            lambda found: self._hear(name, list(found.values())),
        )

    def _hear(self, name: str, what: Any) -> None:
        with self._news:
            assert name not in self.told, "told twice"
            self.told[name] = what
            self._news.notify_all()

    def wait(self, count: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.told) >= count, WAIT_S), self.told


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compile_queue, "THREADS", 1)


def test_clients_take_turns(one_thread: None) -> None:
    compiler = SlowCompiler()
    clients = Clients(compiler)
    clients.make_request("many", "m0")
    assert compiler.begun.acquire(timeout=WAIT_S)
    for number in range(1, 20):
        clients.make_request("many", f"m{number}")
    clients.make_request("few", "f0")
    clients.make_request("few", "f1")
    for _ in range(22):
        compiler.may.release()
    clients.wait(22)
    assert compiler.order[:6] == ["m0", "m1", "f0", "m2", "f1", "m3"]
    clients.desk.close()


def test_one_client_leaves_room_for_others(one_thread: None) -> None:
    compiler = SlowCompiler()
    clients = Clients(compiler)
    clients.make_request("many", "m0")
    assert compiler.begun.acquire(timeout=WAIT_S)
    for number in range(1, 70):
        clients.make_request("many", f"m{number}")
    clients.wait(5)
    assert set(clients.told) == {f"m{number}" for number in range(65, 70)}
    assert all(refusal.info.kind is ErrorKind.OVERLOADED for refusal in clients.told.values())
    clients.make_request("few", "f0")
    clients.desk.cancel("m1")
    clients.desk.close()
    compiler.may.release()
    clients.wait(71)
    assert clients.told["f0"] is SHUTTING_DOWN and clients.told["m2"] is SHUTTING_DOWN
    assert clients.told["m1"].info.kind is ErrorKind.CANCELLED and clients.told["m0"] == ["m0"]
    clients.make_request("few", "late")
    assert clients.told["late"] is SHUTTING_DOWN


def test_requests_with_one_schema_wait_together(one_thread: None) -> None:
    compiler = SlowCompiler()
    clients = Clients(compiler)
    clients.make_request("many", "m0")
    assert compiler.begun.acquire(timeout=WAIT_S)
    for number in range(1, 300):
        clients.make_request("many", f"m{number}", "same")
    clients.desk.cancel("m7")
    for _ in range(2):
        compiler.may.release()
    clients.wait(300)
    assert compiler.order == ["m0", "same"]
    assert clients.told.pop("m7").info.kind is ErrorKind.CANCELLED
    assert all(found in (["m0"], ["same"]) for found in clients.told.values())
    clients.desk.close()


def test_requests_that_wait_are_bounded_though_they_have_one_schema(
    one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compile_queue, "MAX_WAITING_JOBS", 12)
    monkeypatch.setattr(grammar_compile_queue, "MAX_WAITING_JOBS_PER_CLIENT", 8)
    compiler = SlowCompiler()
    clients = Clients(compiler)
    clients.make_request("many", "m0")
    assert compiler.begun.acquire(timeout=WAIT_S)
    for client in ("a", "b"):
        for number in range(10):
            clients.make_request(client, f"{client}{number}", "same")
    refused = {name for name, what in clients.told.items() if what.info.kind is ErrorKind.OVERLOADED}
    assert refused == {"a8", "a9", "b3", "b4", "b5", "b6", "b7", "b8", "b9"}
    for _ in range(3):
        compiler.may.release()
    clients.wait(21)
    clients.desk.close()


def test_a_job_that_another_engine_has_admitted_is_not_refused(
    one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compile_queue, "MAX_WAITING_GROUPS_PER_CLIENT", 2)
    compiler = SlowCompiler()
    clients = Clients(compiler)
    clients.make_request("many", "m0")
    assert compiler.begun.acquire(timeout=WAIT_S)
    for number in range(1, 4):
        clients.make_request("many", f"m{number}")
    assert set(clients.told) == {"m3"}
    clients.make_request("many", "m4", attempt=1)
    for _ in range(4):
        compiler.may.release()
    clients.wait(5)
    assert clients.told["m4"] == ["m4"]
    clients.desk.close()


def test_a_process_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were changed under a service that runs."""
    table = Tokenizer().byte_table
    compiler = GrammarCompiler(table, list, VOCAB_SIZE, CompileSandbox(table, VOCAB_SIZE))
    monkeypatch.setattr(compile_sandbox, "_PROGRAM", "sampling.grammar.not_there")
    clients = Clients(compiler)
    clients.make_request("one", "a+")
    clients.wait(1)
    error = clients.told["a+"]
    assert error.info.kind is ErrorKind.INTERNAL and "restart" in error.info.message
    monkeypatch.undo()
    clients.make_request("one", "b+")
    clients.wait(2)
    assert not isinstance(clients.told["b+"], ServiceError)
    clients.desk.close()
