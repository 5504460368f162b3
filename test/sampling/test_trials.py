"""Sandbox processes: one caller at a time, errors reach the right grammar, none is left over."""

from __future__ import annotations

from typing import Any

import pytest

from native.sandbox import Sandboxes
from rwkv_batch.tokenizer import VOCAB_SIZE, Tokenizer
from sampling.grammar.compile_sandbox import CompileSandbox
from sampling.grammar.constraint import Constraint, Form

DIGITS = Constraint(form=Form.REGEX, source="[0-9]+", field="regex")


class FakeProcess:
    """A process that accepts every grammar."""

    made = 0

    def __init__(self) -> None:
        FakeProcess.made += 1
        self.is_alive = True

    def call(self, constraint: object) -> None:
        return None

    def close(self) -> None:
        self.is_alive = False


@pytest.fixture
def sandboxes(monkeypatch: pytest.MonkeyPatch) -> Sandboxes:
    monkeypatch.setattr(FakeProcess, "made", 0)
    start: Any = FakeProcess
    return Sandboxes(start)


def test_a_process_that_died_idle_fails_no_grammar() -> None:
    """For example, killed for lack of memory."""
    sandbox = CompileSandbox(Tokenizer().byte_table, VOCAB_SIZE)
    sandbox.check(DIGITS)
    (idle,) = sandbox._sandboxes._idle
    idle._process.kill()
    idle._process.wait()
    sandbox.check(DIGITS)
    assert len(sandbox._sandboxes._idle) == 1 and sandbox._sandboxes._idle[0] is not idle
    sandbox.close()


def test_a_process_taken_by_another_thread_is_not_awaited(sandboxes: Sandboxes) -> None:
    class Taken(list[FakeProcess]):
        """The last process is taken between the check and the pop."""

        def pop(self, *arguments: object) -> FakeProcess:
            self.clear()
            return super().pop()

    sandboxes._idle = Taken([FakeProcess()])  # type: ignore[assignment]
    sandboxes.call(DIGITS)
    assert FakeProcess.made == 2


def test_a_busy_process_ends_when_all_are_closed(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[FakeProcess] = []

    def call(process: FakeProcess, constraint: object) -> None:
        asked.append(process)
        sandboxes.close()

    monkeypatch.setattr(FakeProcess, "call", call)
    sandboxes.call(DIGITS)
    assert not sandboxes._idle and not asked[0].is_alive
