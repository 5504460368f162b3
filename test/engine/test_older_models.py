"""RWKV-6, 5 and 4 through the engine: company, sessions over a restart, tuned states."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from demo.random_older_weights import random_older_weights
from rwkv_batch.kernels import cpu_library
from sampling.params import SamplingParams
from state_pool.config import PoolConfig
from test.harness import ask, run, started_engine, turn
from test.state_files import random_state, write_state

PROMPTS = [f"{word}, once upon a time there was a" for word in ("Now", "So", "And then", "But", "Then")]
SAMPLED = SamplingParams(temperature=1.0, top_k=40, seed=5)
EXACT = cpu_library.build_problem() is None
"""Without packed matrices the last bits of a product depend on the company."""


@pytest.mark.parametrize("version", ["4", "6"])
def test_an_older_model_is_served_as_any_other(tmp_path: Path, version: str) -> None:
    model, pool = tmp_path / "model.safetensors", PoolConfig(state_db=str(tmp_path / "s.db"), l1_sessions=1)
    save_file(random_older_weights(version, 3, 128, vocab=65536), model)
    states = () if version == "4" else (f"warm={write_state(tmp_path / 'warm.pth', random_state(1))}",)
    with started_engine(model, pool, states=states) as engine:
        status = engine.machine.status()
        assert status["model_version"].startswith(f"RWKV-{version}") and "cuda kernels" in status["decode_graphs"]
        begins = {"state": "warm"} if states else {}
        rows = [ask(prompt, sampling=SAMPLED, ignore_eos=True) for prompt in PROMPTS]
        rows += [ask(PROMPTS[0], sampling=SAMPLED, ignore_eos=True, **begins)]
        texts = run(engine, *rows).texts
        together = [texts[i] for i in range(len(rows))]
        assert (together[0] != together[-1]) == bool(states)
        assert not EXACT or together == [run(engine, row).texts[0] for row in rows]
        first = [run(engine, turn(f"s{i}", prompt, ignore_eos=True)).texts[0] for i, prompt in enumerate(PROMPTS)]
    with started_engine(model, pool) as engine:
        again = [run(engine, turn(f"s{i}", " and", ignore_eos=True)).texts[0] for i in range(len(PROMPTS))]
        assert run(engine, turn("whole", PROMPTS[0], ignore_eos=True)).texts[0] == first[0]
        assert run(engine, turn("whole", " and", ignore_eos=True)).texts[0] == again[0]
