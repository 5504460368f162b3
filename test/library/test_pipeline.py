"""Scripts of the rwkv package get the same greedy text from library.pipeline."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from library.pipeline import PIPELINE, PIPELINE_ARGS, RWKV
from test.library.pipelines import CTX, PLAIN, told, write_ascii_model
from test.serving import ROOT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RWKV]:
    path = write_ascii_model(tmp_path_factory.mktemp("pipeline") / "ascii.pth")
    model = RWKV(model=str(path.with_suffix("")), strategy="cpu fp32", max_running=8)
    yield model
    model.close()


def test_a_script_gets_the_packages_text(model: RWKV, tmp_path: Path) -> None:
    path = write_ascii_model(tmp_path / "ascii.pth")
    command = [sys.executable, "-m", "test.library.pipelines", str(path.with_suffix(""))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    theirs = json.loads(ran.stdout.splitlines()[-1])
    assert told(model, PIPELINE, PIPELINE_ARGS) == theirs
    assert len({*theirs.values()}) == 4 and theirs["plain"].startswith(theirs["stopped"])


def test_several_prompts_and_a_state(model: RWKV) -> None:
    pipeline, args = PIPELINE(model), PIPELINE_ARGS(**PLAIN)
    alone = [pipeline.generate(text, token_count=8, args=args) for text in (CTX, "Other:")]
    assert pipeline.generate([CTX, "Other:"], token_count=8, args=args) == alone
    head, tail = CTX[: CTX.index("\n\n")], CTX[CTX.index("\n\n") :]
    assert pipeline.encode(head) + pipeline.encode(tail) == pipeline.encode(CTX)
    state = pipeline.prefill(head)
    assert [pipeline.generate(tail, token_count=8, args=args, state=state) for _ in range(2)] == [alone[0]] * 2


def test_what_is_not_offered_says_so(model: RWKV) -> None:
    with pytest.raises(NotImplementedError, match="logits"):
        model.forward([1, 2], None)
    with pytest.raises(ValueError, match="20B_tokenizer"):
        PIPELINE(model, "20B_tokenizer.json")
