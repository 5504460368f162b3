"""Sessions through the engine: turns, order, branches, stops inside tokens, failures; on a real SQLite file."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import Phase, Sequence
from rwkv_batch.core.state_manager import StateManager
from rwkv_batch.engine import Engine
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.request import FinishReason
from rwkv_batch.runner.step_sampling import InFlightStep
from sampling.params import SamplingParams
from state_pool.config import PoolConfig
from state_pool.session_file import decode
from test.conftest import rest_slow
from test.harness import (
    TOKENIZER,
    RunningJob,
    call,
    free_slots,
    make_request,
    paused_engine,
    run,
    started_engine,
    submit,
    turn,
)
from test.serving import wait_for


@pytest.fixture(scope="module", params=rest_slow(["overlapped", "plain"]))
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Engine]:
    pool = PoolConfig(state_db=str(tmp_path_factory.mktemp("db") / "s.db"), l1_sessions=4, l2_sessions=4)
    with started_engine(model, pool, overlap_on_cpu=request.param == "overlapped") as engine:
        yield engine


def conversation(engine: Engine, session_id: str, prompts: list[str], **fields: object) -> list[bytes]:
    """Run turns one after another; returns the answers."""
    return [run(engine, turn(session_id, prompt, **fields)).texts[0] for prompt in prompts]


def test_a_turn_is_reported_before_it_can_be_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise another engine could repeat a kept turn of a lost engine. Also for a single step."""
    record, received = engine.state_manager.record_turn, list[bool]()

    def noted(sequence: Sequence, acknowledge: Any) -> None:
        received.append(any(delta.session_history == (0, 0) for events in job.events for delta in events.deltas))
        record(sequence, acknowledge)

    monkeypatch.setattr(engine.state_manager, "record_turn", noted)
    with paused_engine(engine):
        job = submit(engine, turn("told", "Hello", max_tokens=1), return_token_ids=True)
    assert job.wait().refusal is None
    assert received == [True]


def test_a_resumed_turn_does_not_go_on_in_a_session_that_was_begun_again(engine: Engine) -> None:
    """It may have as many tokens. A client would get the end of another answer."""

    def told() -> tuple[int, int]:
        run(engine, turn("again", "Hello", max_tokens=1, ignore_eos=True))
        deltas = [
            delta
            for events in run(engine, turn("again", "more", max_tokens=1), return_token_ids=True).events
            for delta in events.deltas
        ]
        return next(one.session_history for one in deltas if one.session_history is not None)

    first = told()
    assert call(engine, "session_delete", session_id="again", delete_prefix=False) == 1
    second = told()
    assert first != second
    request = turn("again", "third", max_tokens=1)
    for history, goes_on in ((second, False), ((second[0], second[1] + 1), True)):
        session = msgspec.structs.replace(request.session, expected_history=history)
        job = run(engine, msgspec.structs.replace(request, session=session))
        assert (job.finishes[0].error is None) is goes_on


def sampled_ids(job: RunningJob) -> list[int]:
    """Token ids of the shown text, from a job with log-probabilities."""
    entries = job.logprobs
    return [TOKENIZER.byte_table.index(entry.token) for entry in entries]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_session_equals_the_whole_conversation_in_one_prompt(engine: Engine, temperature: float) -> None:
    prompts = ["User: hello\n\nAssistant:", "\n\nUser: again\n\nAssistant:", "\n\nUser: and more\n\nAssistant:"]
    sampling = SamplingParams(temperature=temperature, top_k=30, seed=11, top_logprobs=0)
    received: list[int] = []
    for prompt in prompts:
        received += TOKENIZER.encode(prompt)
        in_session = run(engine, turn(f"whole-{temperature}", prompt, sampling=sampling, max_tokens=12))
        alone = run(engine, make_request(list(received), sampling=sampling, max_tokens=12))
        assert in_session.texts == alone.texts
        assert in_session.finishes[0].prompt_tokens == len(received)
        received += sampled_ids(in_session)


def test_a_stop_inside_tokens_is_not_in_the_state(engine: Engine) -> None:
    """The state ends before the stop. The next turn equals one with the whole text in its prompt."""
    prompt, next_prompt = "Once upon a time", " and then"
    free = run(engine, make_request(prompt, max_tokens=20, ignore_eos=True)).texts[0]
    text = free.decode(errors="ignore")
    at = len(text) // 2
    stop = text[at : at + 5].encode()
    cut = free.index(stop)
    session_id = "stop"
    first = run(engine, turn(session_id, prompt, max_tokens=20, ignore_eos=True, stop_strings=[stop]))
    assert first.finishes[0].reason is FinishReason.STOP and first.texts[0] == free[:cut]
    second = run(engine, turn(session_id, next_prompt, max_tokens=10)).texts[0]
    shown = _tokens_before(engine, prompt, cut)
    assert (
        second
        == run(
            engine, make_request(TOKENIZER.encode(prompt) + shown + TOKENIZER.encode(next_prompt), max_tokens=10)
        ).texts[0]
    )


@pytest.mark.parametrize("how", ["id", "string"])
def test_a_stop_needs_no_second_prefill(engine: Engine, how: str) -> None:
    """Tokens after the stop are rolled back. The turn's start, of any length, is not computed again."""
    prompt = f"{how}: " + "once upon a time there was " * 20
    sampling = SamplingParams(temperature=0.0, top_logprobs=0)
    ids = sampled_ids(run(engine, make_request(prompt, max_tokens=14, ignore_eos=True, sampling=sampling)))
    pieces = [TOKENIZER.byte_table[token] for token in ids]
    late = next(i for i in range(5, 13) if ids[i] not in ids[:i])
    across = pieces[late - 1][-1:] + pieces[late][:1]  # the end of one token and the beginning of the next
    assert across not in b"".join(pieces[:late])
    stop: dict[str, Any] = {"stop_ids": [ids[late]]} if how == "id" else {"stop_strings": [across]}
    before = call(engine, "status")["computed_tokens"]
    received = run(engine, turn(f"once-{how}", prompt, max_tokens=100, ignore_eos=True, use_prefix_cache=False, **stop))
    assert received.finishes[0].reason is FinishReason.STOP
    wait_for(lambda: call(engine, "status")["running_rows"] == 0, 30, "the turn is stored")
    computed = call(engine, "status")["computed_tokens"] - before
    assert computed <= len(TOKENIZER.encode(prompt)) + late + 6


def _tokens_before(engine: Engine, prompt: str, cut: int) -> list[int]:
    """The greedy continuation's tokens up to byte `cut`; a cut token is tokenised again."""
    sampling = SamplingParams(temperature=0.0, top_logprobs=0)
    ids: list[int] = []
    length = 0
    for token in sampled_ids(run(engine, make_request(prompt, max_tokens=20, ignore_eos=True, sampling=sampling))):
        piece = TOKENIZER.byte_table[token]
        if length + len(piece) > cut:
            return ids + (TOKENIZER.encode_bytes(piece[: cut - length]) if cut > length else [])
        ids.append(token)
        length += len(piece)
    return ids


def test_random_stops_never_leak_into_the_state(engine: Engine) -> None:
    rng = random.Random(5)
    for case in range(12):
        prompt = f"case {case}: the"
        free = run(engine, make_request(prompt, max_tokens=16, ignore_eos=True)).texts[0].decode(errors="ignore")
        if len(free) < 8:
            continue
        at = rng.randrange(2, len(free) - 3)
        # Decoys match the text's beginning but never complete: their rollback states must be dropped.
        decoys = [(free[i : i + 3] + "\x01").encode() for i in (1, 4)]
        stop = free[at : at + rng.randint(1, 4)].encode()
        whole = run(engine, turn(f"r{case}", prompt, max_tokens=16, ignore_eos=True, stop_strings=[stop, *decoys]))
        cut = len(whole.texts[0])
        after = run(engine, turn(f"r{case}", " next", max_tokens=6)).texts[0]
        ids = TOKENIZER.encode(prompt) + _tokens_before(engine, prompt, cut) + TOKENIZER.encode(" next")
        assert after == run(engine, make_request(ids, max_tokens=6)).texts[0]


def test_turns_of_one_session_keep_their_order(engine: Engine) -> None:
    with paused_engine(engine):
        first = submit(engine, turn("order", "one", max_tokens=12))
        second = submit(engine, turn("order", " two", max_tokens=12))
        third = submit(engine, turn("order", " three", wait=False))
    refusal = third.wait().refusal
    assert refusal is not None and refusal.info.kind is ErrorKind.SESSION_BUSY
    first.wait(), second.wait()
    assert second.texts[0] == conversation(engine, "order-2", ["one", " two"], max_tokens=12)[1]


def test_branches_do_not_change_their_parent(engine: Engine) -> None:
    root = run(engine, turn("tree", "root", branch_from=0, max_tokens=5))
    one = root.finishes[0].dialogue_idx
    assert one is not None
    left = run(engine, turn("tree", " left", branch_from=one, max_tokens=5))
    right = run(engine, turn("tree", " right", branch_from=one, max_tokens=5))
    again = run(engine, turn("tree", " left", branch_from=one, max_tokens=5))
    assert left.texts == again.texts
    numbers = [ended.finishes[0].dialogue_idx for ended in (root, left, right, again)]
    assert len(set(numbers)) == 4
    with pytest.raises(ServiceError) as unknown:
        run(engine, turn("tree", "x", branch_from=99))
    assert unknown.value.info.kind is ErrorKind.SESSION_NOT_FOUND
    files = [decode(call(engine, "session_export", session_id="tree", dialogue=number)) for number in (one, numbers[1])]
    assert files[0].num_tokens < files[1].num_tokens


def test_cancelled_and_timed_out_turns_leave_the_session_as_it_was(engine: Engine) -> None:
    conversation(engine, "kept", ["begin"], max_tokens=6)
    conversation(engine, "twin", ["begin"], max_tokens=6)
    cancelled = submit(engine, turn("kept", " endless", max_tokens=10**6, ignore_eos=True))
    assert cancelled.started.wait(60)
    engine.cancel(cancelled.job.job_id)
    cancelled.wait()
    timed_out = run(engine, turn("kept", " endless", max_tokens=10**6, ignore_eos=True), timeout_s=0.3)
    assert timed_out.finishes[0].reason is FinishReason.TIMEOUT
    assert conversation(engine, "kept", [" go on"]) == conversation(engine, "twin", [" go on"])


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("durability", ["log", "lazy", "turn", "memory"])
def test_a_turn_that_fails_after_its_answer_is_kept_or_reported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, overlap: bool
) -> None:
    """The step that reads a closed turn's last tokens fails. With a log the turn is kept, without one it is not."""
    db, words = ("", "log") if durability == "memory" else (str(tmp_path / "s.db"), durability)
    pool = PoolConfig(state_db=db, durability=words, l1_sessions=4, l2_sessions=4)
    with started_engine(model, pool, overlap_on_cpu=overlap) as engine:
        conversation(engine, "s", ["one"], max_tokens=6)
        free, launch = free_slots(engine), engine.model_runner.launch

        def failing(rows: list[ScheduledRow], *after: Any) -> InFlightStep:
            if any(row.sequence.phase is Phase.CLOSING for row in rows):
                raise RuntimeError("broken")
            return launch(rows, *after)

        with monkeypatch.context() as patch:
            patch.setattr(engine.model_runner, "launch", failing)
            failed = run(engine, turn("s", " two", max_tokens=6))
        assert failed.events[-1].error is None
        finish, is_kept = failed.finishes[0], durability in ("log", "lazy")
        assert finish.reason is (FinishReason.LENGTH if is_kept else FinishReason.ERROR)
        assert is_kept or (finish.error is not None and "cancelled before" in finish.error.message)
        prompts = ["one", " two", " three"] if is_kept else ["one", " three"]
        assert (
            conversation(engine, "s", [" three"], max_tokens=6)
            == conversation(engine, "twin", prompts, max_tokens=6)[-1:]
        )
        call(engine, "session_delete", session_id="twin")
        assert free_slots(engine) == free


@contextmanager
def writer_that_waits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: sqlite3.Error | None = None
) -> Iterator[threading.Event]:
    """Commit recorded turns once the gate opens, or fail them with `error`."""
    gate, commit = threading.Event(), engine.model_runner.pool._store.writer._transaction

    def late(jobs: list[Any]) -> sqlite3.Error | None:
        gate.wait()
        return error or commit(jobs)

    with monkeypatch.context() as patch:
        patch.setattr(engine.model_runner.pool._store.writer, "_transaction", late)
        yield gate
        gate.set()


def recorded(engine: Engine, running: RunningJob) -> None:
    """Wait until the job's turn is recorded but not reported."""
    wait_for(lambda: any(row.has_answered for row in list(engine.jobs._leased)), 30, "the turn is recorded")
    assert not running.done.is_set()


@pytest.mark.parametrize("error", [None, sqlite3.OperationalError("disk full")], ids=["kept", "not kept"])
def test_a_turn_recorded_at_shutdown_gets_its_outcome(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: sqlite3.Error | None
) -> None:
    pool = PoolConfig(state_db=str(tmp_path / "s.db"))
    with started_engine(model, pool) as engine:
        conversation(engine, "s", ["one"], max_tokens=6)
        expected = conversation(engine, "twin", ["one", " two", " three"][:: 1 if error is None else 2], max_tokens=6)
        endless = submit(engine, make_request("endless", max_tokens=10**6, ignore_eos=True))
        close = engine.model_runner.pool.close
        with writer_that_waits(engine, monkeypatch, error) as gate:
            last = submit(engine, turn("s", " two", max_tokens=6))
            recorded(engine, last)
            # The pool closes after every job got its end.
            monkeypatch.setattr(engine.model_runner.pool, "close", lambda: (gate.set(), close()))
            engine.stop()
        assert endless.wait().events[-1].error is not None
        assert last.wait().events[-1].error is None
        finish = last.finishes[0]
        assert finish.reason is (FinishReason.LENGTH if error is None else FinishReason.ERROR)
        assert error is None or (finish.error is not None and "disk full" in finish.error.message)
    with started_engine(model, pool) as engine:
        assert conversation(engine, "s", [" three"], max_tokens=6) == expected[-1:]


def test_a_lost_device_reports_that_a_recorded_turn_may_be_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(rows: list[ScheduledRow], *after: Any) -> InFlightStep:
        raise RuntimeError("the device is lost")

    pool = PoolConfig(state_db=str(tmp_path / "s.db"))
    with started_engine(model, pool) as engine:
        expected = conversation(engine, "twin", ["one", " two"], max_tokens=6)[1]
        with writer_that_waits(engine, monkeypatch):
            last = submit(engine, turn("s", "one", max_tokens=6))
            recorded(engine, last)
            monkeypatch.setattr(engine.model_runner, "is_device_lost", lambda: True)
            monkeypatch.setattr(engine.model_runner, "launch", lost)
            other = submit(engine, turn("other", "one"))
            errors = [job.wait().events[-1].error for job in (last, other)]
        assert all(error is not None and "the device is lost" in error.message for error in errors)
        assert ["/state/status" in error.message for error in errors if error is not None] == [True, False]
        assert not last.finishes
        engine.model_runner.pool.close()
    with started_engine(model, pool) as engine:
        assert conversation(engine, "s", [" two"], max_tokens=6) == [expected]


def test_deleting_a_running_session_wins(engine: Engine) -> None:
    conversation(engine, "doomed", ["begin"], max_tokens=4)
    running = submit(engine, turn("doomed", " endless", max_tokens=10**6, ignore_eos=True))
    assert running.started.wait(60)
    assert call(engine, "session_delete", session_id="doomed") == 1
    ended = running.wait().finishes[0]
    assert ended.reason is FinishReason.ERROR and ended.error is not None
    assert ended.error.kind is ErrorKind.SESSION_NOT_FOUND
    assert call(engine, "session_delete", session_id="doomed") == 0
    assert run(engine, turn("doomed", "new")).finishes[0].cached_tokens == 0


def test_many_sessions_interleaved_over_small_tiers(engine: Engine) -> None:
    """More sessions than L1 and L2 hold. Each gives the same text as when it runs alone."""
    names = [f"many-{i}" for i in range(30)]
    answers: dict[str, list[bytes]] = {name: [] for name in names}
    for number in range(3):
        jobs = {name: submit(engine, turn(name, f" turn {number} of {name}", max_tokens=6)) for name in names}
        for name, job in jobs.items():
            answers[name].append(job.wait().texts[0])
    for name in random.Random(1).sample(names, 6):
        prompts = [f" turn {number} of {name}" for number in range(3)]
        assert conversation(engine, f"{name}-alone", prompts, max_tokens=6) == answers[name]


def test_sessions_survive_a_restart(model: Path, tmp_path: Path) -> None:
    pool = PoolConfig(state_db=str(tmp_path / "s.db"))
    with started_engine(model, pool) as engine:
        conversation(engine, "s", ["one", " two"], max_tokens=8)
        expected = conversation(engine, "twin", ["one", " two", " three"], max_tokens=8)[2]
    with started_engine(model, pool) as engine:
        resumed = run(engine, turn("s", " three", max_tokens=8))
        assert resumed.texts[0] == expected
        assert resumed.finishes[0].cached_tokens > 0
        assert call(engine, "session_status", limit=10, offset=0).total == 2


@pytest.mark.parametrize(("before", "after"), [("fp32", "int8"), ("bf16", "int4"), ("int8", "fp32")])
def test_a_session_continues_with_another_storage_of_the_weights(
    model: Path, tmp_path: Path, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fingerprint names the weights. So the stored state is used and no token is read again."""
    pool, replays = PoolConfig(state_db=str(tmp_path / "s.db")), []
    plain = StateManager._start_from_session

    def noting(manager: StateManager, sequence: Sequence) -> None:
        plain(manager, sequence)
        assert sequence.lease is not None and sequence.lease.exists
        replays.append(sequence.turn_start)

    with started_engine(model, pool, dtype=before) as engine:
        conversation(engine, "s", ["one", " two"], max_tokens=8)
        conversation(engine, "twin", ["one", " two"], max_tokens=8)
        kept = run(engine, turn("twin", " three", max_tokens=8)).finishes[0].cached_tokens
    monkeypatch.setattr(StateManager, "_start_from_session", noting)
    with started_engine(model, pool, dtype=after) as engine:
        resumed = run(engine, turn("s", " three", max_tokens=8)).finishes[0]
    assert (resumed.cached_tokens, replays) == (kept, [0])


def test_prefix_cache_changes_no_text(model: Path) -> None:
    header = "You are a careful translator of texts about the sea and the weather. " * 6 + "\n\nUser: "
    with started_engine(model, PoolConfig(state_db="", prefix_cache_slots=0)) as plain:
        expected = [run(plain, make_request(header + tail)).texts[0] for tail in ("one", "two", "three", "four")]
    with started_engine(model) as caching:
        ended = [run(caching, make_request(header + tail)) for tail in ("one", "two", "three", "four")]
        together = run(caching, *[make_request(header.upper() + tail) for tail in ("one", "two", "three", "four")])
    assert [job.texts[0] for job in ended] == expected
    assert ended[-1].finishes[0].cached_tokens >= 32
    cached = sorted(finish.cached_tokens for finish in together.finishes.values())
    assert cached[0] == 0 and cached[1] >= 32, "rows that arrive together share one prefill of their prefix"


def test_a_named_prefix_is_kept_at_its_first_use(model: Path) -> None:
    page = "A page that every prompt of this test begins with, long enough for the cache." * 3
    length = len(make_request(page).prompt)
    with started_engine(model, PoolConfig(state_db="")) as engine:
        plain = [run(engine, make_request(page + end, use_prefix_cache=False)).texts[0] for end in (" One", " Two")]
        pool = engine.model_runner.pool
        history = pool.prefixes.history_bytes
        jobs = [run(engine, make_request(page + end, cached_tokens=length)) for end in (" One", " Two")]
        assert pool.prefixes.history_bytes == history, "no such prompt is compared with earlier ones"
    assert [job.texts[0] for job in jobs] == plain
    assert [job.finishes[0].cached_tokens for job in jobs] == [0, length]
