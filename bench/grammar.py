"""What constrained rows cost, and what they cost the rows beside them: the engine alone.

    python -m bench.grammar [--model-path FILE | --shape 0.1b] [--rows 64] [--seconds 3] [--rounds 3]  # GPU: --rows 320

All rows decode without end; none, half or all of them (every other row) are held to a schema: objects in a list that
never closes. The three shares take turns in each round. Measured after a warm-up, over `--seconds`: tokens/s in all and
of a row with and without a constraint. `ratio` is against the round's line without constraints, `others_ratio` that of
the rows without one, `processor_ratio` that of this process's processor time for a token: what else runs on the machine
does not change it, and on a CPU, whose cores a step keeps busy, it is that of the rate. All are medians of the rounds.
`--parts` tells besides where the time of a step goes.
Beside it, without a model: making the vocabulary and the first schema ready, a schema after that, and masks of random
texts, of one row and of as many rows in a step, at the median and at worst. What bounds it: masks are computed while a
GPU runs a step, so they cost nothing as long as they take less; then their way to it (8 KB a row) and writing -inf
where they forbid (256 KB a row). On a CPU they take turns with the step. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the engine's process; before torch is loaded
import torch

from bench.tools.gpu_model import SIZES, write_random_file
from bench.tools.origin import origin
from bench.tools.step_parts import StepParts
from rwkv_batch.engine import Engine
from rwkv_batch.request import GenerateRequest, Job, JobEvents, Priority
from rwkv_batch.tokenizer import Tokenizer
from sampling.grammar.compiler import GrammarCompiler
from sampling.grammar.constraint import Constraint, Form, SchemaRule
from sampling.grammar.masks import Masks, mask_threads
from sampling.grammar.matcher import Matcher
from sampling.params import SamplingParams
from settings import parse_settings
from settings.model_file import with_model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "languages": {"type": "array", "items": {"enum": ["English", "Chinese", "French"]}, "maxItems": 5},
        "address": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "string"}}},
        "score": {"type": "number"},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}
ENDLESS = Constraint(
    form=Form.LARK,
    source='start: one ("," one)*',
    rules=(SchemaRule(name="one", source=json.dumps(PERSON)),),
)
SCHEMA = Constraint(form=Form.JSON_SCHEMA, source=json.dumps(PERSON))
SHARES = (0, 50, 100)
MASKS = 12_800
"""Computed at most to time them, 200 steps of them at most."""
VOCAB = 65536
WAIT_S = 600.0


class Rows:
    """One job of endless rows and how many tokens each has drawn."""

    def __init__(self, engine: Engine, name: str, rows: int, share: int) -> None:
        self.tokens = [0] * rows
        self._ended = threading.Event()
        self._engine, self._name = engine, name
        held = [share == 100 or (share == 50 and row % 2 == 1) for row in range(rows)]
        self.held = held
        requests = [
            GenerateRequest(
                prompt=[300, 301, 302 + row],
                max_tokens=10**9,
                sampling=SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=row),
                ignore_eos=True,
                chunk_size=1,
                constraint=ENDLESS if held[row] else None,
            )
            for row in range(rows)
        ]
        job = Job(job_id=name, rows=requests, priority=Priority.INTERACTIVE)
        engine.submit(job, self._sink, _refused)

    def _sink(self, events: JobEvents) -> None:
        for delta in events.deltas:
            self.tokens[delta.row] += delta.num_tokens
        if events.error is not None:
            print(f"error: {events.error.message}", flush=True)
        if events.done:
            self._ended.set()

    def stop(self) -> None:
        """Cancel it and wait for its end."""
        self._engine.cancel(self._name)
        self._ended.wait(WAIT_S)


def _refused(refusal: Any) -> None:
    if refusal is not None:
        raise RuntimeError(f"refused: {refusal}")


def measure(engine: Engine, rows: int, share: int, seconds: float, parts: StepParts | None) -> dict[str, Any]:
    """Rates of one share of constrained rows, in percent; processor time in ms a token; `parts` in ms a step."""
    job = Rows(engine, f"share{share}", rows, share)
    warm = time.perf_counter()
    while min(job.tokens) < 4 and time.perf_counter() - warm < WAIT_S:
        time.sleep(0.05)
    time.sleep(min(1.0, seconds / 2))
    if parts is not None:
        parts.read(0)
    before, steps, busy, started = list(job.tokens), engine.speed.steps, time.process_time(), time.perf_counter()
    time.sleep(seconds)
    after, steps, busy = list(job.tokens), engine.speed.steps - steps, time.process_time() - busy
    spent = time.perf_counter() - started
    spent_in = {} if parts is None else parts.read(steps)
    job.stop()
    gained = [(b - a) / spent for a, b in zip(before, after, strict=True)]
    held = [rate for rate, is_held in zip(gained, job.held, strict=True) if is_held]
    free = [rate for rate, is_held in zip(gained, job.held, strict=True) if not is_held]
    return {
        "constrained_percent": share,
        "tokens_s": sum(gained),
        "steps_s": steps / spent,
        "tokens_s_a_constrained_row": statistics.mean(held) if held else None,
        "tokens_s_a_free_row": statistics.mean(free) if free else None,
        "processor_ms_a_token": busy * 1e3 / max(1, sum(after) - sum(before)),
        **spent_in,
    }


def measure_in_turns(
    engine: Engine, rows: int, seconds: float, rounds: int, parts: StepParts | None
) -> list[dict[str, Any]]:
    """A line for each share: medians of the rounds, and of their ratios."""
    lines: dict[int, list[dict[str, Any]]] = {share: [] for share in SHARES}
    for _ in range(rounds):
        for share in SHARES:
            line = measure(engine, rows, share, seconds, parts)
            free = lines[0][-1] if share else line
            line["ratio"] = line["tokens_s"] / free["tokens_s"]
            line["processor_ratio"] = free["processor_ms_a_token"] / line["processor_ms_a_token"]
            if line["tokens_s_a_free_row"]:
                line["others_ratio"] = line["tokens_s_a_free_row"] / free["tokens_s_a_free_row"]
            lines[share].append(line)
            print(json.dumps(line), flush=True)
    return [
        {
            name: round(statistics.median(line.get(name, 0.0) for line in found), 3)
            for name, value in found[0].items()
            if value is not None
        }
        for found in lines.values()
    ]


def followed(matcher: Matcher, mask: np.ndarray[Any, Any], draw: random.Random) -> bool:
    """Take a random one of the tokens allowed; whether the text goes on."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    allowed = [int(token) for token in np.flatnonzero(bits) if token] or [0]
    return not matcher.advance(draw.choice(allowed))


def measure_masks(rows: int, device: torch.device) -> dict[str, Any]:
    """Compile times in ms, and masks of random texts: of single rows in microseconds, of a whole step in ms."""
    tokenizer = Tokenizer()
    table, encode = tokenizer.byte_table, tokenizer.encode_bytes
    started = time.perf_counter()
    threads = mask_threads(device)
    compiler = GrammarCompiler(table, encode, VOCAB, threads=threads)
    compiler.compile(SCHEMA)
    first_ms = (time.perf_counter() - started) * 1e3
    started = time.perf_counter()
    grammar = compiler.compile(ENDLESS)
    next_ms = (time.perf_counter() - started) * 1e3
    compiler.widen(ENDLESS, grammar, rows)
    draw, matchers = random.Random(1), [Matcher(grammar) for _ in range(rows)]
    masks, steps, single = Masks(VOCAB, device, threads), [], []
    own = np.zeros(VOCAB // 32, dtype=np.int32)
    for _ in range(min(200, MASKS // rows)):
        started = time.perf_counter()
        bits, _ = masks.fill(matchers)
        steps.append((time.perf_counter() - started) * 1e3)
        for row, mask in enumerate(bits.cpu().numpy()):
            if not followed(matchers[row], mask, draw):
                matchers[row] = Matcher(grammar)
        started = time.perf_counter()
        matchers[0].state.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        single.append((time.perf_counter() - started) * 1e6)
    return {
        "first_compile_ms": round(first_ms, 1),
        "next_compile_ms": round(next_ms, 2),
        "mask_us": {"median": round(statistics.median(single), 1), "worst": round(max(single), 1)},
        "masks_of_a_step_ms": {"median": round(statistics.median(steps), 2), "worst": round(max(steps), 2)},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each share in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=SIZES, help="random weights of this shape, instead of --model-path")
    parser.add_argument("--parts", action="store_true", help="where the time of a step goes, too")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    args, rest = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        places = args.rows * 9 // 8 + 1  # some are kept for clients that have none
        flags = ["--state-db", "", "--max-waiting-rows", "1000000", "--max-running", str(places), *rest]
        if args.shape is not None:
            maker = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            flags += ["--model-path", str(write_random_file(args.shape, Path(folder) / "m.safetensors", maker))]
        settings = with_model(parse_settings(flags, {"RWKV_MAX_WAITING_ROWS_PER_CLIENT": "1000000", **os.environ}))
        engine = Engine(settings.engine)
        engine.start()
        try:
            parts = StepParts(engine) if args.parts else None
            lines = measure_in_turns(engine, args.rows, args.seconds, args.rounds, parts)
            device, status = engine.machine.device, engine.status()
        finally:
            engine.stop()
    shown = {name: status[name] for name in ("devices", "dtype", "model_shape", "decode_graphs", "samplers")}
    result = {"bench": "grammar", **origin(), **shown, "rows": args.rows, "lines": lines}
    text = json.dumps(result | measure_masks(args.rows, device))
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
