"""`pip install .`: the wheel has all that runs, and runs from anywhere without writing beside the code."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from native.cache_folder import VARIABLE
from test.programs.batch.runs import read_jsonl, write_jsonl
from test.serving import ROOT, free_port, wait_for

NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "*.db*", "build", "images")
SOURCES = ("*.py", "*.cu", "*.cuh", "*.cpp", "*.h")


@dataclass(frozen=True)
class Installed:
    """What pip has put into a folder, to be run from another one."""

    target: Path
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RWKV_") or name == VARIABLE}
        own = {"PYTHONPATH": str(self.target), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
        return {**kept, **own}

    @property
    def command(self) -> str:
        return str(self.target / "bin" / "rwkv-batch")

    def run(self, *command: str, typed: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            input=typed,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def files(self) -> list[Path]:
        return sorted(path for path in self.target.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "tree", ignore=NOT_COPIED)
    target, elsewhere = folder / "target", folder / "elsewhere"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    command = [*pip, "--no-build-isolation", "--no-deps", "--target", str(target), str(folder / "tree")]
    subprocess.run(command, check=True, timeout=120)
    shutil.rmtree(folder / "tree")
    elsewhere.mkdir()
    made = Installed(target, elsewhere)
    before = made.files()
    yield made
    assert made.files() == before, "what is made at run time went beside the code"


def test_it_has_every_source_and_the_page(installed: Installed) -> None:
    folders = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name not in ("test", "examples")]
    wanted = [path for folder in folders for pattern in SOURCES for path in folder.rglob(pattern)]
    wanted += [path for path in (ROOT / "routes" / "web").rglob("*") if path.is_file()]
    assert len([path for path in wanted if path.suffix == ".cu"]) > 10
    for path in [*wanted, *ROOT.glob("demo/tuned/*"), ROOT / "app.py"]:
        copy = installed.target / path.relative_to(ROOT)
        assert copy.exists() and copy.read_bytes() == path.read_bytes(), f"the wheel lacks {path}"
    for path in (path for path in (ROOT / "deploy").rglob("*") if path.is_file()):
        assert (installed.target / "share/rwkv-batch" / path.relative_to(ROOT)).is_file(), f"the wheel lacks {path}"
    assert not (installed.target / "test").exists()  # it would be in the way of other packages' tests


def test_lines_are_answered_by_the_demo_model(installed: Installed) -> None:
    texts = ["Good morning.", "Thank you.", "The cat sleeps."]
    write_jsonl(installed.folder / "in.jsonl", [{"text": text} for text in texts])
    flags = ("--source-lang", "en", "--target-lang", "zh", "--max-running", "4")
    ran = installed.run(installed.command, "batch", "in.jsonl", "-o", "out.jsonl", *flags)
    assert ran.returncode == 0, ran.stderr
    found = read_jsonl(installed.folder / "out.jsonl")
    assert [line["text"] for line in found] == texts and all(line["translation"] for line in found)


def test_the_library_is_a_name_of_the_engine(installed: Installed, tiny_model: Path) -> None:
    program = (
        "import rwkv_batch, sys; assert 'programs.library' not in sys.modules\n"
        "from rwkv_batch import LLM, PIPELINE, AsyncLLM, SamplingParams\n"
        f"with LLM({str(tiny_model)!r}, max_running=4) as llm:\n"
        "    print(len(llm.generate(['a', 'b'], SamplingParams(max_tokens=2))), rwkv_batch.__file__)\n"
    )
    ran = installed.run(sys.executable, "-c", program)
    assert ran.stdout.split() == ["2", str(installed.target / "rwkv_batch" / "__init__.py")], ran.stderr


def test_it_serves_the_page_and_answers(installed: Installed, tiny_model: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [installed.command, "serve", "--port", str(port), "--model-path", str(tiny_model), "--max-running", "4"]
    log = installed.folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=installed.folder, env=installed.environment, stdout=file, stderr=subprocess.STDOUT
        )
    try:

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            return httpx.get(f"{url}/readyz").status_code == 200

        wait_for(is_ready, 60, f"ready; see {log}")
        assert "<script" in httpx.get(url, timeout=60).text
        body = {"contents": ["abc"], "max_tokens": 2, "stream": False}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200, log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_programs_that_measure_are_run_by_name(installed: Installed) -> None:
    told = installed.run(installed.command, "bench")
    assert told.returncode == 2 and " batch, chaos," in told.stderr and "http_load" not in told.stderr
    assert "lines/s" in installed.run(installed.command, "bench", "batch", "--help").stdout
    without = installed.run(installed.command, "bench", "simulate", "--seeds", "1")
    assert without.returncode == 1 and "clone of the repository" in without.stderr


def test_messages_name_the_command_that_was_typed(installed: Installed) -> None:
    served = installed.run(installed.command, "serve", "--port")
    assert served.returncode == 2 and "see rwkv-batch --help" in served.stderr, served.stderr
    talked = installed.run(installed.command, "chat", "--set", "temperature")
    assert talked.returncode == 2 and "see rwkv-batch chat --help" in talked.stderr, talked.stderr
