"""Sandbox processes: one caller at a time, errors reach the right grammar, none is left over."""

from __future__ import annotations

import pytest

from rwkv_batch.tokenizer import VOCAB_SIZE, Tokenizer
from sampling.grammar import compile_sandbox
from sampling.grammar.compile_sandbox import CompileSandbox
from sampling.grammar.constraint import Constraint, Form

DIGITS = Constraint(form=Form.REGEX, source="[0-9]+", field="regex")


class FakeProcess:
    """A process that accepts every grammar."""

    made = 0

    def __init__(self, vocabulary: object) -> None:
        FakeProcess.made += 1
        self.is_alive = True

    def try_compile(self, constraint: Constraint) -> None:
        return None

    def close(self) -> None:
        self.is_alive = False


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> CompileSandbox:
    monkeypatch.setattr(compile_sandbox, "_Process", FakeProcess)
    monkeypatch.setattr(FakeProcess, "made", 0)
    return CompileSandbox([], 0)


def test_a_process_that_died_idle_fails_no_grammar() -> None:
    """For example, killed for lack of memory."""
    sandbox = CompileSandbox(Tokenizer().byte_table, VOCAB_SIZE)
    sandbox.check(DIGITS)
    (idle,) = sandbox._idle
    idle._sandbox._process.kill()
    idle._sandbox._process.wait()
    sandbox.check(DIGITS)
    assert len(sandbox._idle) == 1 and sandbox._idle[0] is not idle
    sandbox.close()


def test_a_process_taken_by_another_thread_is_not_awaited(sandbox: CompileSandbox) -> None:
    class Taken(list[FakeProcess]):
        """The last process is taken between the check and the pop."""

        def pop(self, *arguments: object) -> FakeProcess:
            self.clear()
            return super().pop()

    sandbox._idle = Taken([FakeProcess(None)])  # type: ignore[assignment]
    sandbox.check(DIGITS)
    assert FakeProcess.made == 2


def test_a_busy_process_ends_when_all_are_closed(sandbox: CompileSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[FakeProcess] = []

    def try_compile(process: FakeProcess, constraint: Constraint) -> None:
        asked.append(process)
        sandbox.close()

    monkeypatch.setattr(FakeProcess, "try_compile", try_compile)
    sandbox.check(DIGITS)
    assert not sandbox._idle and not asked[0].is_alive
