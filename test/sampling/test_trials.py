"""Processes that try grammars: each has one asker at a time, what ends one is told of its own grammar, none is left."""

from __future__ import annotations

import pytest

from rwkv_batch.tokenizer import VOCAB_SIZE, Tokenizer
from sampling.grammar import compile_sandbox
from sampling.grammar.compile_sandbox import CompileSandbox
from sampling.grammar.constraint import Constraint, Form

DIGITS = Constraint(form=Form.REGEX, source="[0-9]+", field="regex")


class StandIn:
    """A process that finds nothing wrong."""

    made = 0

    def __init__(self, vocabulary: object) -> None:
        StandIn.made += 1
        self.is_alive = True

    def try_compile(self, constraint: Constraint) -> None:
        return None

    def close(self) -> None:
        self.is_alive = False


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> CompileSandbox:
    monkeypatch.setattr(compile_sandbox, "_Process", StandIn)
    monkeypatch.setattr(StandIn, "made", 0)
    return CompileSandbox([], 0)


def test_a_process_that_has_ended_while_it_was_idle_is_no_grammars_fault() -> None:
    """Killed by whoever wants memory, say."""
    trials = CompileSandbox(Tokenizer().byte_table, VOCAB_SIZE)
    trials.check(DIGITS)
    (idle,) = trials._idle
    idle._process.kill()
    idle._process.wait()
    trials.check(DIGITS)
    assert len(trials._idle) == 1 and trials._idle[0] is not idle
    trials.close()


def test_a_process_that_another_thread_takes_first_is_not_awaited(trials: CompileSandbox) -> None:
    class Taken(list[StandIn]):
        """The last one goes between the look and the grasp."""

        def pop(self, *arguments: object) -> StandIn:
            self.clear()
            return super().pop()

    trials._idle = Taken([StandIn(None)])  # type: ignore[assignment]
    trials.check(DIGITS)
    assert StandIn.made == 2


def test_a_process_ends_though_it_tries_a_grammar_when_all_are_ended(
    trials: CompileSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[StandIn] = []

    def try_compile(process: StandIn, constraint: Constraint) -> None:
        asked.append(process)
        trials.close()

    monkeypatch.setattr(StandIn, "try_compile", try_compile)
    trials.check(DIGITS)
    assert not trials._idle and not asked[0].is_alive
