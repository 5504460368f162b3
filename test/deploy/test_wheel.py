"""The wheel and the source distribution, installed next to a user's modules.

These modules have the names of our folders.
"""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from native import instruction_sets, machine
from native.files import VARIABLE
from requirements import prebuild
from test.programs.batch.runs import read_jsonl, write_jsonl
from test.serving import ROOT, free_port, wait_for

NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "*.db*", "build", "dist", "images", "results")
SOURCES = ("*.py", "*.pyi", "*.cu", "*.cuh", "*.cpp", "*.h", "*.hpp", "*.inc")
HOME = "rwkv_batch"
MOVED = ("bench", "demo", "native", "programs", "routes", "sampling", "state_pool")
OF_THE_TREE = re.compile(rf"^\s*(import|from) ({'|'.join(MOVED)}|app)\b", re.MULTILINE)
"""Text of an import of ours, or of one in a string."""
OF_THE_USER = (
    "settings",
    "library",
    "routes",
    "web",
    "console",
    "demo",
    "app",
    "programs",
    "native",
    "sampling",
    "bench",
)
"""The user's modules. Each leaves a note when it is imported."""


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel, and a folder to run in."""

    venv: Path
    folder: Path
    wheel: Path
    sdist: Path
    tree: Path
    """What was built."""

    @property
    def environment(self) -> dict[str, str]:
        """Without a compiler: what was built before is not looked for either."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RWKV_") or name == VARIABLE}
        own = {"PATH": str(self.venv / "bin"), "CXX": ""}
        return {**kept, **own, "PYTHONDONTWRITEBYTECODE": "1"}

    @property
    def command(self) -> str:
        return str(self.venv / "bin" / "rwkv-batch")

    @property
    def python(self) -> str:
        return str(self.venv / "bin" / "python")

    @property
    def packages(self) -> Path:
        return next((self.venv / "lib").glob("python3.*/site-packages"))

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
        return sorted(path for path in self.packages.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """Tree -> source distribution -> wheel with this CPU's libraries -> virtual environment.

    The environment also sees the packages of the one that runs the tests.
    """
    folder = tmp_path_factory.mktemp("wheel")
    tree, dist, elsewhere = folder / "tree", folder / "dist", folder / "elsewhere"
    shutil.copytree(ROOT, tree, ignore=NOT_COPIED)
    sdist = dist / _build("sdist", tree, dist)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    prebuilt = folder / "prebuilt"
    prebuilt.mkdir()
    fastest = instruction_sets.supported(platform.machine())[0]
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {machine.cxx()} "$@" -O1\n')  # the product's -O3 takes half as long again
    compiler.chmod(0o755)
    for library in (prebuild.KERNELS, prebuild.SAMPLER):
        prebuild.compile_library(library, fastest, str(compiler), prebuilt)
    tag = f"{prebuild.TAG}_{platform.machine()}"
    wheel = dist / _build("wheel", unpacked, dist, {"PREBUILT": str(prebuilt), "PLATFORM": tag})
    assert wheel.name.endswith(f"-py3-none-{tag}.whl")
    shutil.rmtree(unpacked)
    elsewhere.mkdir()
    made = Installed(folder / "venv", elsewhere, wheel, sdist, tree)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made.venv)], check=True, timeout=60)
    for name in OF_THE_USER:
        where = made.packages / name
        where.mkdir()
        note = f"open({str(folder / 'imported')!r}, 'a').write({name!r} + chr(10))"
        (where / "__init__.py").write_text(f"OWNER = 'user'\n{note}\n", "utf-8")
    (made.packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", "utf-8")
    pip = [sys.executable, "-m", "pip", "--python", made.python, "--disable-pip-version-check", "-q", "install"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True, timeout=120)
    before = made.files()
    yield made
    assert made.files() == before, "files made at run time are not next to the code"
    assert not (folder / "imported").exists(), f"we imported the user's {(folder / 'imported').read_text()}"


def _build(kind: str, tree: Path, into: Path, variables: dict[str, str] | None = None) -> str:
    """Build as pip and build do; returns the file's name."""
    into.mkdir(exist_ok=True)
    program = f"import setuptools.build_meta as back; print(back.build_{kind}({str(into)!r}))"
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "SOURCE_COMMIT": "0123456789ab", **(variables or {})}
    built = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    return built.stdout.split()[-1]


def test_it_has_every_source_under_one_name(installed: Installed) -> None:
    tree = installed.tree
    found = [path for top in (HOME, *MOVED) for pattern in SOURCES for path in (tree / top).rglob(pattern)]
    found += [path for path in (tree / "routes/web").rglob("*") if path.is_file()]
    found += [tree / "app.py", tree / HOME / "py.typed", *tree.glob("demo/tuned/*")]
    assert len([path for path in found if path.suffix == ".cu"]) > 10
    for path in found:
        place = str(path.relative_to(tree)).removeprefix(f"{HOME}/")
        copy = installed.packages / HOME / place
        assert copy.exists(), f"the wheel lacks {path}"
        is_same = copy.read_bytes().replace(b"rwkv_batch.", b"") == path.read_bytes().replace(b"rwkv_batch.", b"")
        assert is_same or place == "version.py", f"the wheel's {place} differs by more than names"
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {HOME}
    for path in (path for path in (tree / "deploy").rglob("*") if path.is_file()):
        assert (installed.venv / "share/rwkv-batch" / path.relative_to(tree)).is_file(), f"the wheel lacks {path}"


def test_no_module_of_it_imports_a_name_of_the_tree(installed: Installed) -> None:
    for file in (installed.packages / HOME).rglob("*.py"):
        text = file.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if OF_THE_TREE.search(text) else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.partition(".")[0] for name in names} & {*MOVED, "app"}, f"{file}:{node.lineno}"


def test_the_source_distribution_has_what_a_build_and_a_reader_need(installed: Installed) -> None:
    with tarfile.open(installed.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        "LICENSE",
        "NOTICE",
        "CHANGELOG.md",
        "SECURITY.md",
        "requirements.txt",
        "requirements/cpu.lock",
        "setup.py",
    }
    assert expected <= names and "docs/settings.md" in names and "test/deploy/test_wheel.py" in names


def test_the_names_of_the_user_stay_his_and_the_library_generates_without_a_compiler(
    installed: Installed, tiny_model: Path
) -> None:
    program = (
        "import pathlib, sys, rwkv_batch\n"
        "from rwkv_batch import LLM, PIPELINE, AsyncLLM, SamplingParams, Score, State\n"
        f"with LLM({str(tiny_model)!r}, max_running=4) as llm:\n"
        "    print(len(llm.generate(['a', 'b'], SamplingParams(max_tokens=2))))\n"
        f"ours = {OF_THE_USER!r}\n"
        "assert not [name for name in ours if name in sys.modules]\n"
        "print(rwkv_batch.__file__)\n"
        "import torch\n"
        "from rwkv_batch.kernels.registry import choose_ops\n"
        "from rwkv_batch.sampling.registry import choose_sampler\n"
        "device = torch.device('cpu')\n"
        "ops, _ = choose_ops('cpu', device)\n"
        "sampler, _ = choose_sampler(['cpu'], device, 1, 64, [])\n"
        "lines = open('/proc/self/maps').read().splitlines()\n"
        "print(ops.name, sampler.name, len({line.split()[-1] for line in lines if 'libgomp' in line}))\n"
    )
    ran = installed.run(installed.python, "-c", program)
    assert ran.stdout.split() == ["2", str(installed.packages / HOME / "__init__.py"), "cpu", "cpu", "1"], ran.stderr
    for name in OF_THE_USER:
        assert "OWNER = 'user'" in (installed.packages / name / "__init__.py").read_text("utf-8")


def test_it_says_its_version_and_commit(installed: Installed) -> None:
    lines = installed.run(installed.command, "--version").stdout.splitlines()
    assert lines[0].startswith("rwkv-batch ") and lines[1].split() == ["commit", "0123456789ab"]
    for command in ((), ("batch",), ("chat",)):
        reported = installed.run(installed.command, *command, "--help")
        assert reported.returncode == 0 and "usage: rwkv-batch" in reported.stdout, reported.stderr


@pytest.mark.long
def test_lines_are_answered_by_the_demo_model(installed: Installed) -> None:
    texts = ["Good morning.", "Thank you.", "The cat sleeps."]
    write_jsonl(installed.folder / "in.jsonl", [{"text": text} for text in texts])
    flags = ("--source-lang", "en", "--target-lang", "zh", "--max-running", "4")
    ran = installed.run(installed.command, "batch", "in.jsonl", "-o", "out.jsonl", *flags)
    assert ran.returncode == 0, ran.stderr
    found = read_jsonl(installed.folder / "out.jsonl")
    assert [line["text"] for line in found] == texts and all(line["translation"] for line in found)


def test_the_public_api_is_typed(installed: Installed) -> None:
    program = shutil.copy(ROOT / "test/typing/user_program.py", installed.folder)  # away from the tree's packages
    config = installed.folder / "mypy.ini"
    lines = [
        "[mypy]",
        "strict = True",
        "follow_imports = skip",  # others' packages take most of the time
        "[mypy-rwkv_batch,rwkv_batch.*,msgspec.*]",
        "follow_imports = normal",
    ]
    config.write_text("\n".join(lines), "utf-8")
    flags = [f"--config-file={config}", f"--python-executable={installed.python}", "--cache-dir=/dev/null"]
    checked = installed.run(sys.executable, "-m", "mypy", *flags, str(program))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_it_serves_the_page_and_the_demo_model_and_a_chat_answers_on_the_terminal(installed: Installed) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [installed.command, "serve", "--port", str(port), "--max-running", "4"]
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
        talked = installed.run(installed.command, "chat", "--url", url, typed="Good morning.\n/quit\n")
        assert talked.returncode == 0 and talked.stdout.strip(), talked.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_programs_that_measure_are_run_by_name(installed: Installed) -> None:
    reported = installed.run(installed.command, "bench")
    assert reported.returncode == 2 and " cpu, " in reported.stderr and " chaos," in reported.stderr
    assert "http_load" not in reported.stderr
    assert "cost of durability" in installed.run(installed.command, "bench", "state_pool", "--help").stdout
    without = installed.run(installed.command, "bench", "simulate", "--seeds", "1")
    assert without.returncode == 1 and "clone of the repository" in without.stderr


def test_messages_name_the_command_that_was_typed(installed: Installed) -> None:
    served = installed.run(installed.command, "serve", "--port")
    assert served.returncode == 2 and "see rwkv-batch serve --help" in served.stderr, served.stderr
    talked = installed.run(installed.command, "chat", "--set", "temperature")
    assert talked.returncode == 2 and "see rwkv-batch chat --help" in talked.stderr, talked.stderr
