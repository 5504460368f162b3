"""The slots of a session's row with overlap: its own, the state before its turn, and the previous state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rwkv_batch.core.sequence import NO_SLOT, Sequence
from rwkv_batch.engine import Engine
from state_pool.config import PoolConfig
from test.harness import call, run, started_engine, submit, turn
from test.serving import wait_for

PROMPTS = ("User: one\n\nAssistant:", "\n\nUser: two\n\nAssistant:", "\n\nUser: three\n\nAssistant:")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    pool = PoolConfig(state_db="", l1_sessions=2, l2_sessions=100, prefix_cache_slots=0)
    with started_engine(model, pool, overlap_on_cpu=True, max_running=32) as engine:
        yield engine


def test_every_running_slot_may_hold_a_session(engine: Engine) -> None:
    names = [f"session{i}" for i in range(32)]
    for job in [submit(engine, turn(name, PROMPTS[0], max_tokens=2)) for name in names]:
        job.wait()
    endless = [submit(engine, turn(name, PROMPTS[1], max_tokens=10**6, ignore_eos=True)) for name in names]
    rows = engine.scheduler._running
    wait_for(lambda: len(rows) == 32, 30, "32 rows run")
    wait_for(lambda: all(row.spare_slot != NO_SLOT for row in list(rows)), 30, "each has its second slot")
    for job in endless:
        engine.cancel(job.job.job_id)
        job.wait()


def conversation(engine: Engine, name: str) -> list[bytes]:
    free = [run(engine, turn(f"{name}-free", prompt, max_tokens=30, ignore_eos=True)).texts[0] for prompt in PROMPTS]
    stops = [text.decode(errors="ignore")[4:7].encode() for text in free]
    received = [
        run(engine, turn(name, prompt, max_tokens=30, ignore_eos=True, stop_strings=stops)).texts.get(0, b"")
        for prompt in PROMPTS
    ]
    call(engine, "session_delete", session_id=name, delete_prefix=True)
    return free + received


def test_a_row_without_its_second_slot_does_not_run_ahead(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no launched step has to be rolled back. A rollback would be impossible."""
    expected = conversation(engine, "with")
    asked: list[Sequence] = []
    monkeypatch.setattr(engine.state_manager, "add_spare", asked.append)
    assert conversation(engine, "without") == expected
    assert all(row.spare_slot == NO_SLOT for row in asked) and len(asked) > 100, (
        "it requests the slot again at every step"
    )


def test_a_row_without_its_second_slot_gets_one_later(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = conversation(engine, "with")
    add_spare, asked = engine.state_manager.add_spare, []

    def late(sequence: Sequence) -> None:
        asked.append(sequence)
        if asked.count(sequence) > 5:
            add_spare(sequence)

    monkeypatch.setattr(engine.state_manager, "add_spare", late)
    assert conversation(engine, "late") == expected
    assert {asked.count(row) for row in asked if len(row.output.tokens) == 30} == {6}, "and then decodes in every step"
