"""The engine on a GPU with the demo model: overlapped and graphed against plain, sessions, agreement with the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.evaluate import held_pairs
from demo.files import ensure_model
from rwkv_batch.engine import Engine
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import open_weights
from rwkv_batch.request import GenerateRequest
from rwkv_batch.runner.pipeline import Pipeline
from sampling.params import SamplingParams
from state_pool.config import PoolConfig
from test.engine.test_state_forms import NAMES, talk
from test.harness import TOKENIZER, call, free_slots, make_request, run, started_engine, submit, turn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ON_GPU: dict[str, Any] = {"devices": ("cuda:0",), "max_running": 256, "prefill_tokens_per_step": 4096}
PAIRS = 400


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_model()


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    pool = PoolConfig(state_db=str(tmp_path_factory.mktemp("db") / "s.db"), l1_sessions=4, l2_sessions=4)
    with started_engine(model, pool, **ON_GPU) as engine:
        yield engine


def translations(pairs: int) -> list[GenerateRequest]:
    """Held-out sentences both ways, greedy."""
    rows = []
    for english, chinese in held_pairs(pairs, 1):
        rows.append(make_request(f"English: {english}\n\nChinese:", max_tokens=64, stop_ids=[261]))
        rows.append(make_request(f"Chinese: {chinese}\n\nEnglish:", max_tokens=64, stop_ids=[261]))
    return rows


def same(one: list[bytes], other: list[bytes]) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def test_graphs_and_the_overlapped_loop_serve(engine: Engine) -> None:
    run(engine, make_request("warm", max_tokens=4))
    assert engine.model_runner.overlaps
    assert call(engine, "status")["decode_graphs"] == "used"


@pytest.mark.parametrize(("wkv_state", "share"), [("fp32", 0.995), ("fp16", 0.995), ("int8", 0.95)])
def test_greedy_answers_agree_with_the_cpu_in_fp32(model: Path, wkv_state: str, share: float) -> None:
    with started_engine(model, max_running=256, prefill_tokens_per_step=2048) as cpu:
        expected = run(cpu, *translations(PAIRS // 2)).all_texts
    with started_engine(model, wkv_state=wkv_state, **ON_GPU) as gpu:
        actual = run(gpu, *translations(PAIRS // 2)).all_texts
    assert same(actual, expected) >= share


@pytest.mark.parametrize("wkv_state", ["fp16", "int8"])
def test_parked_sessions_answer_like_others(model: Path, tmp_path: Path, wkv_state: str) -> None:
    """One slot, one state in host memory, the file, and a restart."""
    parked = PoolConfig(state_db=str(tmp_path / "s.db"), durability="turn", l1_sessions=1, l2_sessions=1)
    with started_engine(model, PoolConfig(state_db="", l1_sessions=16), wkv_state=wkv_state, **ON_GPU) as engine:
        expected = talk(engine, NAMES, range(3))
    with started_engine(model, parked, wkv_state=wkv_state, **ON_GPU) as engine:
        said = talk(engine, NAMES, range(2))
    with started_engine(model, parked, wkv_state=wkv_state, **ON_GPU) as engine:
        last = talk(engine, NAMES, range(2, 3))
    assert {name: said[name] + last[name] for name in NAMES} == expected


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_few_rows_with_long_prompts(model: Path, rows: int) -> None:
    """Fewer rows than a prefill step could have."""
    with started_engine(model, devices=("cuda:0",), max_running=rows, prefill_tokens_per_step=16384) as few:
        texts = run(few, *[make_request(f"English: {i}\n\nChinese:", max_tokens=4) for i in range(2 * rows)]).all_texts
        assert len(texts) == 2 * rows and call(few, "status")["decode_graphs"] == "used"


def test_overlapped_equals_plain(model: Path) -> None:
    rows = translations(100)
    sampled = [
        make_request(f"English: {i}\n\nChinese:", max_tokens=20, sampling=SamplingParams(seed=i, top_k=40))
        for i in range(40)
    ]
    with started_engine(model, overlap=False, **ON_GPU) as plain:
        expected = run(plain, *rows).all_texts, run(plain, *sampled).all_texts
    with started_engine(model, **ON_GPU) as overlapped:
        actual = run(overlapped, *rows).all_texts, run(overlapped, *sampled).all_texts
    assert actual == expected


def test_sessions_remember_and_end_before_their_stops(engine: Engine) -> None:
    for i, name in enumerate(["Anna", "Tom", "Mary", "Peter", "Lucy", "Jack", "Emma", "Bob", "Alice", "David"]):
        reported = f"User: My name is {name}.\n\nAssistant:"
        run(engine, turn(f"s{i}", reported, max_tokens=40, stop_ids=[261, 24281]))
    bulk = submit(engine, *[make_request("English: hello\n\nChinese:", max_tokens=400, ignore_eos=True)] * 100)
    for i, name in enumerate(["Anna", "Tom", "Mary", "Peter", "Lucy", "Jack", "Emma", "Bob", "Alice", "David"]):
        asked = "\n\nUser: What is my name?\n\nAssistant:"
        answer = run(engine, turn(f"s{i}", asked, max_tokens=40, stop_ids=[261, 24281])).texts[0].decode()
        assert name in answer, f"session {i} of ten over four slots"
    bulk.wait()


def test_a_session_equals_one_prompt_of_the_same_tokens(engine: Engine) -> None:
    prompts = [
        "User: I live in Rome.\n\nAssistant:",
        "\n\nUser: Hello.\n\nAssistant:",
        "\n\nUser: Where do I live?\n\nAssistant:",
    ]
    sampling = SamplingParams(temperature=0.0, top_logprobs=0)
    reported: list[int] = []
    for prompt in prompts:
        reported += TOKENIZER.encode(prompt)
        ended = run(engine, turn("whole", prompt, sampling=sampling, max_tokens=40, stop_strings=[b"\n\n"]))
        alone = run(engine, make_request(list(reported), sampling=sampling, max_tokens=40, stop_strings=[b"\n\n"]))
        assert ended.texts == alone.texts
        entries = [entry for events in ended.events for delta in events.deltas for entry in delta.logprobs or []]
        text, ids = b"", []
        for entry in entries:
            if len(text) >= len(ended.texts[0]):
                break
            piece = entry.token[: len(ended.texts[0]) - len(text)]
            ids += [TOKENIZER.byte_table.index(piece)] if piece == entry.token else TOKENIZER.encode_bytes(piece)
            text += piece
        reported += ids


def test_states_agree_with_the_cpu(model: Path) -> None:
    ids = [TOKENIZER.encode(f"English: {english}\n\nChinese: {chinese}") for english, chinese in held_pairs(20, 3)]
    states = []
    for device in ("cpu", "cuda:0"):
        pipeline = Pipeline(open_weights(model), (device,))
        pipeline.allocate_slots(24)
        rows = list(range(len(ids)))
        pipeline.forward(step_inputs(ids, [0] * len(ids), [row + 2 for row in rows], rows))
        state = pipeline.stages[0].state
        assert state is not None
        states.append((state.wkv[2:22].float().cpu(), state.shift[2:22].float().cpu()))
    for expected, actual in zip(*states, strict=True):
        assert ((actual - expected).norm() / expected.norm()).item() < 2e-2


def test_cancelled_rows_free_every_slot(engine: Engine) -> None:
    free = free_slots(engine)
    jobs = [submit(engine, *[make_request("x", max_tokens=10**6, ignore_eos=True)] * 50) for _ in range(8)]
    assert jobs[0].started.wait(30)
    for job in jobs:
        engine.cancel(job.job.job_id)
        job.wait()
    run(engine, make_request("x", max_tokens=2))
    assert free_slots(engine) >= free, "or one more: a session that was on its way to host memory has arrived"


def test_several_stages_give_the_same_text(model: Path) -> None:
    """Two stages on one device take the path of several devices."""
    rows = translations(20)
    with started_engine(model, **ON_GPU) as one:
        expected = run(one, *rows).all_texts
    stages = {**ON_GPU, "devices": ("cuda:0", "cuda:0") if torch.cuda.device_count() < 2 else ("cuda:0", "cuda:1")}
    with started_engine(model, **stages) as two:
        assert same(run(two, *rows).all_texts, expected) >= 0.975
        assert call(two, "status")["decode_graphs"] == "used"
