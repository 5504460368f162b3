"""Tuned states through the engine: rows and sessions that start from them, among others."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from demo.random_weights import write_random_model
from rwkv_batch.calls import DecodeDefaults
from rwkv_batch.engine import Engine
from rwkv_batch.errors import ErrorKind, ServiceError, StartupError
from rwkv_batch.request import GenerateRequest
from state_pool.config import PoolConfig
from test.harness import TOKENIZER, call, eventually_holds, make_request, run, started_engine, submit, tiny_model, turn
from test.model.test_model import oracle
from test.pool_integrity import integrity_faults
from test.state_files import random_state, write_state

pytestmark = pytest.mark.slow

NAMES = ("pirate", "poet", "clerk")
SYSTEM = (
    "A long beginning that every prompt of this kind has in common, word for word, so that it is worth a state. " * 2
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    for seed, name in enumerate(NAMES):
        write_state(folder / f"{name}.pth", random_state(seed))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return tiny_model(folder, width=128)


@contextlib.contextmanager
def engine_with_states(model: Path, db: str = "", **fields: object) -> Iterator[Engine]:
    states = tuple(f"{name}={model.parent / name}.pth" for name in NAMES)
    pool = PoolConfig(**{"state_db": db, "l1_sessions": 4, "l2_sessions": 4, **fields.pop("pool", {})})  # type: ignore[dict-item]
    with started_engine(model, pool, **{"states": states, "models_dir": str(model.parent), **fields}) as engine:
        yield engine
        assert eventually_holds(engine, lambda: integrity_faults(engine.model_runner.pool) == [])


@pytest.fixture(scope="module", params=["plain", "overlapped"])
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Engine]:
    db = str(tmp_path_factory.mktemp("db") / "s.db")
    with engine_with_states(model, db, overlap_on_cpu=request.param == "overlapped") as engine:
        yield engine


def test_rows_start_from_the_state_as_the_reference_does(model: Path, engine: Engine) -> None:
    path = write_random_model(model.with_suffix(".pth"), layers=3, width=128)
    reference = oracle(path)
    ids = TOKENIZER.encode("Once upon a time")
    for seed, name in enumerate(NAMES):
        _, state = reference.forward([0], None)
        for layer, wkv in enumerate(random_state(seed)):
            state[3 * layer].zero_(), state[3 * layer + 2].zero_()
            state[3 * layer + 1] = wkv.clone()
        logits, state = reference.forward(list(ids), state)
        expected: list[int] = []
        for _ in range(8):
            expected.append(int(torch.as_tensor(logits).argmax()))
            logits, state = reference.forward([expected[-1]], state)
        text = run(engine, make_request(ids, state=name, max_tokens=8, ignore_eos=True)).texts[0]
        assert text == b"".join(TOKENIZER.byte_table[token] for token in expected)


def mixed_rows(prefix: str, count: int) -> list[GenerateRequest]:
    """Rows of all kinds, with prompts of all lengths and shared prefixes."""
    rows = []
    for i in range(count):
        name = (*NAMES, "")[i % 4]
        prompt = (SYSTEM if i % 3 == 0 else "") + f"{prefix} {i}"
        rows.append(make_request(prompt, state=name, max_tokens=4 + i % 9, ignore_eos=True))
    return rows


def test_continuations_share_one_prefill(engine: Engine) -> None:
    several = run(engine, make_request("Tell me", state="poet", n=3, max_tokens=6, ignore_eos=True))
    one_token = run(engine, make_request("a", state="poet", n=3, max_tokens=6, ignore_eos=True))
    for found, prompt in ((several, "Tell me"), (one_token, "a")):
        assert set(found.all_texts) == {
            run(engine, make_request(prompt, state="poet", max_tokens=6, ignore_eos=True)).texts[0]
        }


def test_a_prefix_is_shared_only_within_one_state(engine: Engine) -> None:
    for name in ("pirate", "poet", ""):
        first = [run(engine, make_request(f"{SYSTEM}{i}", state=name, ignore_eos=True)) for i in range(3)]
        assert first[0].finishes[0].cached_tokens == 0
        assert first[2].finishes[0].cached_tokens > 32
        for i, job in enumerate(first):
            fresh = run(engine, make_request(f"{SYSTEM}{i}", state=name, ignore_eos=True, use_prefix_cache=False))
            assert job.texts == fresh.texts


def history_of(prompts: list[str], answers: list[bytes]) -> list[int]:
    """Return the token ids of a conversation up to the last prompt."""
    ids: list[int] = []
    for i, prompt in enumerate(prompts):
        ids += TOKENIZER.encode(prompt)
        ids += TOKENIZER.encode_bytes(answers[i]) if i < len(answers) else []
    return ids


def test_a_session_continues_from_its_initial_state(engine: Engine) -> None:
    first = run(engine, turn("s", "hello", state="clerk", max_tokens=1, ignore_eos=True))
    second = run(engine, turn("s", " again", max_tokens=6, ignore_eos=True))
    ids = history_of(["hello", " again"], [first.texts[0]])
    whole = run(engine, make_request(ids, state="clerk", max_tokens=6, ignore_eos=True))
    assert second.texts == whole.texts
    assert second.texts != run(engine, make_request(ids, max_tokens=6, ignore_eos=True)).texts
    assert run(engine, turn("s", " once more", state="clerk")).refusal is None


def test_a_first_token_stop_returns_to_the_state(engine: Engine) -> None:
    """A turn whose first token is a stop is read again. It is read from the tuned state, not from zero."""
    free = run(engine, make_request("stop", state="poet", max_tokens=8, ignore_eos=True)).texts[0]
    stop = free[:2]
    first = run(engine, turn("stops", "stop", state="poet", max_tokens=8, ignore_eos=True, stop_strings=[stop]))
    assert first.texts[0] == b""
    after = run(engine, turn("stops", " next", max_tokens=6, ignore_eos=True)).texts[0]
    whole = TOKENIZER.encode("stop") + TOKENIZER.encode(" next")
    assert after == run(engine, make_request(whole, state="poet", max_tokens=6, ignore_eos=True)).texts[0]


def test_dialogues_start_from_the_state(engine: Engine) -> None:
    root = run(engine, turn("tree", "one", branch_from=0, state="poet", max_tokens=6, ignore_eos=True))
    assert root.texts == run(engine, make_request("one", state="poet", max_tokens=6, ignore_eos=True)).texts
    child = turn("tree", " two", branch_from=root.finishes[0].dialogue_idx, state="pirate")
    with pytest.raises(ServiceError, match="began with the tuned state 'poet'") as refused:
        run(engine, child)
    assert (refused.value.info.field, refused.value.info.given) == ("state", "pirate")


def test_a_state_other_than_the_sessions_is_refused(engine: Engine) -> None:
    run(engine, turn("plain", "hello"))
    run(engine, turn("tuned", "hello", state="poet"))
    call(engine, "session_import", session_id="brought", content=call(engine, "session_export", session_id="tuned"))
    for session, state, why in (
        ("plain", "poet", "the empty state"),
        ("brought", "poet", "not known to have begun with 'poet': .* imported from a file, which does not say"),
        ("tuned", "pirate", "the tuned state 'poet'"),
    ):
        with pytest.raises(ServiceError, match=why) as refused:
            run(engine, turn(session, " more", state=state))
        assert refused.value.info.kind is ErrorKind.INVALID_FIELD and refused.value.info.field == "state"


def test_a_waiting_turn_is_checked_after_the_first_turn(engine: Engine) -> None:
    first = submit(engine, turn("race", "one", state="poet", max_tokens=12, ignore_eos=True))
    second = submit(engine, turn("race", " two", state="pirate", max_tokens=12))
    first.wait(), second.wait()
    error = second.finishes[0].error
    assert error is not None and error.field == "state" and "'poet'" in error.message
    assert run(engine, turn("race", " three")).finishes[0].error is None


def test_an_unknown_state_lists_the_known_ones(engine: Engine) -> None:
    for row in (make_request("hello", state="nobody"), turn("unknown", "hello", state="nobody")):
        with pytest.raises(ServiceError, match=r"'nobody'.*'pirate', 'poet', 'clerk'") as refused:
            run(engine, make_request("good"), row) if row.session is None else run(engine, row)
        assert refused.value.info.kind is ErrorKind.STATE_NOT_FOUND and refused.value.info.field == "state"


def rebuilt_from_the_log(db: Path) -> None:
    """As after a crash before any state was stored."""
    with contextlib.closing(sqlite3.connect(db)) as connection, connection:
        connection.execute("DELETE FROM states")


@pytest.mark.parametrize("rebuilt", [False, True], ids=["from its state", "from its tokens"])
def test_a_session_survives_a_restart(model: Path, tmp_path: Path, rebuilt: bool) -> None:
    db = tmp_path / "s.db"
    options = {"pool": {"retain_tokens": -1}}
    with engine_with_states(model, str(db), **options) as engine:
        first = run(engine, turn("s", "hello", state="poet", max_tokens=1, ignore_eos=True))
        branch = run(engine, turn("d", "hello", branch_from=0, state="pirate", max_tokens=1, ignore_eos=True))
        run(engine, turn("d", " x", branch_from=1, max_tokens=1))
    if rebuilt:
        rebuilt_from_the_log(db)
    ids = history_of(["hello", " again"], [first.texts[0]])
    with engine_with_states(model, str(db), **options) as engine:
        second = run(engine, turn("s", " again", max_tokens=6, ignore_eos=True))
        assert second.texts == run(engine, make_request(ids, state="poet", max_tokens=6, ignore_eos=True)).texts
        again = run(engine, turn("d", " again", branch_from=1, max_tokens=6, ignore_eos=True))
        ids = history_of(["hello", " again"], [branch.texts[0]])
        assert again.texts == run(engine, make_request(ids, state="pirate", max_tokens=6, ignore_eos=True)).texts
        with pytest.raises(ServiceError, match="began with the tuned state 'poet'"):
            run(engine, turn("s", " more", state="pirate"))


def test_a_missing_state_of_a_rebuilt_session_is_named(model: Path, tmp_path: Path) -> None:
    db = tmp_path / "s.db"
    with engine_with_states(model, str(db), pool={"retain_tokens": -1}) as engine:
        first = run(engine, turn("s", "hello", state="poet", max_tokens=1, ignore_eos=True))
    rebuilt_from_the_log(db)
    with engine_with_states(model, str(db), states=()) as engine:
        with pytest.raises(ServiceError, match="tuned state 'poet'") as refused:
            _raise_row_error(engine, turn("s", " again"))
        assert refused.value.info.kind is ErrorKind.SESSION_UNUSABLE
        # The same numbers under another name will do, and the session is not given up meanwhile.
        call(engine, "state_add", name="other-name", file="poet.pth")
        second = run(engine, turn("s", " again", max_tokens=6, ignore_eos=True))
        ids = history_of(["hello", " again"], [first.texts[0]])
        assert second.texts == run(engine, make_request(ids, state="other-name", max_tokens=6, ignore_eos=True)).texts


def _raise_row_error(engine: Engine, row: GenerateRequest) -> None:
    error = run(engine, row).finishes[0].error
    if error is not None:
        raise ServiceError.from_info(error)


def test_an_exported_session_has_its_state(model: Path, tmp_path: Path) -> None:
    db = tmp_path / "s.db"
    with engine_with_states(model, str(db), pool={"retain_tokens": -1}) as engine:
        run(engine, turn("s", "hello", state="poet", max_tokens=1, ignore_eos=True))
    rebuilt_from_the_log(db)
    with engine_with_states(model, str(db), pool={"retain_tokens": -1}) as engine:
        call(engine, "session_import", session_id="copy", content=call(engine, "session_export", session_id="s"))
        texts = {run(engine, turn(name, " again", ignore_eos=True)).texts[0] for name in ("s", "copy")}
        assert len(texts) == 1


def test_states_share_few_slots(model: Path, tmp_path: Path) -> None:
    """There are fewer slots than states, and rows for every slot. All answers are right."""
    pool = {"state_slots": 1, "prefix_cache_slots": 1, "l1_sessions": 1}
    with engine_with_states(model, str(tmp_path / "s.db"), pool=pool, max_running=4) as engine:
        rows = mixed_rows("few", 24)
        turns = [turn(f"few-{i}", "hi", state=NAMES[i % 3], max_tokens=5, ignore_eos=True) for i in range(9)]
        jobs = [submit(engine, row) for row in [*turns, *rows]]
        texts = [job.wait().texts[0] for job in jobs]
        alone = [
            run(engine, make_request(r.prompt, state=r.state, max_tokens=r.max_tokens, ignore_eos=True))
            for r in [*turns, *rows]
        ]
        assert texts == [job.texts[0] for job in alone]


def test_states_are_added_and_removed_while_rows_run(model: Path, tmp_path: Path) -> None:
    with engine_with_states(model, str(tmp_path / "s.db"), max_running=2) as engine:
        expected = run(engine, make_request("go", state="poet", max_tokens=10, ignore_eos=True)).texts[0]
        jobs = [submit(engine, make_request("go", state="poet", max_tokens=10, ignore_eos=True)) for _ in range(8)]
        removed = call(engine, "state_remove", name="poet")
        assert removed.name == "poet" and removed.orientation == "value_key"
        assert {job.wait().texts[0] for job in jobs} == {expected}
        with pytest.raises(ServiceError, match="no tuned state 'poet'"):
            run(engine, make_request("go", state="poet"))
        with pytest.raises(ServiceError, match="no tuned state 'poet'"):
            call(engine, "state_remove", name="poet")
        call(engine, "state_add", name="poet", file="poet.pth")
        assert run(engine, make_request("go", state="poet", max_tokens=10, ignore_eos=True)).texts[0] == expected


def test_states_of_requests_survive_a_restart(model: Path, tmp_path: Path) -> None:
    db = str(tmp_path / "s.db")
    with engine_with_states(model, db, states=()) as engine:
        info = call(engine, "state_add", name="sent", content=(model.parent / "poet.pth").read_bytes())
        assert info.is_kept and info.file == "sent" and info.digest
        call(engine, "state_add", name="gone", file="clerk.pth")
        call(engine, "state_remove", name="gone")
        text = run(engine, make_request("go", state="sent", ignore_eos=True)).texts[0]
    assert stat.S_IMODE((tmp_path / "s.db.states").stat().st_mode) == 0o700
    left, being_written = tmp_path / "s.db.states" / ".left.safetensors", tmp_path / "s.db.states" / ".now.safetensors"
    for half in (left, being_written):
        half.write_bytes(b"half")
    os.utime(left, (0, 0))
    (tmp_path / "s.db.states").chmod(0o755)
    with engine_with_states(model, db, states=()) as engine:
        assert [(info.name, info.file) for info in call(engine, "state_list")] == [("sent", "sent")]
        assert run(engine, make_request("go", state="sent", ignore_eos=True)).texts[0] == text
    assert not left.exists(), "of a process that was killed"
    being_written.unlink()  # of another engine, which a start must not disturb
    assert [path.name for path in (tmp_path / "s.db.states").iterdir()] == ["sent.safetensors"]
    assert stat.S_IMODE((tmp_path / "s.db.states").stat().st_mode) == 0o700
    other = write_random_model(tmp_path / "other.pth", layers=2, width=128)
    with started_engine(other, PoolConfig(state_db=db)) as engine:
        (kept,) = call(engine, "state_list")
        assert "the model has 2" in kept.error and (kept.name, kept.file) == ("sent", "sent")
        assert "sent.safetensors" in kept.error and str(tmp_path) not in kept.error
        call(engine, "state_remove", name="sent")
        assert call(engine, "state_list") == [] and list((tmp_path / "s.db.states").iterdir()) == []


def test_a_state_that_cannot_be_kept_is_an_error(model: Path, tmp_path: Path) -> None:
    with engine_with_states(model, str(tmp_path / "s.db"), states=()) as engine:
        (tmp_path / "s.db.states" / "sent.safetensors" / "in the way").mkdir(parents=True)
        (tmp_path / "s.db.states" / "duo.mixture.json").mkdir()
        for name, content in (("sent", {"file": "poet.pth"}), ("duo", {"mixture": (("", 1.0),)})):
            with pytest.raises(ServiceError, match="IsADirectoryError"):
                call(engine, "state_add", name=name, **content)
        assert call(engine, "state_list") == []
        left = {path.name for path in (tmp_path / "s.db.states").iterdir()}
        assert left == {"sent.safetensors", "duo.mixture.json"}, "nothing half written"
        with pytest.raises(ServiceError, match="no tuned state 'sent'"):
            run(engine, make_request("go", state="sent"))
        assert run(engine, make_request("go")).texts


def test_a_state_whose_file_cannot_be_deleted_stays(model: Path, tmp_path: Path) -> None:
    """It would be listed without being usable. It would come back at the next start."""
    with engine_with_states(model, str(tmp_path / "s.db"), states=()) as engine:
        call(engine, "state_add", name="sent", file="poet.pth")
        file = tmp_path / "s.db.states" / "sent.safetensors"
        content = file.read_bytes()
        file.unlink()
        file.mkdir()  # a folder cannot be unlinked
        with pytest.raises(ServiceError, match=r"could not be loaded or removed: .*a directory") as refused:
            call(engine, "state_remove", name="sent")
        assert str(tmp_path) not in str(refused.value)
        assert run(engine, make_request("go", state="sent")).texts
        file.rmdir()
        file.write_bytes(content)
        call(engine, "state_remove", name="sent")
        assert call(engine, "state_list") == [] and not list(file.parent.iterdir())


def test_decode_parameters_are_kept_with_a_state_and_with_a_mixture(model: Path, tmp_path: Path) -> None:
    db, defaults = str(tmp_path / "s.db"), DecodeDefaults(temperature=0.25, stop_tokens=("\n\n", 7))
    mixture = [("sent", 2.0), ("", 1.0)]
    with engine_with_states(model, db, states=()) as engine:
        assert call(engine, "state_add", name="sent", file="poet.pth", defaults=defaults).defaults == defaults
        call(engine, "state_add", name="old", mixture=tuple(mixture))
        call(engine, "state_add", name="duo", mixture=tuple(mixture))
        with pytest.raises(ServiceError, match="already"):
            call(engine, "state_add", name="duo", mixture=tuple(mixture), defaults=defaults)
        with pytest.raises(ServiceError, match="already"):  # only a mixture takes a mixture's place
            call(engine, "state_add", name="duo", file="poet.pth", replace=True)
        call(engine, "state_add", name="duo", mixture=(("sent", 1.0),), defaults=defaults, replace=True)
    (tmp_path / "s.db.states" / "old.mixture.json").write_text(json.dumps(mixture))  # as before there were defaults
    with engine_with_states(model, db, states=()) as engine:
        kept = {info.name: info for info in call(engine, "state_list")}
    assert kept["sent"].defaults == kept["duo"].defaults == defaults and kept["duo"].mixture == [("sent", 1.0)]
    assert kept["old"].mixture == mixture and kept["old"].defaults == DecodeDefaults() and not kept["old"].error


@pytest.mark.parametrize(
    ("fields", "kind", "why"),
    [
        ({"name": "poet", "file": "poet.pth"}, ErrorKind.NAME_TAKEN, "there is a tuned state 'poet' already"),
        ({"name": "a/b", "file": "poet.pth"}, ErrorKind.INVALID_FIELD, "name: must be"),
        ({"name": "..", "file": "poet.pth"}, ErrorKind.INVALID_FIELD, "name: must be"),
        ({"name": "x", "file": "../x.pth"}, ErrorKind.INVALID_FIELD, "within --models-dir"),
        ({"name": "x", "file": "/etc/passwd"}, ErrorKind.INVALID_FIELD, "within --models-dir"),
        ({"name": "x", "file": "a\0b"}, ErrorKind.INVALID_FIELD, "within --models-dir"),
        ({"name": "x", "file": "a" * 300}, ErrorKind.INVALID_FIELD, "within --models-dir"),
        ({"name": "x", "file": "none.pth"}, ErrorKind.INVALID_FIELD, "does not exist"),
        ({"name": "x", "file": "tiny.safetensors"}, ErrorKind.INVALID_FIELD, "no 'blocks.N.att.time_state'"),
        ({"name": "x", "file": "poet.pth", "orientation": "up"}, ErrorKind.INVALID_FIELD, "orientation: must be"),
        ({"name": "x"}, ErrorKind.INVALID_FIELD, "file: must be a path"),
        ({"name": "x", "content": b"nonsense"}, ErrorKind.INVALID_FIELD, "state file in the request"),
    ],
    ids=str,
)
def test_unsupported_states(engine: Engine, fields: dict[str, str], kind: ErrorKind, why: str) -> None:
    before = [info.name for info in call(engine, "state_list")]
    with pytest.raises(ServiceError) as refused:
        call(engine, "state_add", **fields)
    info = refused.value.info
    assert info.kind is kind and why in info.message
    assert info.field is not None and (info.given or None) == fields.get(info.field)
    assert [info.name for info in call(engine, "state_list")] == before


def test_too_many_states(model: Path, tmp_path: Path) -> None:
    with engine_with_states(model, pool={"max_states": 3}) as engine, pytest.raises(ServiceError, match="--max-states"):
        call(engine, "state_add", name="fourth", file="poet.pth")


def test_a_bad_state_of_the_command_line(model: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(StartupError, match=r"--state bad=.*does not exist"),
        engine_with_states(model, states=("bad=no.pth",)),
    ):
        pass
