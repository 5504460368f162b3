"""Examples in the documents run: every fenced bash, python and json block, against one served demo model.

A fence that cannot run says why: "```bash no-run: needs a GPU". docs/api.md is generated; its examples are the routes'
own. The library's programs in docs/clients.md run in test/programs/library/test_library_page.py, the examples of
docs/batch.md in test/programs/batch/test_batch_page.py.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from test.serving import ROOT, Service

pytestmark = pytest.mark.slow

ADDRESS = "http://127.0.0.1:8000"
RUN = ("bash", "python", "json")
OTHERS = ("", "toml", "yaml")
"""Languages of blocks that are no examples to run."""
LEFT_OUT = {"docs/api.md", "docs/settings.md"}
RUN_ELSEWHERE = {("docs/clients.md", "python"), ("docs/batch.md", "bash"), ("docs/batch.md", "python")}
DOCUMENTS = ["README.md", "README.zh-CN.md", "CONTRIBUTING.md", "bench/results/README.md"]
DOCUMENTS += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
_FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_REASON = re.compile(r" no-run: \w+( \w+)+")
_ERROR = re.compile(r'\{"error":')
SERVED = (
    "--state",
    "chinese=demo/tuned/chinese.pth",
    "--state",
    "json=demo/tuned/json.pth",
    "--adapter-serve",
    "french=demo/tuned/french.safetensors:1",
    "--models-dir",
    "demo/tuned",
)
"""Flags of docs/weights.md."""


class Example(NamedTuple):
    language: str
    note: str
    text: str


def examples(document: str) -> list[Example]:
    return [Example(*fence) for fence in _FENCE.findall((ROOT / document).read_text("utf-8"))]


class Workplace(NamedTuple):
    """A served demo model and the folder in which examples run."""

    service: Service
    folder: Path

    def run(self, language: str, text: str) -> str:
        """Run an example; returns its standard output."""
        text = text.replace(ADDRESS, self.service.url)
        command = ["bash", "-euc", text] if language == "bash" else [sys.executable, "-c", text]
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 0, f"{text}\n{ended.stdout}\n{ended.stderr}"
        assert not _ERROR.search(ended.stdout), f"{text}\n{ended.stdout}"
        return ended.stdout


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    folder = tmp_path_factory.mktemp("examples")
    service = Service(folder, *SERVED, state_db=folder / "rwkv_sessions.db")
    lines = [{"text": f"Something has happened in town {i}."} for i in range(6)]
    (folder / "news.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "questions.csv").write_text("id,question\n1,Why?\n2,How?\n")
    (folder / "lines.txt.gz").write_bytes(gzip.compress(b"One.\nTwo.\nOne.\n"))
    (folder / "film.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nHello.\n\n")
    shutil.copy(ROOT / "demo/tuned/chinese.pth", folder / "model-state.pth")
    program = folder / "bin" / "python"
    program.parent.mkdir()
    program.write_text(  # commands use the service instead of an engine of their own
        f'#!/bin/sh\n[ "$1 $2" = "app.py batch" ] || exec {sys.executable} "$@"\n'
        f'shift\nexec {sys.executable} {ROOT}/app.py "$@" --url {service.url}\n'
    )
    installed = folder / "bin" / "rwkv-batch"  # a clone does not install the command
    installed.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/app.py "$@"\n')
    program.chmod(0o755)
    installed.chmod(0o755)
    try:
        yield Workplace(service.wait_ready(), folder)
    finally:
        service.close()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_examples_run_or_say_why_not(document: str) -> None:
    if document in LEFT_OUT:
        return
    for example in examples(document):
        assert example.language in RUN + OTHERS, f"{example.language}: use one of {RUN}"
        if example.language in RUN and example.note:
            assert _REASON.fullmatch(example.note), (
                f"{example.note!r}: say why it does not run, as ' no-run: needs a GPU'"
            )


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name not in LEFT_OUT])
def test_examples_run_as_printed(document: str, request: pytest.FixtureRequest) -> None:
    runnable = [one for one in examples(document) if one.language in RUN and not one.note]
    runnable = [one for one in runnable if (document, one.language) not in RUN_ELSEWHERE]
    if not runnable:
        return
    workplace: Workplace = request.getfixturevalue("workplace")
    (workplace.folder / "backup.tar").unlink(missing_ok=True)  # the same name in another language's page
    printed = ""
    for example in runnable:
        if example.language == "json":
            shown = json.loads(example.text)
            if printed:
                assert_same_fields(shown, json.loads(printed))
        else:
            printed = workplace.run(example.language, example.text)


def assert_same_fields(shown: Any, answered: Any) -> None:
    """Fail unless the answer has the fields that the document shows. Their values must be of the same type."""
    assert isinstance(answered, float if isinstance(shown, float) else type(shown)), (shown, answered)
    if isinstance(shown, dict):
        for name, value in shown.items():
            assert_same_fields(value, answered[name])
    elif isinstance(shown, list):
        for one, other in zip(shown, answered, strict=False):
            assert_same_fields(one, other)


def test_an_error_in_an_answer_is_seen(workplace: Workplace) -> None:
    with pytest.raises(AssertionError, match="must be given"):
        workplace.run("bash", f"curl -s {ADDRESS}/state/delete -d '{{}}'")
