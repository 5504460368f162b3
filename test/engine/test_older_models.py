"""RWKV-6, 5 and 4 through the engine: batches, sessions over a restart, tuned states."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from safetensors.torch import save_file

from rwkv_batch.config import EngineConfig
from rwkv_batch.errors import StartupError
from rwkv_batch.kernels.cpu import library as cpu_library
from rwkv_batch.runner.model_runner import ModelRunner
from rwkv_batch.runner.pipeline import resolve_backends
from sampling.params import SamplingParams
from state_pool.config import PoolConfig
from test.conftest import rest_slow
from test.harness import make_request, run, started_engine, turn
from test.model.random_older_weights import random_older_weights
from test.state_files import random_state, write_state

pytestmark = pytest.mark.slow

PROMPTS = [f"{word}, once upon a time there was a" for word in ("Now", "So", "And then", "But", "Then")]
SAMPLED = SamplingParams(temperature=1.0, top_k=40, seed=5)
EXACT = cpu_library.library_unavailable_reason() is None
"""Without packed matrices, the last bits of a product depend on the batch."""


@pytest.mark.parametrize("version", rest_slow(["4", "6"]))
def test_an_older_model_runs_as_any_other(tmp_path: Path, version: str) -> None:
    model, pool = tmp_path / "model.safetensors", PoolConfig(state_db=str(tmp_path / "s.db"), l1_sessions=1)
    save_file(random_older_weights(version, 3, 128, vocab=65536), model)
    states = () if version == "4" else (f"warm={write_state(tmp_path / 'warm.pth', random_state(1))}",)
    with started_engine(model, pool, states=states) as engine:
        status = engine.model_runner.status()
        assert status["model_version"].startswith(f"RWKV-{version}") and "cuda kernels" in status["decode_graphs"]
        begins = {"state": "warm"} if states else {}
        rows = [make_request(prompt, sampling=SAMPLED, ignore_eos=True) for prompt in PROMPTS]
        rows += [make_request(PROMPTS[0], sampling=SAMPLED, ignore_eos=True, **begins)]
        texts = run(engine, *rows).texts
        together = [texts[i] for i in range(len(rows))]
        assert (together[0] != together[-1]) == bool(states)
        assert not EXACT or together == [run(engine, row).texts[0] for row in rows]
        first = [run(engine, turn(f"s{i}", prompt, ignore_eos=True)).texts[0] for i, prompt in enumerate(PROMPTS)]
    with started_engine(model, pool) as engine:
        again = [run(engine, turn(f"s{i}", " and", ignore_eos=True)).texts[0] for i in range(len(PROMPTS))]
        assert run(engine, turn("whole", PROMPTS[0], ignore_eos=True)).texts[0] == first[0]
        assert run(engine, turn("whole", " and", ignore_eos=True)).texts[0] == again[0]


def test_an_older_model_next_to_int8_states_uses_its_own_format(tmp_path: Path) -> None:
    """The request gave neither option. An explicit one is refused with the name of the field."""
    model = tmp_path / "model.safetensors"
    save_file(random_older_weights("6", 2, 128, vocab=65536), model)
    both = ("wkv_state", "kernels")
    with started_engine(model, wkv_state="int8", kernels="cuda", auto_fallback_fields=both) as engine:
        status = engine.model_runner.status()
        assert status["wkv_state"] == "float32" and status["kernels"]["used"] in ("cpu", "naive")
        assert len(run(engine, make_request(PROMPTS[0], ignore_eos=True)).texts[0]) > 0
    for fields, named in (({"wkv_state": "int8"}, "wkv_state"), ({"kernels": "cuda"}, '"kernels": "auto"')):
        with pytest.raises(StartupError, match=named):
            ModelRunner(EngineConfig(model_path=str(model), devices=("cpu",), **fields), lambda: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["RWKV-7", "RWKV-6"])
@pytest.mark.parametrize("kernels", ["cuda", "cpu", "naive", "auto"])
def test_preferred_values_are_used_where_supported(version: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = EngineConfig(model_path="", wkv_state="int8", kernels=kernels)
    other = {"cuda": "cpu", "cpu": "cuda:1"}.get(kernels, "cpu")
    own = {"cuda": "cuda:1", "cpu": "cpu"}.get(kernels, "cuda:1")
    for devices in ((own,), (other,), (own, other)):
        assert resolve_backends(version, devices, config) == {"kernels": kernels, "wkv_state": "int8"}
    config = msgspec.structs.replace(config, auto_fallback_fields=("wkv_state", "kernels"))
    form = "int8" if version == "RWKV-7" else "auto"
    here = "auto" if (version, kernels) == ("RWKV-6", "cuda") else kernels
    assert resolve_backends(version, (own,), config) == {"kernels": here, "wkv_state": form}
    there = kernels if kernels == "naive" else "auto"
    assert resolve_backends(version, (own, other), config) == {"kernels": there, "wkv_state": form}
