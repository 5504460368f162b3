"""Tokens/s that a pipeline would give, reckoned: the engine's own loop and scheduler, and stages that take their time.

    python -m bench.stages.pipeline_model --times stage-times.json --clients 320,960 --host-ms 0.3,0.004

`--times`: the last line of `bench.stages.stage_times`, each deal of layers in it. Time is virtual: a stage begins a
graph as soon as it has done all before it and has what the stage before hands over, the first one also when the oldest
step that the host has not read has drawn; `--links-ms`: what lies between two graphs of a stage, and between a graph of
one stage and that of the next, or from the last to the first; the host takes `--host-ms` a step, what is the same for
all and for each row, and waits for the step that it reads. Steps take as long as the graphs that hold them, padding
included. Left out: what GPUs do to each other, and what a request costs the host beside its rows' steps. Clients as in
bench.traffic. What bounds it: the times are of graphs alone, on a GPU whose clock may differ from that of four.
"""

from __future__ import annotations

import argparse
import json
import statistics
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.engine.thread import Clients, OwnThread, Runner
from rwkv_batch.config import EngineConfig
from rwkv_batch.core.limits import Limits
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.request import JobEvents
from rwkv_batch.runner.decode_graphs import padded_sizes
from rwkv_batch.runner.drawing import Launched
from rwkv_batch.runner.mixed_graphs import PROMPTS as MIXED_PROMPTS
from rwkv_batch.runner.mixed_graphs import MixedSize, held_prompt_tokens, most_decoding, usable_mixed_sizes
from rwkv_batch.runner.prefill_graphs import SIZES

Times = dict[str, dict[str, list[float]]]
WARM_S = 1.0
"""Virtual, not counted."""


class StageTimes:
    """Of one deal of layers: milliseconds of each stage for a step."""

    def __init__(self, measured: Times) -> None:
        self._decode = sorted((_decode_graph(int(rows)), ms) for rows, ms in measured["decode"].items())
        self._prompts = sorted((_prompts_graph(*_numbers(name)), ms) for name, ms in measured["prompts"].items())
        riding = []
        for name, ms in measured.get("mixed", {}).items():
            rows, reading, tokens = _numbers(name)
            graph = next(size for size in MIXED_PROMPTS if size.holds(reading, tokens))
            riding.append((graph.tokens, [a - b for a, b in zip(ms, self.decode(rows), strict=True)]))
        self._riding = sorted(riding)
        self.stages = len(self._decode[0][1])

    def decode(self, rows: int) -> list[float]:
        """Of a step of so many rows."""
        return _between(self._decode, _decode_graph(rows))

    def prompts(self, rows: int, tokens: int) -> list[float]:
        """Of so many rows and tokens of prompts, a step of their own."""
        return _between(self._prompts, _prompts_graph(rows, tokens))

    def mixed(self, size: MixedSize) -> list[float]:
        """Of both in one graph. Raises ValueError where none was measured."""
        if not self._riding:
            raise ValueError(
                "--times has no `mixed` steps, which few clients have; take them from bench.stages.stage_times"
            )
        return [
            a + b for a, b in zip(self.decode(size.decoding), _between(self._riding, size.prompts.tokens), strict=True)
        ]


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split(",")))


def _decode_graph(rows: int) -> int:
    """Rows of the graph for so many."""
    return padded_sizes(rows)[-1]


def _prompts_graph(rows: int, tokens: int) -> int:
    """Tokens of the graph for so many rows and tokens; beyond those that there are, as many."""
    return next((size.tokens for size in SIZES if size.holds(rows, tokens)), tokens)


def _between(points: Sequence[tuple[int, list[float]]], at: int) -> list[float]:
    """On straight lines between what was measured; below the first as that, beyond the last as that."""
    names = [name for name, _ in points]
    upper = min(bisect_left(names, at), len(points) - 1)
    lower = max(0, upper - 1)
    (a, low), (b, high) = points[lower], points[upper]
    share = 1.0 if a == b else min(1.0, max(0.0, (at - a) / (b - a)))
    return [x + (y - x) * share for x, y in zip(low, high, strict=True)]


class Riding:
    """`MixedGraphs` that returns tokens at once."""

    def __init__(self, rows: int) -> None:
        self.sizes = usable_mixed_sizes(rows) if rows else ()

    def size_for(self, decoding: int, rows: int, tokens: int) -> MixedSize | None:
        """See MixedGraphs."""
        return next((s for s in self.sizes if s.decoding >= decoding and s.prompts.holds(rows, tokens)), None)

    def run(self, size: MixedSize, *_: Any) -> torch.Tensor:
        """See MixedGraphs."""
        return torch.randint(300, 60000, (size.drawn,))


class TimedRunner(Runner):
    """A runner whose steps take virtual time."""

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        times: StageTimes,
        host_ms: tuple[float, float],
        links_ms: tuple[float, float],
    ) -> None:
        super().__init__(config, limits)
        self._times, self._host_ms = times, host_ms
        self._beside, self._hand_over = links_ms
        self.graphs.mixed = Riding(limits.rows_in_mixed_step)  # type: ignore[assignment]
        self.now = 0.0
        """the host's clock, ms"""
        self.free_at = [0.0] * times.stages
        self.work = [0.0] * times.stages
        self._drawn_at: dict[int, float] = {}

    def launch(
        self,
        rows: list[ScheduledRow],
        after: Collection[Launched] = (),
        between: Callable[[], None] | None = None,
    ) -> Launched:
        """As the real one; the stages' clocks go on by what the step takes."""
        step = super().launch(rows, after, between)
        self.now += self._host_ms[0] + self._host_ms[1] * len(rows)
        decoding = sum(row.feeds_back for row in rows)
        tokens = sum(row.num_tokens for row in rows) - decoding
        if decoding and tokens:
            size = self.graphs.mixed_size(decoding, len(rows) - decoding, tokens)
            assert size is not None, "`parts` has found one"
            took = self._times.mixed(size)
        else:
            took = self._times.decode(decoding) if decoding else self._times.prompts(len(rows), tokens)
        at = max([self.now, *(self._drawn_at[id(part)] + self._hand_over for part in after)])
        for stage, ms in enumerate(took):
            ended = max(at, self.free_at[stage]) + ms
            self.free_at[stage] = ended + self._beside
            self.work[stage] += ms
            at = ended + (self._hand_over if stage < len(took) - 1 else 0.0)
        self._drawn_at[id(step)] = at
        return step

    def read(self, step: Launched) -> Any:
        """As the real one; the host has waited."""
        self.now = max(self.now, self._drawn_at.pop(id(step)))
        return super().read(step)


class TimedClients(Clients):
    """Clients that note when they are answered, by the runner's clock."""

    def __init__(self, engine: OwnThread, args: argparse.Namespace) -> None:
        self._asked: dict[str, float] = {}
        self.ttft: list[float] = []
        self.tokens = 0
        super().__init__(engine, args)
        self.is_told = False

    def _ask(self, client: int, turn: int) -> None:
        self._asked[f"{client}.{turn}"] = self._engine.machine.now  # type: ignore[attr-defined]
        super()._ask(client, turn)

    def _sink(self, events: JobEvents) -> None:
        self.tokens += sum(delta.num_tokens for delta in events.deltas)
        if events.job_id in self._asked:
            self.ttft.append(self._engine.machine.now - self._asked.pop(events.job_id))  # type: ignore[attr-defined]
        super()._sink(events)


def reckoned(times: StageTimes, clients: int, args: argparse.Namespace) -> dict[str, Any]:
    """Figures for so many clients."""
    groups = times.stages
    limits = Limits(
        max_running=1024 * groups,
        max_waiting_rows=8192,
        prefill_tokens_per_step=4096,
        prefill_chunk=512,
        prefill_tokens_beside=1024,
        groups=groups,
        mixed_rows=most_decoding(groups),
        held_prompt_tokens=held_prompt_tokens(groups),
    )
    engine = OwnThread(limits, partial(TimedRunner, times=times, host_ms=args.host_ms, links_ms=args.links_ms))
    machine: Any = engine.machine
    load = TimedClients(engine, SimpleNamespace(clients=clients, drawn=args.drawn, wire=False))  # type: ignore[arg-type]
    while machine.now < WARM_S * 1e3:
        load.ask_again()
        engine.turn()
    began, before, work, load.ttft = machine.now, load.tokens, list(machine.work), []
    while machine.now < began + args.seconds * 1e3:
        load.ask_again()
        engine.turn()
    took = machine.now - began
    return {
        "clients": clients,
        "tokens_per_s": round((load.tokens - before) / took * 1e3),
        "ttft_ms_p50": round(statistics.median(load.ttft), 1),
        "works": [round((a - b) / took, 3) for a, b in zip(machine.work, work, strict=True)],
    }


def pair(text: str) -> tuple[float, float]:
    """Of --host-ms and --links-ms."""
    fixed, row = map(float, text.split(","))
    return fixed, row


def main() -> None:
    """Reckon and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--clients", default="320,960")
    parser.add_argument("--host-ms", type=pair, default=(0.3, 0.004), help="a step's, and a row's")
    parser.add_argument("--links-ms", type=pair, default=(0.025, 0.045), help="between graphs, and between stages")
    parser.add_argument("--seconds", type=float, default=2.0, help="virtual")
    parser.add_argument("--drawn", type=int, nargs=2, default=(128, 256))
    args = parser.parse_args()
    measured = json.loads(args.times.read_text().splitlines()[-1])
    results = []
    for deal in measured["results"]:
        for clients in map(int, args.clients.split(",")):
            results.append({"layers": deal["layers"], **reckoned(StageTimes(deal["ms"]), clients, args)})
            print(json.dumps(results[-1]), flush=True)
    origin = {name: measured.get(name) for name in ("machine", "commit")}
    print(
        json.dumps(
            {
                "times_of": origin,
                "host_ms": args.host_ms,
                "links_ms": args.links_ms,
                "seconds": args.seconds,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
