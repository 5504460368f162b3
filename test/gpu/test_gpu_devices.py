"""Pipeline stages on several GPUs. Also one stage on a GPU that is not the first. Skipped on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from demo.files import ensure_model
from rwkv_batch.engine import Engine
from rwkv_batch.model.weights import open_weights
from rwkv_batch.request import GenerateRequest
from rwkv_batch.runner.pipeline import Pipeline
from sampling.params import SamplingParams
from state_pool.config import PoolConfig
from test.gpu.test_gpu_engine import same, translations
from test.harness import call, make_request, run, started_engine, submit, turn

FOUND = torch.cuda.device_count() if torch.cuda.is_available() else 0
ON_GPU: dict[str, Any] = {"max_running": 128, "prefill_tokens_per_step": 2048}
LAYOUTS = [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cuda:1",), ("cuda:0", "cuda:1", "cuda:0")]
LAYOUTS += [tuple(f"cuda:{i}" for i in range(FOUND))] if FOUND >= 3 else []
CUT = {2: (2.5, 3.5), 3: (1.5, 2, 2.5), 4: (1.5, 1.5, 1.5, 1.5)}
"""Layers per stage, by number of stages; some layers are cut in half. The model has six."""
NAMES = ["Anna", "Tom", "Mary", "Peter", "Lucy", "Jack", "Emma", "Bob", "Alice", "David"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(FOUND < 2, reason="needs two CUDA devices"),
    pytest.mark.parametrize("devices", LAYOUTS, ids="+".join),
]


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_model()


def test_each_device_holds_its_layers_and_their_states(model: Path, devices: tuple[str, ...]) -> None:
    pipeline = Pipeline(open_weights(model), devices)
    pipeline.allocate_slots(4)
    for stage, name in zip(pipeline.stages, devices, strict=True):
        assert stage.state is not None
        places = {str(tensor.device) for tensor in (stage.state.wkv, stage.state.shift, stage.layers[0].output.weight)}
        assert places == {name}
    assert sum(pipeline.slot_bytes_on(torch.device(name)) for name in set(devices)) == pipeline.slot_bytes


def mixture() -> list[GenerateRequest]:
    """Return greedy translations among sampled rows, with log-probabilities and shared prompts."""
    rows = translations(20)
    rows += [make_request(f"English: {i}\n\nChinese:", sampling=SamplingParams(seed=i, top_k=40)) for i in range(20)]
    rows += [make_request("English: hello\n\nChinese:", sampling=SamplingParams(temperature=0.0, top_logprobs=2))]
    return [*rows, make_request("English: How are you?\n\nChinese:", n=4)]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
def test_mixed_batches_give_the_text_of_one_device(model: Path, devices: tuple[str, ...], overlap: bool) -> None:
    with started_engine(model, devices=("cuda:0",), **ON_GPU) as one:
        expected = run(one, *mixture()).all_texts
    with started_engine(model, devices=devices, overlap=overlap, **ON_GPU) as engine:
        halves = [submit(engine, *mixture()) for _ in range(2)]
        for half in halves:
            assert same(half.wait().all_texts[:40], expected[:40]) >= 0.95
            assert (
                same(half.all_texts[40:], expected[40:]) >= 0.75
            )  # sampled: a logit that differs in the last bit may change
        assert call(engine, "status")["decode_graphs"] == "used"


def test_layers_cut_in_half_give_the_text_of_one_device(model: Path, devices: tuple[str, ...]) -> None:
    if len(devices) not in CUT:
        pytest.skip("one stage has all layers")
    with started_engine(model, devices=("cuda:0",), **ON_GPU) as one:
        expected = run(one, *mixture()).all_texts
    with started_engine(model, devices=devices, layers=CUT[len(devices)], **ON_GPU) as engine:
        assert call(engine, "status")["pipeline"]["layers"] == list(CUT[len(devices)])
        halves = [submit(engine, *mixture()) for _ in range(2)]
        for half in halves:
            assert same(half.wait().all_texts[:40], expected[:40]) >= 0.95


def remembered(engine: Engine) -> list[bool]:
    """Return whether each session knows its name, while other rows decode."""
    bulk = submit(engine, *[make_request("English: hello\n\nChinese:", max_tokens=300, ignore_eos=True)] * 40)
    known = []
    for i, name in enumerate(NAMES):
        asked = "\n\nUser: What is my name?\n\nAssistant:"
        answer = run(engine, turn(f"s{i}", asked, max_tokens=40, stop_ids=[261, 24281])).texts[0].decode()
        known.append(name in answer)
    bulk.wait()
    return known


def test_sessions_resume_from_every_tier(model: Path, devices: tuple[str, ...], tmp_path: Path) -> None:
    """Ten sessions use two slots and three states in host memory. They continue after a restart."""
    pool = PoolConfig(state_db=str(tmp_path / "s.db"), l1_sessions=2, l2_sessions=3)
    with started_engine(model, pool, devices=devices, **ON_GPU) as engine:
        for i, name in enumerate(NAMES):
            run(engine, turn(f"s{i}", f"User: My name is {name}.\n\nAssistant:", max_tokens=40, stop_ids=[261, 24281]))
        assert all(remembered(engine))
        counts = call(engine, "status")["pool"]
        assert all(remembered(engine)), counts
    with started_engine(model, pool, devices=devices, **ON_GPU) as engine:
        assert all(remembered(engine))


def test_a_state_is_restored_to_the_bit(model: Path, devices: tuple[str, ...]) -> None:
    """Saved and loaded while steps run, into another slot."""
    from rwkv_batch.model.step_inputs import step_inputs
    from rwkv_batch.runner.state_copy import PipelineArena

    pipeline = Pipeline(open_weights(model), devices)
    pipeline.allocate_slots(64)
    arena = PipelineArena(pipeline)
    rows = [[5 + i, 9, 300 + i] * 20 for i in range(40)]
    inputs = step_inputs(rows, [0] * 40, list(range(2, 42)), [0])
    for _ in range(5):
        pipeline.forward(inputs)
    copies = [arena.save(slot) for slot in range(2, 22)]
    pipeline.forward(step_inputs(rows, list(range(2, 42)), list(range(2, 42)), [0]))
    for copy, slot in zip(copies, range(42, 62), strict=True):
        copy.wait()
        arena.load(slot, copy.host)
    pipeline.forward(step_inputs([[1]] * 20, list(range(42, 62)), list(range(42, 62)), [0]))
    pipeline.forward(inputs)
    pipeline.forward(step_inputs([[1]] * 20, list(range(2, 22)), list(range(2, 22)), [0]))
    for stage in pipeline.stages:
        assert stage.state is not None
        assert torch.equal(stage.state.wkv[42:62], stage.state.wkv[2:22])
        assert torch.equal(stage.state.shift[42:62], stage.state.shift[2:22])


@pytest.mark.parametrize("peer", [True, False], ids=["peer", "pinned memory"])
def test_transferred_activations_arrive_complete(
    devices: tuple[str, ...], peer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many sends are in flight on busy streams. Buffers are poisoned with NaN. Sources are overwritten at once."""
    from rwkv_batch.runner.links import Link

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: peer)
    source, target = torch.device(devices[0]), torch.device(devices[-1])
    size, depth = 1 << 20, 5
    link = Link(source, target, size, torch.float16, depth)
    for place in link._buffers:
        place.fill_(float("nan"))
    made = torch.empty(size, dtype=torch.float16, device=source)
    busy = [torch.randn(2048, 2048, device=device) for device in (source, target)]
    actual, numbers = [], []
    for i in range(40):
        for k in range(2):
            busy[k] = torch.nn.functional.normalize(busy[k] @ busy[k])
        made.fill_(i)
        numbers.append(link.send(made, size))
        made.fill_(float("nan"))
        if i >= depth - 2:
            into = torch.full((size,), float("nan"), dtype=torch.float16, device=target)
            link.receive(numbers[i - depth + 2], into, size)
            actual.append(into)
    for i, values in enumerate(actual):
        assert torch.equal(values, torch.full_like(values, i))


def test_other_work_of_the_target_does_not_wait_for_a_transfer(devices: tuple[str, ...]) -> None:
    """A send after a second of work; the target's streams share its few hardware queues."""
    from rwkv_batch.runner.links import Link, copy_to_device

    source, target = torch.device(devices[0]), torch.device(devices[-1])
    if source == target:
        pytest.skip("one device has one queue")
    link = Link(source, target, 1 << 20, torch.float16, 5)
    streams = [torch.cuda.Stream(target) for _ in range(32)]
    values = torch.ones(1 << 20, dtype=torch.float16, device=source)
    copy_to_device(values, target)
    torch.cuda.synchronize(source)
    with torch.cuda.device(source):
        torch.cuda._sleep(3_000_000_000)
        busy = torch.cuda.current_stream(source).record_event()
    number = link.send(values, len(values))
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.zeros(16, device=target).add_(1)
        stream.synchronize()
    assert not busy.query(), "they have waited for the source"
    into = torch.zeros_like(values, device=target)
    link.receive(number, into, len(into))
    assert torch.equal(copy_to_device(values, target), into)


def test_one_row_alone_and_many_give_the_same_state(model: Path, devices: tuple[str, ...]) -> None:
    """Micro-batches: a greedy row gives the same text alone and with rows that come and go on all stages."""
    with started_engine(model, devices=devices, **ON_GPU) as engine:
        alone = [run(engine, row).all_texts for row in translations(8)]
        others = [submit(engine, *[make_request(f"English: {i}\n\nChinese:", max_tokens=8 + i)]) for i in range(60)]
        again = [submit(engine, row) for row in translations(8)]
        texts = [one.wait().all_texts for one in again]
        for one in others:
            one.wait()
        assert same(texts, alone) >= 0.85  # another batch size takes other kernels
