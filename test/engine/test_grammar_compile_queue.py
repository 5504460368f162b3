"""The grammar compiler's queue: clients in turn, with limits, and a reply for every job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
    """Compiles when the test permits, and records the order."""

    def __init__(self) -> None:
        self.may = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.order: list[str] = []

    def cached(self, constraint: Constraint, tenant: str) -> None:
        return None

    def compile(self, constraint: Constraint, tenant: str) -> str:
        self.order.append(constraint.source)
        self.begun.release()
        assert self.may.acquire(timeout=WAIT_S)
        return constraint.source

    def add_lexers(self, constraint: Constraint, grammar: str, rows: int) -> None:
        return None

    def close(self) -> None:
        return None


class Clients:
    """Submits jobs to a queue and collects the replies."""

    def __init__(self, compiler: Any) -> None:
        self.queue = GrammarCompileQueue(lambda: compiler, pytest.fail, lambda: SHUTTING_DOWN)
        self.received: dict[str, Any] = {}
        self._changed = threading.Condition()

    def make_request(self, client: str, name: str, source: str = "", **fields: Any) -> None:
        row = make_request("x", constraint=Constraint(form=Form.REGEX, source=source or name, field="regex"))
        self.queue.prepare(
            Job(job_id=name, rows=[row], client=client, **fields),
            lambda refusal: self._on_reply(name, refusal),
            lambda found: self._on_reply(name, list(found.values())),
        )

    def _on_reply(self, name: str, what: Any) -> None:
        with self._changed:
            assert name not in self.received, "two replies"
            self.received[name] = what
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.received) >= count, WAIT_S), self.received


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Clients, SlowCompiler]]:
    """A queue whose only thread compiles the first request, "m0"."""
    monkeypatch.setattr(grammar_compile_queue, "THREADS", 1)
    compiler = SlowCompiler()
    clients = Clients(compiler)
    clients.make_request("many", "m0")
    assert compiler.begun.acquire(timeout=WAIT_S)
    yield clients, compiler
    clients.queue.close()


def test_clients_take_turns(busy: tuple[Clients, SlowCompiler]) -> None:
    clients, compiler = busy
    for number in range(1, 20):
        clients.make_request("many", f"m{number}")
    clients.make_request("few", "f0")
    clients.make_request("few", "f1")
    for _ in range(22):
        compiler.may.release()
    clients.wait(22)
    assert compiler.order[:6] == ["m0", "m1", "f0", "m2", "f1", "m3"]


def test_one_client_cannot_fill_the_queue(busy: tuple[Clients, SlowCompiler]) -> None:
    clients, compiler = busy
    for number in range(1, 70):
        clients.make_request("many", f"m{number}")
    clients.wait(5)
    assert set(clients.received) == {f"m{number}" for number in range(65, 70)}
    assert all(refusal.info.kind is ErrorKind.OVERLOADED for refusal in clients.received.values())
    refusal = clients.received["m65"].info
    assert refusal.retry_after_s == 1 and refusal.message == (
        "64 of your requests, with 64 different constraints, wait for their grammars to be compiled; retry in 1 s"
    )
    clients.make_request("few", "f0")
    clients.queue.cancel("m1")
    clients.queue.close()
    compiler.may.release()
    clients.wait(71)
    assert clients.received["f0"] is SHUTTING_DOWN and clients.received["m2"] is SHUTTING_DOWN
    assert clients.received["m1"].info.kind is ErrorKind.CANCELLED and clients.received["m0"] == ["m0"]
    clients.make_request("few", "late")
    assert clients.received["late"] is SHUTTING_DOWN


def test_requests_with_one_schema_wait_together(busy: tuple[Clients, SlowCompiler]) -> None:
    clients, compiler = busy
    for number in range(1, 300):
        clients.make_request("many", f"m{number}", "same")
    clients.queue.cancel("m7")
    for _ in range(2):
        compiler.may.release()
    clients.wait(300)
    assert compiler.order == ["m0", "same"]
    assert clients.received.pop("m7").info.kind is ErrorKind.CANCELLED
    assert all(found in (["m0"], ["same"]) for found in clients.received.values())


def test_waiting_requests_with_one_schema_are_limited(
    busy: tuple[Clients, SlowCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compile_queue, "MAX_WAITING_JOBS", 12)
    monkeypatch.setattr(grammar_compile_queue, "MAX_WAITING_JOBS_PER_CLIENT", 8)
    clients, compiler = busy
    for client in ("a", "b"):
        for number in range(10):
            clients.make_request(client, f"{client}{number}", "same")
    refused = {name for name, what in clients.received.items() if what.info.kind is ErrorKind.OVERLOADED}
    assert refused == {"a8", "a9", "b3", "b4", "b5", "b6", "b7", "b8", "b9"}
    message = "12 requests, with 2 different constraints, wait for their grammars to be compiled; retry in 1 s"
    assert clients.received["b3"].info.message == message
    for _ in range(3):
        compiler.may.release()
    clients.wait(21)


def test_a_job_that_another_engine_has_admitted_is_not_refused(
    busy: tuple[Clients, SlowCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compile_queue, "MAX_WAITING_GROUPS_PER_CLIENT", 2)
    clients, compiler = busy
    for number in range(1, 4):
        clients.make_request("many", f"m{number}")
    assert set(clients.received) == {"m3"}
    clients.make_request("many", "m4", was_admitted=True)
    for _ in range(4):
        compiler.may.release()
    clients.wait(5)
    assert clients.received["m4"] == ["m4"]


def test_a_process_that_cannot_be_started_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a running service were changed."""
    table = Tokenizer().byte_table
    compiler = GrammarCompiler(table, list, VOCAB_SIZE, CompileSandbox(table, VOCAB_SIZE))
    monkeypatch.setattr(compile_sandbox, "_PROGRAM", "sampling.grammar.not_there")
    clients = Clients(compiler)
    clients.make_request("one", "a+")
    clients.wait(1)
    error = clients.received["a+"]
    assert error.info.kind is ErrorKind.INTERNAL and "restart" in error.info.message
    monkeypatch.undo()
    clients.make_request("one", "b+")
    clients.wait(2)
    assert not isinstance(clients.received["b+"], ServiceError)
    clients.queue.close()


def test_tenants_share_no_grammars() -> None:
    """A compiled grammar answers at once. This would tell one tenant what another sent."""
    clients = Clients(GrammarCompiler(Tokenizer().byte_table, list, VOCAB_SIZE))
    for number, tenant in enumerate(("anna", "anna", "bert", "", "")):
        clients.make_request(f"client {tenant}", f"job {number}", source="[0-9]+", tenant=tenant)
        clients.wait(number + 1)
    anna, again, bert, one, other = [clients.received[f"job {number}"][0] for number in range(5)]
    assert anna is again and one is other
    assert len({anna, bert, one}) == 3
    clients.queue.close()
