"""Savings by the prefix cache: 64 requests with one system prompt of 2,000 tokens, with and without the cache.

    python -m bench.prefix [--model FILE] [--requests 64] [--system 2000] [--rounds 3] [--out FILE]

Each request has its own user message after the shared system prompt. All arrive at once. Measures the time to first
token of each. Rounds alternate between with and without `use_prefix_cache`. Each round has a new system prompt, which
the cache computes exactly once. Both must give equal texts. Default model: random weights, 12 x 768 (0.1B) on a GPU,
4 x 256 on a CPU. The last line is JSON.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.tools.record import Arguments, finish
from demo.engine_client import run_jobs
from demo.random_weights import write_random_model
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import Engine
from rwkv_batch.request import GenerateRequest
from sampling.params import SamplingParams
from state_pool.config import PoolConfig

USER_TOKENS = 12
ANSWER_TOKENS = 4


def run_round(engine: Engine, prompts: list[list[int]], cached: bool) -> dict[str, Any]:
    started = time.perf_counter()
    greedy = SamplingParams(temperature=0.0)
    common = {"max_tokens": ANSWER_TOKENS, "sampling": greedy, "ignore_eos": True, "chunk_size": 1}
    answers = run_jobs(
        engine, [[GenerateRequest(prompt=prompt, use_prefix_cache=cached, **common)] for prompt in prompts]
    )
    firsts = sorted(answer.times[0] for answer in answers)
    return {
        "ttft_p50_ms": 1e3 * statistics.median(firsts),
        "ttft_max_ms": 1e3 * firsts[-1],
        "all_s": time.perf_counter() - started,
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
        "texts": [answer.texts for answer in answers],
    }


def measure(engine: Engine, requests: int, system: int, rounds: int) -> dict[str, Any]:
    """Run alternating rounds; returns medians and the number of different texts."""
    rng = random.Random(0)
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    different = 0
    for number in range(rounds):
        head = [rng.randrange(1, 60_000) for _ in range(system)]
        prompts = [head + [rng.randrange(1, 60_000) for _ in range(USER_TOKENS)] for _ in range(requests)]
        for cached in (True, False) if number % 2 else (False, True):
            found[cached].append(run_round(engine, prompts, cached))
        with_cache, without = found[True][-1], found[False][-1]
        different += sum(a != b for a, b in zip(with_cache.pop("texts"), without.pop("texts"), strict=True))

    def middle(cached: bool, key: str) -> float:
        return round(statistics.median(one[key] for one in found[cached]), 2)

    return {
        "measure": "prefix",
        "requests": requests,
        "system_tokens": system,
        "rounds": rounds,
        "with_cache": {key: middle(True, key) for key in found[True][0]},
        "without": {key: middle(False, key) for key in found[False][0]},
        "ttft_ratio": round(middle(False, "ttft_p50_ms") / middle(True, "ttft_p50_ms"), 2),
        "prefilled_once": all(one["cached_tokens"] == (requests - 1) * system for one in found[True]),
        "different_texts": different,
        "pool": engine.model_runner.pool.stats()["prefix_cache"],
    }


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--system", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as name:
        shape = (12, 768) if on_gpu else (4, 256)
        model = arguments.model or write_random_model(Path(name) / "model.pth", *shape)
        engine = Engine(EngineConfig(model_path=str(model), pool=PoolConfig(state_db="")))
        engine.start()
        result = measure(engine, arguments.requests, arguments.system, arguments.rounds)
        result |= {"device": engine.model_runner.device_names(), "torch": torch.__version__, "shape": shape}
        engine.stop()
    finish(result, arguments.out)


if __name__ == "__main__":
    main()
