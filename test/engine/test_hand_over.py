"""Transfers between graph stages, on simulated streams. The streams' work runs as late as possible.

Each stream is a queue. A random ready stream runs next; events hold up the others. A copy reads its source when it
runs, not when it is queued, so memory that is reused too early is found.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rwkv_batch.runner import links
from rwkv_batch.runner.graphs import capture
from rwkv_batch.runner.graphs.capture import CaptureError, GraphStage, StagedArrays, run_stages
from rwkv_batch.runner.graphs.step import StepGraphs
from rwkv_batch.runner.links import TokenCopies

ROWS, WIDTH, STAGES, DEPTH = 6, 2, 3, 4
CPU = torch.device("cpu")


class Simulation:
    """The streams of some devices."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.streams: list[Stream] = []

    def step(self) -> bool:
        """Run one piece of work of a random ready stream."""
        able = [stream for stream in self.streams if stream.can_run()]
        if able:
            self.dice.choice(able).run_one()
        return bool(able)


class Stream:
    cuda_stream = 0

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.work: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        """(whether it may run, the work)"""
        simulation.streams.append(self)

    def put(self, act: Callable[[], None], may_run: Callable[[], bool] = lambda: True) -> None:
        self.work.append((may_run, act))

    def can_run(self) -> bool:
        return bool(self.work) and self.work[0][0]()

    def run_one(self) -> None:
        self.work.popleft()[1]()

    def synchronize(self) -> None:
        while self.work:
            assert self.simulation.step(), "streams wait for each other"


class Event:
    """torch's event: one that was never recorded holds up nothing, a new recording replaces the old one."""

    def __init__(self) -> None:
        self.asked = self.done = 0
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.asked += 1
        self.stream = stream
        stream.put(partial(setattr, self, "done", self.asked))

    def wait(self, stream: Stream) -> None:
        expected = self.asked
        stream.put(lambda: None, lambda: self.done >= expected)

    def synchronize(self) -> None:
        expected = self.asked
        while self.done < expected:
            assert self.stream is not None and self.stream.simulation.step(), "nothing brings it about"


class Copier:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def copy(self, target: Tensor, source: Tensor, count: int) -> None:
        def act() -> None:
            target[:count].copy_(source[:count])

        self.stream.put(act)


class Stages:
    """Each stage adds its number to its input; the first reads from the host, the last returns the sum."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.simulation = Simulation(seed)
        streams = iter([Stream(self.simulation) for _ in range(STAGES)])
        self.streams = list(self.simulation.streams)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(torch.cuda, "device", lambda device: None)
        monkeypatch.setattr(capture, "Recorder", lambda device: None)
        for module in (links, capture):
            monkeypatch.setattr(module, "Copier", Copier)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: next(streams))
        self.staged = StagedArrays({"values": ROWS}, [CPU] * STAGES, DEPTH)
        precision = SimpleNamespace(device=CPU, activations=torch.int64)
        stage: Any = SimpleNamespace(precision=precision, width=WIDTH)
        self.graph_stages: list[GraphStage] = []
        for number in range(STAGES):
            between = iter(self.streams[max(0, number - 1) :])
            monkeypatch.setattr(torch.cuda, "current_stream", lambda device, found=between: next(found))
            self.graph_stages.append(GraphStage(stage, self.graph_stages[-1] if number else None, ROWS, DEPTH))
        self.sampled = torch.zeros(ROWS, dtype=torch.int64)
        self.copies = TokenCopies(CPU, ROWS)
        self.copies._stream, self.copies._copier = self.streams[-1], Copier(self.streams[-1])  # type: ignore[assignment]

    def launch(self, values: list[int], fails: bool = False) -> Any:
        """Launch a step of this many rows; return its result. fails: after the first stage's graph."""
        rows = len(values)
        with self.staged.filling() as host:
            host["values"][:rows] = values
        acts = [partial(self._graph, number, values) for number in range(STAGES)]
        if fails:
            self.streams[0].put(acts[0])
            return None
        graphs: list[Any] = [
            SimpleNamespace(replay=partial(stream.put, act)) for stream, act in zip(self.streams, acts, strict=True)
        ]
        run_stages(self.graph_stages, graphs, rows, self.staged)
        return self.copies.start(self.sampled[:rows])

    def _graph(self, number: int, values: list[int]) -> None:
        place, last, rows = self.graph_stages[number], number == STAGES - 1, len(values)
        read = self.staged.on_device[number]["values"][:rows]
        assert read.tolist() == values, "it reads what another step was filled with"
        given = read.repeat(2 * WIDTH) if place._input is None else place._input[: 2 * rows * WIDTH]
        assert torch.equal(given[:rows], read + sum(range(number))), "it is given what another step has left"
        made = given + number
        if place._input is not None:
            place._input.fill_(-1)
        if last:
            self.sampled[:rows] = made[:rows]
        else:
            assert place._output is not None
            place._output[: 2 * rows * WIDTH] = made
        self.staged.on_device[number]["values"].fill_(-1)


@pytest.fixture(params=range(12))
def stages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stages]:
    yield Stages(request.param, monkeypatch)


def test_every_step_reads_its_own_inputs(stages: Stages) -> None:
    """The most steps are in flight, in two parts each. Some launches fail."""
    dice = stages.simulation.dice
    flight: deque[tuple[list[int], Any]] = deque()
    for number in range(80):
        for _ in range(dice.randint(1, 2)):
            values = [1000 * number + dice.randrange(1000) for _ in range(dice.randint(1, ROWS))]
            flight.append((values, stages.launch(values)))
        if dice.random() < 0.1:
            stages.launch([number], fails=True)
        for _ in range(dice.randint(0, 12)):
            stages.simulation.step()
        while len(flight) > 2 * DEPTH:
            expected, sampled = flight.popleft()
            if dice.random() < 0.1:
                continue  # the step has failed and nobody reads it
            assert sampled.tokens() == [value + sum(range(STAGES)) for value in expected]
    assert len(stages.copies._free) <= 2 * DEPTH + 3


def test_consecutive_failed_steps_read_their_own_inputs(stages: Stages) -> None:
    for number in range(3 * DEPTH):
        stages.launch([number], fails=True)
    assert stages.launch([3]).tokens() == [6]


def test_tokens_are_read_once(stages: Stages) -> None:
    sampled = stages.launch([3])
    assert sampled.tokens() == [6]
    with pytest.raises(AssertionError, match="another step"):
        sampled.tokens()


def test_graphs_are_dropped_when_no_device_reads_them(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture fails on one device while the others run a step."""
    graphs, waited_for = StepGraphs(), []
    decode: Any = SimpleNamespace(graph_stages=stages.graph_stages)
    graphs.decode = decode

    def synchronize(device: torch.device) -> None:
        assert graphs.decode is not None, "what it reads is held until it has been waited for"
        stages.streams[len(waited_for)].synchronize()
        waited_for.append(device)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    sampled = stages.launch([3, 5])
    graphs.disable(CaptureError("a graph could not be captured: OutOfMemoryError"))
    assert graphs.decode is None and waited_for == [place.device for place in stages.graph_stages]
    for staging in stages.staged._staging:
        staging.fill_(77)  # it is somebody else's now
    assert sampled.tokens() == [6, 8]
