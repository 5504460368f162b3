"""Scored tokens a second beside plain prefill: what the log-probabilities of a prompt's own tokens cost.

    python -m bench.engine.score [--model FILE] [--device cpu|cuda:0] [--prompts 32] [--tokens 512] [--top 1]
                                 [--rounds 3] [--out FILE]

The same prompts of random tokens are read by an engine in this process, in turns: plainly, with all their tokens
scored, and with the last eighth scored. Measured is the time from the first submission to the last end, without the
prefix cache. A round is all three, and the median of the rounds is told. What bounds it: plain prefill takes the head
for one token of each prompt, scoring takes it for each token that is told, so the ratio can at best be that of the
layers' parameters to those and the head's (`bound`); reading logits takes memory bandwidth on top. Default model:
random weights, 12 x 768 (the 0.1B shape) on a GPU, 4 x 256 on a CPU. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from demo.random_weights import write_random_model
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import Engine
from rwkv_batch.errors import ServiceError
from rwkv_batch.request import GenerateRequest, Job, JobEvents, PromptLogprobs
from sampling.params import SamplingParams
from state_pool.config import PoolConfig

WORDS = range(256, 60_000)
"""Token ids that prompts are made of."""
LAST_PART = 8
"""Of a prompt, one in so many is scored where only its end is."""


def seconds(engine: Engine, prompts: list[list[int]], wanted: PromptLogprobs | None) -> float:
    """Until all prompts are read, all submitted as one job. Raises what the engine refuses."""
    rows = [
        GenerateRequest(
            prompt=prompt,
            max_tokens=0,
            sampling=SamplingParams(temperature=0.0),
            chunk_size=0,
            prompt_logprobs=wanted,
            use_prefix_cache=False,
        )
        for prompt in prompts
    ]
    done, told = threading.Event(), 0
    refusals: list[ServiceError] = []

    def sink(events: JobEvents) -> None:
        nonlocal told
        told += sum(len(delta.prompt_logprobs or ()) for delta in events.deltas)
        if events.done:
            done.set()

    def admitted(refusal: ServiceError | None) -> None:
        if refusal is not None:
            refusals.append(refusal)
            done.set()

    started = time.perf_counter()
    engine.submit(Job(job_id=uuid.uuid4().hex, rows=rows), sink, admitted)
    done.wait()
    elapsed = time.perf_counter() - started
    if refusals:
        raise refusals[0]
    expected = 0 if wanted is None else sum(len(prompt) - wanted.start for prompt in prompts)
    if told != expected:
        raise RuntimeError(f"{told} log-probabilities came, {expected} were asked for")
    return elapsed


def measure(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second in each way, and the ratios to plain prefill."""
    draw = random.Random(1)
    count = options.prompts * options.tokens
    ways = {
        "prefill": None,
        "scored": PromptLogprobs(top=options.top),
        "scored_end": PromptLogprobs(start=options.tokens - options.tokens // LAST_PART, top=options.top),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        prompts = [[draw.choice(WORDS) for _ in range(options.tokens)] for _ in range(options.prompts)]
        for name, wanted in ways.items():
            taken = seconds(engine, prompts, wanted)
            if number:  # the first round warms up
                times[name].append(taken)
    medians = {name: statistics.median(values) for name, values in times.items()}
    figures: dict[str, Any] = {f"{name}_tokens_per_s": round(count / value) for name, value in medians.items()}
    figures |= {f"{name}_ratio": round(medians["prefill"] / medians[name], 3) for name in ("scored", "scored_end")}
    return figures


def bound(engine: Engine) -> float:
    """The best ratio there can be: parameters of the layers to those of layers and head."""
    shape = engine.machine.weights.shape
    head = shape.vocab * shape.width
    layers = engine.machine.weights.num_parameters - 2 * head
    return round(layers / (layers + head), 3)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--top", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    on_gpu = options.device.startswith("cuda") or (options.device == "auto" and torch.cuda.is_available())
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            shape = {"layers": 12, "width": 768} if on_gpu else {"layers": 4, "width": 256}
            model = write_random_model(Path(folder) / "random.safetensors", **shape)
        config = EngineConfig(model_path=str(model), devices=(options.device,), pool=PoolConfig(state_db=""))
        engine = Engine(config)
        engine.start()
        try:
            figures = {
                "model": engine.machine.weights.shape.describe(),
                "device": engine.machine.device_names()[0],
                "prompts": options.prompts,
                "tokens": options.tokens,
                "top": options.top,
                **measure(engine, options),
                "bound": bound(engine),
            }
        finally:
            engine.stop()
    line = json.dumps(figures)
    if options.out is not None:
        options.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
