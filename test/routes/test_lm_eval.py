"""lm-evaluation-harness' `local-completions` against a service: loglikelihood, rolling and generate tasks.

Skipped unless `lm_eval` is on the PATH or RWKV_LM_EVAL names its program. docs/generation.md describes how to
install it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from test.harness import TOKENIZER
from test.logprob_oracle import LogprobOracle
from test.serving import Service

PROGRAM = os.environ.get("RWKV_LM_EVAL") or shutil.which("lm_eval")
QUESTIONS = [("The capital of France is", [" Paris", " London"]), ("猫は", ["動物", "石"]), ("", ["Two", "Three"])]
TEXTS = ["The cat sat on the mat. " * 100, "def f(x):\n    return x\n"]
TASKS: dict[str, dict[str, Any]] = {
    "multiple_choice": {
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "target_delimiter": "",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    },
    "loglikelihood_rolling": {
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "generate_until": {
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="lm_eval is not installed (RWKV_LM_EVAL)")


def write_tasks(folder: Path) -> None:
    """Write tasks and documents as local files, to avoid downloads."""
    questions = [{"question": question, "choices": choices, "label": 0} for question, choices in QUESTIONS]
    documents = {"multiple_choice": questions, "loglikelihood_rolling": [{"text": text} for text in TEXTS]}
    documents["generate_until"] = questions[:2]
    for kind, task in TASKS.items():
        data = folder / f"{kind}.jsonl"
        data.write_text("\n".join(json.dumps(one) for one in documents[kind]))
        task = {"task": f"own_{kind}", "output_type": kind, "test_split": "train", **task}
        task |= {"dataset_path": "json", "dataset_kwargs": {"data_files": str(data)}}
        (folder / f"own_{kind}.yaml").write_text(json.dumps(task))  # JSON is YAML


def samples(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the harness's samples of a task, in order."""
    (file,) = folder.rglob(f"samples_own_{kind}_*.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(found, key=lambda sample: sample["doc_id"])


@pytest.mark.timeout(300)
def test_all_kinds_of_tasks(service: Service, tiny_model: Path, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    address = f"{service.url}/openai/v1/completions"
    command = [str(PROGRAM), "run", "--model", "local-completions", "--model_args"]
    command += [f"model=rwkv7,base_url={address},num_concurrent=2,max_retries=1", "--batch_size", "2"]
    command += ["--include_path", str(tmp_path), "--tasks", ",".join(f"own_{kind}" for kind in TASKS)]
    command += ["--log_samples", "--output_path", str(tmp_path / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **offline}, check=False)
    assert ran.returncode == 0, ran.stderr
    oracle = LogprobOracle(tiny_model)
    for sample, (question, choices) in zip(samples(tmp_path, "multiple_choice"), QUESTIONS, strict=True):
        for (reported, _), choice in zip(sample["filtered_resps"], choices, strict=True):
            start = len(TOKENIZER.encode(question)) or 1
            ids = [0] * (not question) + TOKENIZER.encode(question + choice)
            assert float(reported) == pytest.approx(sum(oracle.token_logprobs(ids, start)), abs=1e-4 * len(ids))
    for sample, text in zip(samples(tmp_path, "loglikelihood_rolling"), TEXTS, strict=True):
        expected = sum(oracle.token_logprobs([0, *TOKENIZER.encode(text)]))
        assert float(sample["filtered_resps"][0]) == pytest.approx(expected, rel=1e-5)
    assert len(samples(tmp_path, "generate_until")) == 2
