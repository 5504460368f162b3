"""The command gives the same texts as the engine alone. The command has its own engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app import main
from sampling.params import SamplingParams
from test.harness import make_request, run, started_engine
from test.programs.batch.runs import errors_of, read_jsonl, write_jsonl

ENGINE = ("--pp-devices", "cpu", "--progress", "plain", "--max-running", "16")


def test_lines_are_answered_as_by_the_engine_alone(tiny_model: Path, tmp_path: Path) -> None:
    texts = [f"Line {i} of a story" + " and so on" * (i % 5) for i in range(30)]
    source, target = write_jsonl(tmp_path / "in.jsonl", texts), tmp_path / "out.jsonl"
    flags = ("--task", "complete", "--max-tokens", "9", "--seed", "5", "--top-k", "20", "--top-p", "0.9")
    command = ["batch", str(source), "-o", str(target), "--model-path", str(tiny_model), *flags, *ENGINE]
    assert main([*command, "--limit", "12"]) == 0
    assert main(command) == 0
    with started_engine(tiny_model, max_running=16) as engine:
        params = [
            SamplingParams(
                top_k=20, top_p=0.9, presence_penalty=2.0, frequency_penalty=0.2, penalty_decay=0.996, seed=5 + i
            )
            for i in range(len(texts))
        ]
        rows = [
            make_request(text, max_tokens=9, sampling=one, stop_ids=[261, 24281])
            for text, one in zip(texts, params, strict=True)
        ]
        alone = [text.decode("utf-8", "replace") for text in run(engine, *rows).all_texts]
    assert [line["completion"] for line in read_jsonl(target)] == alone


@pytest.mark.slow
def test_prompts_that_the_engine_refuses_fail_alone(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[Any] = [{"text": "short"}, {"text": "long " * 200}, {"messages": "none"}, {"messages": [{"role": "x"}]}]
    source, target = write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = ["batch", str(source), "-o", str(target), "--model-path", str(tiny_model), *ENGINE]
    assert main([*command, "--task", "chat", "--max-tokens", "4", "--max-prompt-tokens", "50"]) == 3
    assert [line["text"] for line in read_jsonl(target)] == ["short"]
    reasons = {error["line"]: error["error"] for error in errors_of(target)}
    assert "--max-prompt-tokens" in reasons[2] and "'text'" in reasons[3] and "role" in reasons[4]
    capsys.readouterr()
    assert main([*command, "--target-lang", "de", "--dry-run"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["lines"] == 4 and figures["unreadable"] == 2 and figures["completion_tokens"] > 0


def test_candidates_are_scored(tiny_model: Path, tmp_path: Path) -> None:
    lines: list[Any] = [
        {"text": "2 + 2 =", "candidates": [" 4", " 5"]},
        {"text": "Hi", "candidates": " there"},
        {"text": "x"},
    ]
    source, target = write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = ["batch", str(source), "-o", str(target), "--model-path", str(tiny_model), *ENGINE, "--task", "score"]
    assert main(command) == 3
    first, second = read_jsonl(target)
    assert [one["index"] for one in first["scores"]] == [0, 1] and len(second["scores"]) == 1
    assert all(one["logprob"] < 0 for one in first["scores"])
    assert "'candidates'" in errors_of(target)[0]["error"]
    assert main([*command, "--temperature", "1"]) == 2
