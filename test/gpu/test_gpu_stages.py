"""Four stages on two GPUs equal one stage to the bit. The stages run with random delays."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor

from demo.files import ensure_model
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import open_weights
from rwkv_batch.runner.graphs.capture import make_graph_stages
from rwkv_batch.runner.graphs.decode import DecodeGraphs
from rwkv_batch.runner.links import Link, TokenCopies
from rwkv_batch.runner.pipeline import Pipeline
from state_pool.config import PoolConfig
from state_pool.layout import FIRST_FREE_SLOT, ZERO_SLOT
from test.gpu.test_gpu_engine import same, translations
from test.harness import call, free_slots, make_request, run, started_engine, submit, turn

FOUND = torch.cuda.device_count() if torch.cuda.is_available() else 0
FOUR = ("cuda:0", "cuda:1", "cuda:0", "cuda:1")
LAYOUTS = [("cuda:0", "cuda:1"), FOUR, tuple(reversed(FOUR)), ("cuda:0", "cuda:0", "cuda:1")]
GROUPS = [1, 7, 20, 33]
"""Rows per group."""
ROUNDS = 40
LONGEST_LAG = 400_000
"""Clock cycles; a step of one stage takes fewer."""
ON_GPU: dict[str, Any] = {"max_running": 128, "prefill_tokens_per_step": 2048}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(FOUND < 2, reason="needs two CUDA devices")]


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_model()


@pytest.fixture
def lags(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Delay the streams around sends and receives. Also overwrite a source after it was sent."""
    dice = random.Random(7)
    send, receive = Link.send, Link.receive

    def lag(stream: torch.cuda.Stream) -> None:
        if dice.random() < 0.5:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(dice.randrange(LONGEST_LAG))

    def sending(link: Link, values: Tensor, count: int) -> int:
        lag(link._from)
        number = send(link, values, count)
        if values.is_floating_point():  # sampled tokens are kept
            with torch.cuda.stream(link._from):
                values[:count].fill_(float("nan"))
        lag(link._from)
        return number

    def receiving(link: Link, number: int, into: Tensor, count: int) -> None:
        lag(link._to)
        if into.is_floating_point():
            with torch.cuda.stream(link._to):
                into.fill_(float("nan"))
        receive(link, number, into, count)
        lag(link._to)

    monkeypatch.setattr(Link, "send", sending)
    monkeypatch.setattr(Link, "receive", receiving)
    return dice


@pytest.fixture
def streams() -> Iterator[None]:
    """Use side streams, as an engine does on several GPUs."""
    with ExitStack() as stack:
        for number in range(2):
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(number)))
        yield
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)


class Said(NamedTuple):
    """Results of the groups of rows."""

    tokens: list[list[int]]
    """of each step, in order"""
    wkv: Tensor
    shift: Tensor


def decoded(model: Path, devices: tuple[str, ...], groups: list[int]) -> Said:
    """Run rows in groups: a group's next step is launched while its last one runs; tokens are read later."""
    pipeline = Pipeline(open_weights(model), devices, layers=(2, 1, 1, 2) if len(devices) == 4 else ())
    pipeline.allocate_slots(FIRST_FREE_SLOT + sum(groups))
    depth = len(groups) + 1
    graphs = DecodeGraphs(
        make_graph_stages(pipeline.stages, 64, depth), max(groups), req_slots=sum(groups), depth=depth
    )
    copies = TokenCopies(pipeline.devices[-1], max(groups))
    firsts = [sum(groups[:number]) for number in range(len(groups))]
    req_slots = [list(range(first, first + rows)) for first, rows in zip(firsts, groups, strict=True)]
    slots = [[FIRST_FREE_SLOT + req_slot for req_slot in some] for some in req_slots]
    sent = []
    for own, places in zip(req_slots, slots, strict=True):
        prompts = [[5 + req_slot, 9, 300 + req_slot] * (1 + req_slot % 5) for req_slot in own]
        inputs = step_inputs(prompts, [ZERO_SLOT] * len(own), places, list(range(len(own))))
        sent.append(graphs.tokens.store(own, pipeline.forward(inputs).argmax(-1)))
    graphs.warm_up()
    flight, tokens = [], []
    for number in range(ROUNDS * len(groups)):
        group = number % len(groups)
        graphs.tokens.receive(sent[group])
        sampled = graphs.run(req_slots[group], slots[group], slots[group])
        sent[group] = graphs.tokens.send()
        flight.append(copies.start(sampled))
        if len(flight) == depth:
            tokens.append(flight.pop(0).tokens())
    tokens += [copy.tokens() for copy in flight]
    states = [stage.state for stage in pipeline.stages if stage.state is not None]
    for device in set(pipeline.devices):
        torch.cuda.synchronize(device)
    rows = slice(FIRST_FREE_SLOT, None)
    wkv = torch.cat([state.wkv[rows].cpu() for state in states], dim=1)
    return Said(tokens, wkv, torch.cat([state.shift[rows].cpu() for state in states], dim=1))


@pytest.mark.usefixtures("streams", "lags")
@pytest.mark.parametrize("devices", LAYOUTS, ids="+".join)
@pytest.mark.parametrize("groups", [GROUPS, [20] * 4, [33]], ids=["uneven", "even", "one"])
def test_delayed_stages_sample_the_tokens_of_one_stage(
    model: Path, devices: tuple[str, ...], groups: list[int]
) -> None:
    """All tokens of all steps and the final states, to the bit."""
    expected, actual = decoded(model, ("cuda:0",), groups), decoded(model, devices, groups)
    assert len(expected.tokens) == ROUNDS * len(groups) and len({*map(tuple, expected.tokens)}) > len(groups)
    assert actual.tokens == expected.tokens
    assert torch.equal(actual.wkv, expected.wkv) and torch.equal(actual.shift, expected.shift)


@pytest.mark.usefixtures("lags")
def test_four_delayed_stages_give_the_text_of_one(model: Path) -> None:
    """New rows during decoding, long prompts, and cancels in flight. The prompts are longer than a graph holds."""
    rows = [*translations(20), *[make_request("English: hello\n\nChinese:" * 60, max_tokens=6)] * 3]
    rows = [msgspec.structs.replace(row, use_prefix_cache=False) for row in rows]  # a cached prefix keeps its slot
    chunks = {**ON_GPU, "prefill_chunk": 512}
    with started_engine(model, devices=("cuda:0",), **chunks) as one:
        expected = run(one, *rows).all_texts
    with started_engine(model, devices=FOUR, micro_batches=4, **chunks) as engine:
        status = call(engine, "status")
        assert status["decode_graphs"] == "used" and status["pipeline"]["steps_in_flight"] == 5
        free = status["free_slots"]
        for _ in range(3):
            other_rows = [
                submit(engine, *[make_request(f"{i}", max_tokens=300, ignore_eos=True)] * 7) for i in range(5)
            ]
            half = submit(engine, *rows)
            for job in other_rows:
                engine.cancel(job.job.job_id)
            assert same(half.wait().all_texts, expected) >= 0.95
            for job in other_rows:
                job.wait()
        assert free_slots(engine) == free


@pytest.mark.usefixtures("lags")
def test_sessions_move_from_one_stage_to_four_and_to_two(model: Path, tmp_path: Path) -> None:
    """States of another layout do not fit: the token log is replayed."""
    names = ["Anna", "Tom", "Mary", "Peter"]
    layouts: list[dict[str, Any]] = [
        {"devices": ("cuda:0",)},
        {"devices": FOUR, "micro_batches": 4},
        {"devices": ("cuda:1", "cuda:0")},
        {"devices": FOUR, "micro_batches": 3},
    ]
    for number, layout in enumerate(layouts):
        pool = PoolConfig(state_db=str(tmp_path / "s.db"), l1_sessions=1, l2_sessions=1)
        with started_engine(model, pool, **layout, **ON_GPU) as engine:
            for i, name in enumerate(names):
                if not number:
                    text = f"User: My name is {name}.\n\nAssistant:"
                    run(engine, turn(f"s{i}", text, max_tokens=40, stop_ids=[261, 24281]))
            bulk = submit(engine, *[make_request("English: hello\n\nChinese:", max_tokens=100, ignore_eos=True)] * 20)
            for i, name in enumerate(names):
                text = "\n\nUser: What is my name?\n\nAssistant:"
                answer = run(engine, turn(f"s{i}", text, max_tokens=40, stop_ids=[261, 24281])).texts[0]
                assert name in answer.decode(), (number, i)
            bulk.wait()
