"""What a step costs the engine's thread in processor time where devices take none: schedule, launch, commit, deliver.

    python -m bench.engine.thread --clients 960 --groups 4 --against ../other/tree

The real loop, scheduler, jobs, runner, draws and, with `--wire`, the frames of an HTTP worker's events. Devices are
stood in for: graphs that return tokens at once (their inputs are filled in as for `--groups` GPUs, and go nowhere),
no weights, states of a few bytes. What it leaves out are the calls that launch: copies, events, replays. Clients ask
again when they are answered, as in bench.traffic, chunks of one token.

Printed: microseconds of the thread's processor time a step, median over pieces of 50 steps, and the same for each row.
Steps have their parts timed in every second piece only (a reading of the clock may take microseconds), `step` is that
of the others.
With `--against`, the other tree (a checkout of another commit) and this one take turns, `--rounds` times each, and
`ratio` is the median over the rounds of other/this. `told`: a hash of all that clients were told in the first steps,
in order; two trees that schedule and tell the same have the same. What bounds it: other programs share the caches.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from bench.traffic import SAMPLING
from rwkv_batch.config import EngineConfig
from rwkv_batch.core.job_table import JobTable
from rwkv_batch.core.limits import Limits
from rwkv_batch.core.scheduler import ScheduledRow, Scheduler
from rwkv_batch.core.state_manager import StateManager
from rwkv_batch.engine import Engine
from rwkv_batch.ipc.process import settle_garbage_collector
from rwkv_batch.ipc.server import EngineServer, Peer
from rwkv_batch.request import GenerateRequest, Job, JobEvents
from rwkv_batch.runner.decode_graphs import DecodeGraphs, LastTokens, padded_sizes
from rwkv_batch.runner.drawing import Drawing
from rwkv_batch.runner.model_runner import ModelRunner
from rwkv_batch.runner.step_graphs import StepGraphs
from rwkv_batch.tokenizer import Tokenizer
from sampling.sampler import Sampled
from state_pool.config import PoolConfig
from state_pool.pool import StatePool
from test.pool_fakes import FakeArena

PARTS = ("schedule", "launch", "read", "commit", "deliver")
PIECE = 50
"""Steps whose median is taken."""
TOLD_STEPS = 200
VOCAB = 65536
CPU = torch.device("cpu")


class NoSampler:
    """Draws at once, by no logits."""

    name = "none"

    def __init__(self) -> None:
        self._dice = np.random.default_rng(1)

    def admit(self, seat: int, params: Any) -> None:
        """See Sampler."""

    def follow(self, seats: list[int], runs: list[list[int]]) -> None:
        """See Sampler."""

    def sample(self, logits: torch.Tensor, seats: list[int], masks: Any = None) -> Sampled:
        """See Sampler."""
        return Sampled(torch.from_numpy(self._dice.integers(300, 60000, len(seats))))


class NoPlace:
    """A stage that has run as soon as it is asked to."""

    device = CPU

    def run(self, replay: Callable[[], None], tokens: int, before: Any) -> None:
        """See GraphStage."""


class NoDevice:
    """`StagedArrays` without a device behind them."""

    def __init__(self, rows: int) -> None:
        names = {"read_slots": np.int64, "write_slots": np.int64, "seats": np.int64, "seats32": np.int32}
        self._host = {name: np.zeros(rows, dtype) for name, dtype in names.items()}

    @contextmanager
    def filling(self) -> Iterator[Mapping[str, Any]]:
        """See StagedArrays."""
        yield self._host

    def mark_used(self) -> None:
        """See StagedArrays."""


class NoGraphs(DecodeGraphs):
    """`DecodeGraphs` whose replays return at once; tokens are drawn from a table of random ones."""

    def __init__(self, limits: Limits, depth: int) -> None:
        rows = limits.rows_in_step
        self.places = [NoPlace() for _ in range(limits.groups)]  # type: ignore[misc]
        self.max_rows, self.dummy_seat = rows, limits.num_seats
        self.sizes = padded_sizes(rows)
        self._padding = {"read_slots": 0, "write_slots": 1, "seats": self.dummy_seat}
        self._staged = NoDevice(self.sizes[-1])  # type: ignore[assignment]
        self.tokens = LastTokens(limits.num_seats, CPU, CPU, depth)
        self._table = torch.from_numpy(np.random.default_rng(2).integers(300, 60000, (997, self.sizes[-1])))
        self._runs = 0
        self.pieces = None
        self.logits = torch.zeros(1, 1).expand(self.sizes[-1], VOCAB)

    @property
    def is_recording(self) -> bool:
        """Never."""
        return False

    def _graph(self, number: int, size: int, sampled: bool, adapters: bool) -> Any:
        return SimpleNamespace(replay=lambda: None)

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See DecodeGraphs."""
        self._runs += 1
        self._drawn = self._table[self._runs % len(self._table)]
        return super().run(*args, **kwargs)


class NoPipeline:
    """A forward over prompts without one."""

    devices = [CPU]  # noqa: RUF012
    layers_s = 0.0

    def forward(self, inputs: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """See Pipeline."""
        return torch.zeros(1, 1).expand(len(inputs.logit_tokens), VOCAB)


class Runner(ModelRunner):
    """The real one over these."""

    def __init__(self, config: EngineConfig, limits: Limits) -> None:
        self._config = config
        self.tokenizer, self.vocab, self.device, self._gpus = Tokenizer(), VOCAB, CPU, []
        self.limits, self.overlaps = limits, True
        self.steps_in_flight = limits.groups + 1
        self.arena = FakeArena(num_slots=limits.max_running + 64)  # type: ignore[assignment]
        self.pool = StatePool(self.arena, config.pool, lambda: None)
        self.pipeline = NoPipeline()  # type: ignore[assignment]
        self._drawing = Drawing(("naive",), CPU, limits.num_seats, VOCAB, self.tokenizer)
        self._drawing._samplers[""] = NoSampler()  # type: ignore[assignment]
        self.graphs = StepGraphs()
        self.graphs.decode = NoGraphs(limits, self.steps_in_flight)
        self._tokens, self._logits, self._known = self.graphs.decode.tokens, None, 0


class OwnThread(Engine):
    """The engine on the thread that made it, its parts timed; `parts`: seconds of each since they were cleared."""

    def __init__(self, limits: Limits, make_runner: Callable[[EngineConfig, Limits], Runner] = Runner) -> None:
        super().__init__(EngineConfig(model_path="", pool=PoolConfig(state_db="")))
        self.machine = make_runner(self.config, limits)
        self.keeper = StateManager(self.machine.pool, self.machine.tokenizer, overlap=True)
        self.scheduler = Scheduler(limits, self.keeper)
        self.jobs = JobTable(self.scheduler, self.keeper, self.machine.tokenizer, VOCAB)
        self._user_files.states = SimpleNamespace(resolved=lambda job: job)  # type: ignore[assignment]
        self.parts: defaultdict[str, int] = defaultdict(int)
        self.rows = 0
        self.is_timed = False
        owners: list[tuple[Any, str, str]] = [(self.scheduler, "schedule", "schedule"), (self, "_launch", "launch")]
        owners += [(self.machine, "read", "read"), (self.jobs, "commit", "commit"), (self.jobs, "deliver", "deliver")]
        for owner, method, name in owners:
            setattr(owner, method, self._timed(getattr(owner, method), name))

    def _timed(self, act: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            if not self.is_timed:
                return act(*args)
            began = time.thread_time_ns()
            try:
                return act(*args)
            finally:
                self.parts[name] += time.thread_time_ns() - began

        return timed

    def _fail_step(self, rows: list[ScheduledRow], error: Exception) -> None:
        raise error

    def turn(self) -> None:
        """One round of the loop."""
        self._inbox.do_all()
        self.step()
        self.rows += sum(len(part.rows) for part in self._in_flight[-1].parts) if self._in_flight else 0


class Clients:
    """So many, each with one request after the other; `wire`: behind an HTTP worker's connection."""

    def __init__(self, engine: OwnThread, args: argparse.Namespace) -> None:
        self._engine, self._args = engine, args
        self._random = random.Random(args.clients)
        self.told = hashlib.sha256()
        self.is_told = True
        self._ended: list[str] = []
        self._peer: Peer | None = None
        if args.wire:
            server = EngineServer(engine)
            self._encoder = msgspec.msgpack.Encoder()
            link: Any = SimpleNamespace(send=self._take_frame)
            self._peer = Peer(link, engine, server._arrivals, server._metrics, server._quotas)
            server._peers.add(self._peer)
        for client in range(args.clients):
            self._ask(client, 0)

    def _ask(self, client: int, turn: int) -> None:
        dice, drawn = self._random, self._args.drawn
        row = GenerateRequest(
            prompt=[dice.randint(300, 60000) for _ in range(20)],
            max_tokens=dice.randint(*drawn) if turn else dice.randint(1, drawn[1]),
            sampling=SAMPLING,
            ignore_eos=True,
            chunk_size=1,
        )
        job = Job(job_id=f"{client}.{turn}", rows=[row], label="bench")
        if self._peer is not None:
            self._peer._submit(job)
        else:
            self._engine.submit(job, self._sink, lambda refusal: None)

    def _take_frame(self, *messages: Any) -> None:
        self._encoder.encode(messages)
        for message in messages:
            for events in getattr(message, "events", ()):
                self._sink(events)

    def _sink(self, events: JobEvents) -> None:
        if self.is_told:
            deltas = [(delta.row, delta.text, delta.num_tokens, delta.finish is None) for delta in events.deltas]
            self.told.update(repr((events.job_id, deltas, events.done)).encode())
        if events.done:
            self._ended.append(events.job_id)

    def ask_again(self) -> None:
        """Whoever was answered asks the next."""
        ended, self._ended = self._ended, []
        for job_id in ended:
            client, turn = map(int, job_id.split("."))
            self._ask(client, turn + 1)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of this process's tree."""
    sys.setswitchinterval(1.0)
    limits = Limits(
        max_running=1024 * args.groups,
        max_waiting_rows=8192,
        prefill_tokens_per_step=4096,
        prefill_chunk=512,
        prefill_tokens_beside=1024,
        groups=args.groups,
        mixed_rows={1: 256, 2: 512}.get(args.groups, 64),
        held_prompt_tokens=240 if args.groups > 2 else 0,
    )
    engine = OwnThread(limits)
    clients = Clients(engine, args)
    for _ in range(TOLD_STEPS):
        clients.ask_again()
        engine.turn()
    clients.is_told = False
    settle_garbage_collector()
    pieces: dict[str, list[float]] = {name: [] for name in (*PARTS, "step")}
    rows = []
    for number in range(2 * args.pieces):
        engine.parts.clear()
        engine.rows, engine.is_timed, spent = 0, number % 2 == 1, 0
        for _ in range(PIECE):
            clients.ask_again()
            began = 0 if engine.is_timed else time.thread_time_ns()
            engine.turn()
            spent += 0 if engine.is_timed else time.thread_time_ns() - began
        found = engine.parts if engine.is_timed else {"step": spent}
        for name, nanoseconds in found.items():
            pieces[name].append(nanoseconds / PIECE / 1e3)
        rows.append(engine.rows / PIECE)
    step_us = {name: round(statistics.median(values), 1) for name, values in pieces.items()}
    count = statistics.median(rows)
    return {
        "rows": round(count, 1),
        "step_us": step_us,
        "row_us": {name: round(us / count, 3) for name, us in step_us.items()},
        "told": clients.told.hexdigest()[:16],
    }


def child(tree: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of another process, whose packages are those of a tree; this program is its own in any case."""
    own = ["--clients", args.clients, "--groups", args.groups, "--pieces", args.pieces, *(["--wire"] * args.wire)]
    command = [sys.executable, "-P", __file__, "--child", *map(str, own)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the program failed with the packages of {tree}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compared(args: argparse.Namespace, other: Path) -> dict[str, Any]:
    """The last line of a comparison; each round is printed when it is there."""
    this = Path(__file__).resolve().parent.parent.parent
    rounds = []
    for _ in range(args.rounds):
        rounds.append((child(other, args), child(this, args)))
        print(json.dumps([one["step_us"] for one in rounds[-1]]), flush=True)

    def ratio(name: str) -> float:
        return round(statistics.median(a["step_us"][name] / max(b["step_us"][name], 0.1) for a, b in rounds), 2)

    return {
        **{name: getattr(args, name) for name in ("clients", "groups", "wire")},
        "rows": rounds[-1][1]["rows"],
        "other_us": rounds[-1][0]["step_us"],
        "this_us": rounds[-1][1]["step_us"],
        "ratio": {name: ratio(name) for name in (*PARTS, "step")},
        "told_the_same": {a["told"] for a, _ in rounds} == {b["told"] for _, b in rounds},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=960)
    parser.add_argument("--groups", type=int, default=4, help="GPUs in a row, each with a group of rows")
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--drawn", type=int, nargs=2, default=(128, 256))
    parser.add_argument("--wire", action="store_true", help="with the frames of an HTTP worker's events")
    parser.add_argument("--against", type=Path, help="another tree to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.child:  # with the packages of a tree that may have `origin` elsewhere
        print(json.dumps(measure(args)))
        return
    from bench.tools.origin import origin

    found = measure(args) if args.against is None else compared(args, args.against.resolve())
    print(json.dumps({**origin(), **found}))


if __name__ == "__main__":
    main()
