"""int8 states through the engine: sessions on every tier, files, tuned states, stages, other formats."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from rwkv_batch.engine import Engine
from rwkv_batch.errors import ServiceError
from rwkv_batch.model.state import HEAD_BYTES, unpack_int8
from rwkv_batch.runner.state_copy import HostTensors
from state_pool.config import PoolConfig
from state_pool.layout import CHUNKS_PER_STATE, chunk_checksum, reshard_state
from state_pool.session_file import SessionFile, decode
from test.harness import call, make_request, run, started_engine, tiny_model, turn
from test.state_files import random_state, write_state

pytestmark = pytest.mark.slow

INT8: dict[str, Any] = {"wkv_state": "int8"}
NAMES = [f"s{i}" for i in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), width=128)


def talk(engine: Engine, names: list[str], turns: range) -> dict[str, list[bytes]]:
    """Run one turn of each session after the other: short ones, each in one step, alone or not."""
    said: dict[str, list[bytes]] = {name: [] for name in names}
    for number in turns:
        for name in names:
            given = turn(name, f" turn {number} of {name}", max_tokens=8, ignore_eos=True, use_prefix_cache=False)
            said[name].append(run(engine, given).texts[0])
    return said


@pytest.fixture(scope="module")
def answers_in_slots(model: Path) -> dict[str, list[bytes]]:
    """Return the answers of sessions that never leave their slots."""
    with started_engine(model, PoolConfig(state_db="", l1_sessions=16), **INT8) as engine:
        status = call(engine, "status")
        assert status["wkv_state"] == "int8"
        assert status["state_bytes"] == 3 * (2 * HEAD_BYTES + 2 * 128 * 4)
        return talk(engine, NAMES, range(3))


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")], ids=["one stage", "two stages"])
def test_parked_sessions_answer_the_same(
    model: Path, tmp_path: Path, answers_in_slots: dict[str, list[bytes]], devices: tuple[str, ...]
) -> None:
    """Four sessions share one slot, host memory for one, and the file. They continue after a restart."""
    pool = PoolConfig(state_db=str(tmp_path / "s.db"), durability="turn", l1_sessions=1, l2_sessions=1)
    with started_engine(model, pool, devices=devices, **INT8) as engine:
        said = talk(engine, NAMES, range(2))
    with started_engine(model, pool, devices=devices, **INT8) as engine:
        last = talk(engine, NAMES, range(2, 3))
    assert {name: said[name] + last[name] for name in NAMES} == answers_in_slots


@pytest.mark.parametrize("before", ["fp32", "fp16"])
def test_a_session_in_another_format_continues_from_its_tokens(model: Path, tmp_path: Path, before: str) -> None:
    """If all its tokens are kept. Otherwise it is refused, and stays for its own format."""
    for retain, goes_on in ((-1, True), (0, False)):
        pool = PoolConfig(state_db=str(tmp_path / f"{retain}.db"), durability="turn", retain_tokens=retain)
        with started_engine(model, pool, wkv_state=before) as engine:
            talk(engine, NAMES[:2], range(2))
        with started_engine(model, pool, **INT8) as engine:
            end = run(engine, turn(NAMES[0], " go on", max_tokens=8, ignore_eos=True)).finishes[0]
            if goes_on:
                assert end.completion_tokens == 8
            else:
                assert end.error is not None and re.search(r"float\d\d.*uint8.*the same state dtype", end.error.message)
        with started_engine(model, pool, wkv_state=before) as engine:
            assert len(talk(engine, NAMES[1:2], range(2, 3))[NAMES[1]][0]) > 0


SPLITS: dict[str, dict[str, Any]] = {
    "the other way round": {"devices": ("cpu", "cpu"), "layers": (2.0, 1.0)},
    "a layer cut in half": {"devices": ("cpu", "cpu"), "layers": (1.5, 1.5)},
    "a stage a layer": {"devices": ("cpu",) * 3, "layers": (1.0, 1.0, 1.0)},
    "one device": {"devices": ("cpu",)},
}


@pytest.mark.parametrize(("before", "form"), [("a layer cut in half", "int8"), ("the other way round", "fp16")])
def test_sessions_continue_over_any_split_of_layers(model: Path, tmp_path: Path, before: str, form: str) -> None:
    """From a file, a database and objects, without tokens: with their states, bit for bit."""
    objects = tmp_path / "objects"
    objects.mkdir()
    aside = {"checkpoint_store": objects.as_uri(), "checkpoint_store_min_mb": 0}
    pools = [
        PoolConfig(state_db=str(tmp_path / f"{i}.db"), durability="turn", retain_tokens=0, **more)
        for i, more in enumerate(({}, aside))
    ]
    for pool in pools:
        with started_engine(model, pool, wkv_state=form, **SPLITS[before]) as engine:
            talk(engine, NAMES, range(2))
            content = call(engine, "session_export", session_id=NAMES[0])
            reported = talk(engine, NAMES[:1], range(2, 3))[NAMES[0]]
    stored = decode(content)
    for i, after in enumerate(split for split in SPLITS if split != before):
        with started_engine(model, pools[i % 2], wkv_state=form, **SPLITS[after]) as engine:
            call(engine, "session_import", session_id=after, content=content)
            for name in (after, NAMES[i + 1]):
                file = decode(call(engine, "session_export", session_id=name))
                assert file.layout == engine.model_runner.arena.layout != stored.layout
                if name == after:
                    assert relevant_parts(file) == relevant_parts(stored)
            given = turn(after, f" turn 2 of {NAMES[0]}", max_tokens=8, ignore_eos=True, use_prefix_cache=False)
            assert run(engine, given).texts[0] == reported[0]
            assert len(talk(engine, [NAMES[i + 1]], range(2, 3))[NAMES[i + 1]][0]) > 0


def relevant_parts(file: SessionFile) -> list[bytes]:
    """The relevant part of a state: not the token shift of a half layer that a stage does not have."""
    forms = [file.layout[name] for name in ("stage0.wkv", "stage0.shift")]
    whole = {
        name: (kind, (3, *shape[1:])) for name, (kind, shape) in zip(("stage0.wkv", "stage0.shift"), forms, strict=True)
    }
    return [bytes(part) for part in reshard_state(file.parts, file.layout, whole).values()]


def test_a_session_is_exported_and_imported(model: Path, answers_in_slots: dict[str, list[bytes]]) -> None:
    with started_engine(model, **INT8) as engine:
        talk(engine, NAMES[:1], range(2))
        content = call(engine, "session_export", session_id=NAMES[0])
        call(engine, "session_delete", session_id=NAMES[0], delete_prefix=False)
        call(engine, "session_import", session_id=NAMES[0], content=content)
        assert talk(engine, NAMES[:1], range(2, 3))[NAMES[0]] == answers_in_slots[NAMES[0]][2:]
        file = decode(content)
        wkv = bytearray(file.parts["stage0.wkv"])
        wkv[HEAD_BYTES - 2 : HEAD_BYTES] = struct.pack("<H", 0x7FC0)  # the last scale of the first head: NaN
        parts = {**file.parts, "stage0.wkv": bytes(wkv)}
        damaged = SessionFile(file.fingerprint, file.num_tokens, file.replay, file.layout, parts).encode()
        with pytest.raises(
            ServiceError, match=r"'stage0.wkv' of the state has NaN, infinite or negative scales \(1, the first at 63\)"
        ):
            call(engine, "session_import", session_id="damaged", content=damaged)
    with started_engine(model, wkv_state="fp32") as engine, pytest.raises(ServiceError, match="has the layout"):
        call(engine, "session_import", session_id="t", content=content)


@pytest.mark.parametrize(("form", "what"), [("fp32", "numbers"), ("fp16", "numbers"), ("int8", "scales")])
def test_an_invalid_stored_state_is_found_in_every_format(model: Path, tmp_path: Path, form: str, what: str) -> None:
    """If the whole history is kept, it is read again. Otherwise the session is refused until it is deleted."""
    pool = PoolConfig(state_db=str(tmp_path / "s.db"), durability="turn", retain_tokens=-1, l1_sessions=1)
    with started_engine(model, pool, wkv_state=form) as engine:
        first = talk(engine, NAMES[:2], range(1))
        run(engine, turn("short", "a"))
    noise = {"fp32": struct.pack("<f", float("nan")), "fp16": struct.pack("<e", float("-inf"))}
    end = HEAD_BYTES if form == "int8" else 1000
    with contextlib.closing(sqlite3.connect(tmp_path / "s.db")) as connection, connection:
        firsts = f"SELECT id, data FROM state_chunks WHERE id % {CHUNKS_PER_STATE} = 0"
        for at, data in connection.execute(firsts).fetchall():
            bits = noise.get(form, struct.pack("<H", 0xBF80))  # a scale of -1
            data = data[: end - len(bits)] + bits + data[end:]
            stored = (data, chunk_checksum(data, at), at)
            connection.execute("UPDATE state_chunks SET data = ?, checksum = ? WHERE id = ?", stored)
        connection.execute("DELETE FROM turns WHERE session IN (SELECT id FROM sessions WHERE session_id = 'short')")
    with started_engine(model, pool, wkv_state=form) as engine:
        again = talk(engine, NAMES[:2], range(1, 2))
        error = run(engine, turn("short", " and")).finishes[0].error
        assert error is not None
        assert re.search(f"part 'stage0.wkv' of the state has NaN.* {what} .*delete the session", error.message)
    if form != "int8":  # whose last bits depend on how a history is cut
        with started_engine(model, PoolConfig(state_db=""), wkv_state=form) as engine:
            assert (first, again) == tuple(talk(engine, NAMES[:2], range(i, i + 1)) for i in range(2))


def test_a_tuned_state_is_packed_into_its_slot(model: Path, tmp_path: Path) -> None:
    wkv = random_state(1)
    file = write_state(tmp_path / "poet.pth", wkv)
    with started_engine(model, states=(f"poet={file}",), devices=("cpu", "cpu"), **INT8) as engine:
        host = engine.model_runner.pool.tuned.get("poet").host
        assert isinstance(host, HostTensors)
        kept = torch.cat([unpack_int8(host.tensors[f"stage{i}.wkv"]) for i in range(2)])
        assert ((kept - wkv).abs() <= wkv.abs().amax(-1, keepdim=True) / 126).all()
        own, other = (run(engine, make_request("Once", state=name, ignore_eos=True)).texts[0] for name in ("poet", ""))
    assert own != other


def test_the_layout_names_the_format(model: Path) -> None:
    with started_engine(model, **INT8) as engine:
        assert json.dumps(engine.model_runner.arena.layout["stage0.wkv"]) == json.dumps(["uint8", [3, 2, HEAD_BYTES]])
