"""Scripts of the rwkv package get the same greedy text from programs.library.pipeline."""

from __future__ import annotations

import copy
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from programs.library import LLMError, State
from programs.library.pipeline import PIPELINE, PIPELINE_ARGS, RWKV
from routes.response.generate import call_engine
from rwkv_batch.calls import GetStatus
from state_pool.sessions import Session
from test.programs.library.pipelines import CTX, IDS, PLAIN, forward_results, script_results, write_ascii_model
from test.serving import ROOT, wait_for

pytestmark = pytest.mark.slow

_MANY = 64
"""Number of states: the tokens that the engine logs before it stores a state."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RWKV]:
    path = write_ascii_model(tmp_path_factory.mktemp("pipeline") / "ascii.pth")
    model = RWKV(model=str(path.with_suffix("")), strategy="cpu fp32", max_running=8, checkpoint_tokens=16)
    yield model
    model.close()


@pytest.fixture(scope="module")
def package_answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = write_ascii_model(tmp_path_factory.mktemp("package") / "ascii.pth")
    command = [sys.executable, "-m", "test.programs.library.pipelines", str(path.with_suffix(""))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr
    answers: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answers


def test_a_script_gets_the_packages_text(model: RWKV, package_answers: dict[str, Any]) -> None:
    texts = package_answers["text"]
    assert script_results(PIPELINE(model, "rwkv_vocab_v20230424"), PIPELINE_ARGS) == texts
    assert len({*texts.values()}) == 4 and texts["plain"].startswith(texts["stopped"])


def test_a_script_with_its_own_sampling_gets_the_packages_logits_and_text(
    model: RWKV, package_answers: dict[str, Any]
) -> None:
    ours = forward_results(model, PIPELINE(model, "rwkv_vocab_v20230424"))
    assert ours["text"] == package_answers["forwarded"]["text"] and len({*ours["text"]}) > 4
    logits = torch.tensor(ours["logits"])
    torch.testing.assert_close(logits, torch.tensor(package_answers["forwarded"]["logits"]), rtol=1e-4, atol=1e-4)
    assert logits.shape == (2 + len(IDS), 65536)
    torch.testing.assert_close(logits[[1, -1]], logits[[0, 0]], rtol=1e-4, atol=1e-5)


def test_the_packages_readme_runs_as_printed(
    model: RWKV, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = re.findall(r"```python\n(.*?)```", str(metadata("rwkv").get_payload()), re.DOTALL)[0]  # type: ignore[attr-defined]
    for printed, changed in (
        ("from rwkv.model import RWKV\nfrom rwkv.utils import", "from rwkv_batch import RWKV,"),
        ("token_count=500", "token_count=8"),
    ):
        assert program.count(printed) == 1
        program = program.replace(printed, changed)
    loaded = {"cuda fp16": model}
    monkeypatch.setattr(os, "environ", {**os.environ})  # the program sets what the package reads
    monkeypatch.setattr("programs.library.pipeline.RWKV", lambda model, strategy: loaded[strategy])
    exec(compile(program, "README", "exec"), {"__name__": "__main__"})
    output = capsys.readouterr().out
    logits = re.findall(r"^\[(.*)\]$", output, re.MULTILINE)[-2:]
    numbers = [[float(one) for one in line.split() if one != "..."] for line in logits]
    assert output.startswith(CTX) and len(numbers[0]) == 6 and numbers[0] == pytest.approx(numbers[1], abs=1e-4)


def test_several_prompts_and_a_state(model: RWKV) -> None:
    pipeline, args = PIPELINE(model), PIPELINE_ARGS(**PLAIN)
    alone = [pipeline.generate(text, token_count=8, args=args) for text in (CTX, "Other:")]
    assert pipeline.generate([CTX, "Other:"], token_count=8, args=args) == alone
    head, tail = CTX[: CTX.index("\n\n")], CTX[CTX.index("\n\n") :]
    assert pipeline.encode(head) + pipeline.encode(tail) == pipeline.encode(CTX)
    state = pipeline.prefill(head)
    assert [pipeline.generate(tail, token_count=8, args=args, state=state) for _ in range(2)] == [alone[0]] * 2


def test_a_state_of_forward_is_a_value(model: RWKV) -> None:
    _, state = model.forward(IDS[:2], None)
    first, after = model.forward(IDS[2:], state)
    out, _ = model.forward(IDS[2:], copy.deepcopy(state))
    assert torch.equal(first, out)
    out[:] = 0  # the caller's own
    again, _ = model.forward(IDS[2:], state)
    assert torch.equal(first, again)
    token = PIPELINE(model).sample_logits(again, top_p=0)
    assert token == int(first.argmax()) and not torch.equal(model.forward([token], after)[0], first)


def held_states(model: RWKV) -> tuple[int, int]:
    """Return the engine's numbers of states and of slots in use. Cached prefixes' slots do not count."""
    pool = model.engine.wait(call_engine(model.engine.context, GetStatus()))["pool"]
    slots = pool["slots"]
    return pool["sessions"], slots["total"] - slots["free"] - pool["prefix_cache"]["l1"]


def sessions_known() -> int:
    """Return the number of sessions in this process. This includes those of earlier tests."""
    return sum(isinstance(one, Session) for one in gc.get_objects())


def test_unreferenced_states_are_freed(model: RWKV) -> None:
    gc.collect()
    wait_for(lambda: held_states(model) == (0, 0), 20, "the states of other tests are forgotten")
    known = sessions_known()
    held = model.prefill("Held.")
    state: State | None = None
    for number in range(_MANY):
        _, state = model.forward(number % 90 + 1, None if number % 8 == 0 else state)
    wait_for(lambda: held_states(model) == (2, 2), 20, "what is left is the last state and the one that is held")
    for number in range(_MANY):
        _, state = model.forward(number % 90 + 1, state)
    wait_for(lambda: held_states(model) == (2, 2), 20, "a long line of states leaves its end")
    assert sessions_known() - known < _MANY  # each knows the one it was read behind
    output = model.generate("a", max_tokens=4, temperature=0, state=held)[0].outputs[0]
    assert output == model.generate("Held.a", max_tokens=4, temperature=0)[0].outputs[0]
    del held, state
    wait_for(lambda: held_states(model) == (0, 0), 20, "nothing is kept")


def test_a_failed_turn_leaves_no_copy(model: RWKV, tmp_path: Path) -> None:
    model.prefill("Hello").save(tmp_path / "state.safetensors")
    loaded = model.load_state(tmp_path / "state.safetensors")
    stream = model.generate("Endless", max_tokens=100_000, ignore_eos=True, state=loaded, stream=True)
    next(stream)
    assert held_states(model)[0] > 1
    stream.close()
    del stream
    wait_for(lambda: held_states(model)[0] == 1, 20, "the loaded state is left")
    loaded.delete()


def test_unsupported_calls_raise(model: RWKV) -> None:
    with pytest.raises(ValueError, match="at least one token id"):
        model.forward([], None)
    with pytest.raises(TypeError, match="got list"):
        model.forward([1], [torch.zeros(1)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="str"):
        model.forward("text", None)  # type: ignore[arg-type]
    with pytest.raises(LLMError, match="65536") as refused:
        model.forward([65536], None)
    assert refused.value.status == 422
    with pytest.raises(ValueError, match="temperature"):
        PIPELINE(model).sample_logits(torch.zeros(4), temperature=-1)
    with pytest.raises(ValueError, match="20B_tokenizer"):
        PIPELINE(model, "20B_tokenizer.json")
