"""Errors of `bench.quality` for unusable files and numbers: one line, no table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import quality
from demo.random_weights import write_random_model
from rwkv_batch.model.weights import open_weights


def last_line(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", ["quality", *arguments])
    with pytest.raises(SystemExit) as ended:
        quality.main()
    assert ended.value.code != 0
    return str(ended.value.code) if isinstance(ended.value.code, str) else capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model-path", "none.pth"], "none.pth does not exist"),
        (["--model-path", "words.pth"], "words.pth is not a zip-format .pth"),
        (["--text-file", "none.txt"], "--text-file .*none.txt cannot be read .*No such file"),
        (["--text-file", "none.txt", "--wkv-states", "int8"], "--text-file .*none.txt cannot be read"),
        (["--text-file", "."], "Is a directory"),
        (["--text-file", "bytes.txt"], "bytes.txt cannot be read .*UTF-8"),
        (["--text-file", "empty.txt"], "holds 0 tokens; give a text of at least 2"),
        (["--max-tokens", "-5"], "--max-tokens: must be a whole number, 2 or more, got '-5'"),
        (["--outliers", "0"], "--outliers: must be a whole number, 1 or more, got '0'"),
        (["--texts", "0"], "--texts: must be a whole number, 1 or more, got '0'"),
        (["--device", "bogus"], "--device: device 'bogus' is not .*change --device"),
        (["--device", "cuda:4321"], "--device: there is no device cuda:4321"),
        (["--out", "none/found.json"], "--out: must be a file in an existing folder, got 'none/found.json'"),
    ],
)
def test_an_error_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.pth").write_text("words")
    Path("bytes.txt").write_bytes(b"\xff\xfe\x00")
    Path("empty.txt").touch()
    if "--model-path" not in arguments:
        arguments = ["--model-path", str(write_random_model(tmp_path / "tiny.pth", layers=1, width=64)), *arguments]
    line = last_line(arguments, monkeypatch, capsys)
    assert re.search(named, line), line


def test_planted_outliers_are_in_the_reference_too(tmp_path: Path) -> None:
    weights = open_weights(write_random_model(tmp_path / "tiny.pth", layers=1, width=64))
    planted = quality.with_outliers(weights, 20)
    name = "blocks.0.ln2.weight"
    larger = (planted.tensor(name) / weights.tensor(name).float()).round()
    assert sorted(larger.tolist()) == [1] * 56 + [20] * 8
    assert planted.fingerprint != weights.fingerprint
