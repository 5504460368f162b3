"""Per-row adapters through the engine: several in one batch, with rows of all other kinds."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import Engine
from rwkv_batch.errors import ErrorKind, ServiceError, StartupError
from rwkv_batch.request import GenerateRequest
from rwkv_batch.runner.adapter_library import AdapterLibrary
from state_pool.config import PoolConfig
from test.adapter_files import random_lora, write_adapter
from test.harness import call, eventually_holds, make_request, run, started_engine, submit, tiny_model, turn
from test.pool_integrity import integrity_faults
from test.state_files import random_state, write_state

pytestmark = pytest.mark.slow

ADAPTERS = tuple(f"lora{i}" for i in range(8))
STATES = tuple(f"state{i}" for i in range(8))
MIXES: list[list[tuple[str, float]]] = [
    [("state0", 1.0), ("state1", 1.0)],
    [("state2", 3.0), ("", 1.0)],
    [("", 0.5), ("state3", 0.25), ("state4", 2.0)],
    [("state5", 2.0), ("", -1.0)],
]
SYSTEM = (
    "A long beginning that these prompts have in common, word for word, so that a state of it is worth keeping. " * 2
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for seed, name in enumerate(ADAPTERS):
        write_adapter(folder / f"{name}.pth", random_lora(seed, 3, 128, rank=(4, 16, 20)[seed % 3]))
    for seed, name in enumerate(STATES):
        write_state(folder / f"{name}.pth", random_state(seed))
    return tiny_model(folder, width=128)


@contextlib.contextmanager
def engine_with_adapters(model: Path, db: str = "", **fields: Any) -> Iterator[Engine]:
    pool = PoolConfig(**{"state_db": db, **fields.pop("pool", {})})
    names = fields.pop("names", ADAPTERS)
    given: dict[str, Any] = {
        "served_adapters": tuple(f"{name}={model.parent / name}.pth:2.0" for name in names),
        "states": tuple(f"{name}={model.parent / name}.pth" for name in STATES),
        "models_dir": str(model.parent),
    }
    with started_engine(model, pool, **given, **fields) as engine:
        yield engine
        slots = engine.model_runner.pool
        assert eventually_holds(engine, lambda: integrity_faults(slots) == [] and slots.adapters.num_refs == 0)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped, over two stages": {"overlap_on_cpu": True, "devices": ("cpu", "cpu")},
}


@pytest.fixture(scope="module", params=KINDS)
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Engine]:
    db = str(tmp_path_factory.mktemp("db") / "s.db")
    with engine_with_adapters(model, db, **KINDS[request.param]) as engine:
        yield engine


def mixed_rows() -> list[GenerateRequest]:
    """48 rows: with an adapter, a state, both, a mixture, a mixture with an adapter, and with none."""
    rows = []
    for i in range(48):
        fields: dict[str, Any] = {"max_tokens": 3 + i % 6, "ignore_eos": True}
        if i % 6 in (0, 2, 4):
            fields["adapter"] = ADAPTERS[i // 2 % 8]
        if i % 6 in (1, 2):
            fields["state"] = STATES[i // 2 % 8]
        if i % 6 in (3, 4) and i % 4 < 2:
            fields["mixture"] = MIXES[i // 6 % 4]
        rows.append(make_request((SYSTEM if i % 3 == 0 else "") + f"row {i}", **fields))
    return rows


def test_64_rows_of_all_kinds_answer_as_alone(engine: Engine) -> None:
    rows = mixed_rows()
    turns = [
        turn(f"many-{i}", f"turn {i}", adapter=ADAPTERS[i % 8] if i % 2 else "", max_tokens=4, ignore_eos=True)
        for i in range(16)
    ]
    together = [submit(engine, row) for row in turns] + [
        submit(engine, *rows[start : start + 12]) for start in range(0, 48, 12)
    ]
    texts = [text for job in together for text in job.wait().all_texts]
    alone = []
    for row in [*turns, *rows]:
        what = {name: getattr(row, name) for name in ("state", "adapter", "mixture", "max_tokens")}
        alone.append(run(engine, make_request(row.prompt, ignore_eos=True, use_prefix_cache=False, **what)).texts[0])
    assert texts == alone and len(set(texts)) > 56


def test_a_rows_text_equals_the_merged_models(model: Path, engine: Engine) -> None:
    names = ADAPTERS[:2]
    texts = run(engine, *(make_request("Once upon a time", adapter=name, ignore_eos=True) for name in names)).all_texts
    for name, text in zip(names, texts, strict=True):
        with started_engine(model, adapters=(f"{model.parent / name}.pth:2.0",)) as merged:
            assert run(merged, make_request("Once upon a time", ignore_eos=True)).texts[0] == text


def test_no_prefix_is_shared_across_adapters(engine: Engine) -> None:
    def read(number: int, **fields: Any) -> int:
        return (
            run(engine, make_request(f"Another one. {SYSTEM}{number}", max_tokens=1, **fields))
            .finishes[0]
            .cached_tokens
        )

    under = [{"adapter": "lora0"}, {"adapter": "lora1"}, {}, {"adapter": "lora0", "state": "state0"}]
    for fields in under:
        assert [read(i, **fields) > 0 for i in range(3)] == [False, False, True], fields


def test_continuations_use_their_prompts_adapter(engine: Engine) -> None:
    several = run(engine, make_request("Tell me", adapter="lora2", n=3, max_tokens=6, ignore_eos=True))
    alone = run(engine, make_request("Tell me", adapter="lora2", max_tokens=6, ignore_eos=True)).texts[0]
    assert set(several.all_texts) == {alone}


def test_a_session_keeps_its_adapter(model: Path, tmp_path: Path) -> None:
    """It continues with the adapter, refuses another, and names a missing one. This holds over restarts and files."""
    db = str(tmp_path / "s.db")

    def say(engine: Engine, prompt: str, **fields: Any) -> bytes:
        job = run(engine, turn("s", prompt, max_tokens=5, ignore_eos=True, **fields))
        error = job.finishes[0].error
        if error is not None:
            raise ServiceError.from_info(error)
        return job.texts[0]

    with engine_with_adapters(model, db) as engine:
        first = say(engine, "one", adapter="lora3")
        with pytest.raises(ServiceError, match=r"begun with the adapter 'lora3'.* not with 'lora4'") as refused:
            say(engine, "two", adapter="lora4")
        assert (refused.value.info.kind, refused.value.info.field) == (ErrorKind.INVALID_FIELD, "adapter")
        run(engine, turn("plain", "one"))
        with pytest.raises(ServiceError, match=r"without an adapter"):
            run(engine, turn("plain", "two", adapter="lora4"))
        carried = call(engine, "session_export", session_id="s")
    with engine_with_adapters(model, db, names=ADAPTERS[:3]) as engine:
        with pytest.raises(ServiceError, match=r"adapter 'lora3' of digest .* is not loaded") as missing:
            say(engine, "two")
        assert missing.value.info.kind is ErrorKind.ADAPTER_NOT_FOUND
        with pytest.raises(
            ServiceError, match=r"file for session .t. was begun with the adapter of digest .* is not loaded"
        ):
            call(engine, "session_import", session_id="t", content=carried)
    with engine_with_adapters(model, db) as engine:
        call(engine, "session_import", session_id="t", content=carried)
        second = say(engine, "two")
        assert run(engine, turn("t", "two", max_tokens=5, ignore_eos=True)).texts[0] == second
    with started_engine(model, adapters=(f"{model.parent / 'lora3'}.pth:2.0",)) as merged:
        assert [say(merged, "one"), say(merged, "two")] == [first, second]


def test_running_rows_keep_an_unloaded_adapter(engine: Engine, model: Path) -> None:
    fields: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
    expected = run(engine, make_request("Go on", adapter="lora7", **fields)).texts[0]
    job = submit(engine, make_request("Go on", adapter="lora7", chunk_size=1, **fields))
    assert job.started.wait(60)
    call(engine, "adapter_remove", name="lora7")
    with pytest.raises(ServiceError, match=r"no adapter 'lora7' is loaded .*'lora0'") as refused:
        run(engine, make_request("a", adapter="lora7"))
    assert (refused.value.info.kind, refused.value.info.field) == (ErrorKind.ADAPTER_NOT_FOUND, "adapter")
    call(engine, "adapter_add", name="other", file="lora1.pth", scale=2.0)  # not into its place
    assert job.wait().texts[0] == expected
    call(engine, "adapter_add", name="lora7", file="lora7.pth", scale=2.0)
    call(engine, "adapter_remove", name="other")
    assert run(engine, make_request("Go on", adapter="lora7", **fields)).texts[0] == expected


def test_adapters_of_requests_survive_a_restart(model: Path, tmp_path: Path) -> None:
    db = str(tmp_path / "s.db")
    file = write_adapter(model.parent / "mine.pth", random_lora(20, 3, 128))
    with engine_with_adapters(model, db, names=()) as engine:
        info = call(engine, "adapter_add", name="mine", file="mine.pth", scale=2.0)
        assert (
            info.is_kept
            and info.rank == 4
            and info.bytes == 4 * sum(t.numel() for t in random_lora(20, 3, 128).values())
        )
        expected = run(engine, make_request("a", adapter="mine", ignore_eos=True)).texts
    with engine_with_adapters(model, db, names=()) as engine:
        assert run(engine, make_request("a", adapter="mine", ignore_eos=True)).texts == expected
    write_adapter(file, random_lora(21, 3, 128))
    with engine_with_adapters(model, db, names=()) as engine:
        assert "changed after it was loaded" in call(engine, "adapter_list")[0].error
        with pytest.raises(ServiceError, match=r"no adapter 'mine'"):
            run(engine, make_request("a", adapter="mine"))
        call(engine, "adapter_remove", name="mine")
        assert call(engine, "adapter_list") == []


def test_an_adapter_stays_if_its_list_cannot_be_written(model: Path, tmp_path: Path) -> None:
    """It would come back at the next start."""
    write_adapter(model.parent / "stays.pth", random_lora(20, 3, 128))
    with engine_with_adapters(model, str(tmp_path / "s.db"), names=()) as engine:
        call(engine, "adapter_add", name="stays", file="stays.pth", scale=2.0)
        (written,) = tmp_path.glob("s.db.adapters*")
        written.unlink()
        written.mkdir()  # a folder is not replaced
        with pytest.raises(ServiceError, match=r"could not be loaded or removed: .*a directory"):
            call(engine, "adapter_remove", name="stays")
        assert run(engine, make_request("a", adapter="stays")).texts
        written.rmdir()
        call(engine, "adapter_remove", name="stays")
        assert call(engine, "adapter_list") == [] and written.read_bytes() == b"[]"


def test_engines_that_share_a_list_write_it_concurrently(tmp_path: Path) -> None:
    config = EngineConfig(model_path="", pool=PoolConfig(state_db=str(tmp_path / "s.db")))

    def many_times(_: int) -> None:
        library = AdapterLibrary(config, lambda command: True, lambda: ServiceError(ErrorKind.INTERNAL, "closed"))
        for _ in range(200):
            library._save()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(many_times, range(3)))
    assert [path.name for path in tmp_path.iterdir()] == ["s.db.adapters.json"]
    assert stat.S_IMODE((tmp_path / "s.db.adapters.json").stat().st_mode) == 0o600


def key_pair(a: tuple[int, int], b: tuple[int, int], at: str = "blocks.0.att.key") -> dict[str, torch.Tensor]:
    return {f"{at}.lora_A": torch.ones(*a), f"{at}.lora_B": torch.ones(*b)}


WRONG: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "another model's": (key_pair((4, 64), (64, 4)), "another model"),
    "half a pair": ({"blocks.0.att.key.lora_A": torch.ones(4, 128)}, "not a supported kind"),
    "layers that are not": (key_pair((4, 128), (128, 4), "blocks.9.att.key"), "has no weight"),
    "DoRA": (key_pair((4, 128), (128, 4)) | {"blocks.0.att.key.lora_M": torch.ones(1, 128)}, "DoRA; merge it .*--ad"),
    "Bone": ({"blocks.0.att.key.bone": torch.ones(16, 8, 8)}, "block-wise Bone; merge it"),
    "whole tensors": ({"blocks.0.att.x_r": torch.ones(128)}, "it changes 'blocks.0.att.x_r'.*merge it"),
    "the head's": (key_pair((4, 128), (65536, 4), "head"), "'head'.*merge it"),
    "too high a rank": (key_pair((129, 128), (128, 129)), "rank 129; adapters per row have at most 128"),
    "not a number": (
        {"blocks.0.att.key.lora_A": torch.full((4, 128), torch.nan), "blocks.0.att.key.lora_B": torch.ones(128, 4)},
        "NaN",
    ),
    "a router alone": ({"blocks.0.ffn.router.linear.weight": torch.ones(3, 128)}, "no low-rank pairs"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_unsupported_adapters_are_refused_without_changes(engine: Engine, model: Path, kind: str) -> None:
    tensors, why = WRONG[kind]
    write_adapter(model.parent / "wrong.pth", tensors)
    before = call(engine, "adapter_list")
    with pytest.raises(ServiceError, match=why) as refused:
        call(engine, "adapter_add", name="wrong", file="wrong.pth", scale=1.0)
    assert refused.value.info.field == "file" and call(engine, "adapter_list") == before


def test_a_failed_load_is_reported_and_the_engine_continues(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(number: int, adapter: object) -> None:
        raise TypeError("as nobody has thought of")

    before = call(engine, "adapter_list")
    with monkeypatch.context() as patch:
        patch.setattr(engine._user_files.adapters._pipeline, "put_adapter", fails)
        with pytest.raises(ServiceError, match="nobody has thought of") as reported:
            call(engine, "adapter_add", name="next", file="lora0.pth", scale=3.0)
    assert reported.value.info.kind is ErrorKind.INTERNAL and call(engine, "adapter_list") == before
    call(engine, "adapter_add", name="next", file="lora0.pth", scale=3.0)
    assert run(engine, make_request("a", adapter="next")).texts
    call(engine, "adapter_remove", name="next")


@pytest.mark.parametrize(
    ("arguments", "kind", "why"),
    [
        ({"name": "lora0", "file": "lora0.pth"}, ErrorKind.NAME_TAKEN, "already"),
        ({"name": "a+b", "file": "lora0.pth"}, ErrorKind.INVALID_FIELD, "name: must be"),
        ({"name": "new", "file": "../lora0.pth"}, ErrorKind.INVALID_FIELD, "within --models-dir"),
        ({"name": "new", "file": "a" * 300}, ErrorKind.INVALID_FIELD, "within --models-dir"),
        ({"name": "new", "file": "nothing.pth"}, ErrorKind.INVALID_FIELD, "file nothing.pth does not exist; give a"),
        ({"name": "new", "file": "lora0.pth"}, ErrorKind.INVALID_FIELD, "has no scale .* `scale` in a request"),
    ],
)
def test_invalid_requests(engine: Engine, arguments: dict[str, Any], kind: ErrorKind, why: str) -> None:
    with pytest.raises(ServiceError, match=why) as refused:
        call(engine, "adapter_add", **arguments)
    info = refused.value.info
    assert info.kind is kind and info.field is not None and info.given == arguments[info.field]


def test_their_number_is_limited(model: Path) -> None:
    with engine_with_adapters(model, names=ADAPTERS[:2], pool={"max_adapters": 2}) as engine:
        with pytest.raises(ServiceError, match=r"the limit is 2 \(--max-adapters\)") as refused:
            call(engine, "adapter_add", name="more", file="lora2.pth", scale=2.0)
        assert refused.value.info.field == "name", "it named session_id, which the route does not have"
        call(engine, "adapter_remove", name="lora0")
        call(engine, "adapter_add", name="more", file="lora2.pth", scale=2.0)
    wrong = pytest.raises(StartupError, match=r"--adapter-serve lora1=.*the limit is 1")
    with wrong, engine_with_adapters(model, names=ADAPTERS[:2], pool={"max_adapters": 1}):
        pass


def test_a_folder_with_a_link_to_elsewhere_is_not_read(engine: Engine, tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "a.bin", random_lora(1, 3, 128))
    folder = Path(engine.config.models_dir) / "peft"
    folder.mkdir(exist_ok=True)
    link = folder / "adapter_model.bin"
    link.symlink_to(outside)
    with pytest.raises(ServiceError, match="without links that lead out") as refused:
        call(engine, "adapter_add", name="linked", file="peft", scale=1.0)
    assert refused.value.info.kind is ErrorKind.INVALID_FIELD
    link.unlink()
    link.write_bytes(outside.read_bytes())
    call(engine, "adapter_add", name="linked", file="peft", scale=1.0)
    call(engine, "adapter_remove", name="linked")
    link.unlink()


def test_a_file_with_a_configuration_elsewhere_is_not_read(engine: Engine, tmp_path: Path) -> None:
    folder = Path(engine.config.models_dir) / tmp_path.name
    folder.mkdir()
    write_adapter(folder / "adapter_model.bin", random_lora(1, 3, 128))
    (tmp_path / "adapter_config.json").write_text("{}")
    (folder / "adapter_config.json").symlink_to(tmp_path / "adapter_config.json")
    with pytest.raises(ServiceError, match="without links that lead out") as refused:
        call(engine, "adapter_add", name="linked", file=f"{folder.name}/adapter_model.bin", scale=1.0)
    assert refused.value.info.kind is ErrorKind.INVALID_FIELD
