"""nvcc from pip: found without a toolkit, made executable, links, installed only where needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from native import build, machine, nvcc
from rwkv_batch.kernels import registry
from rwkv_batch.kernels.cuda.ops import CudaOps


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH with g++ but without nvcc, and no CUDA_HOME."""
    folders = [Path(found).parent for name in ("g++", "sh") if (found := shutil.which(name))]
    monkeypatch.setenv("PATH", ":".join(str(folder) for folder in folders if not (folder / "nvcc").exists()))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    nvcc.find.cache_clear()


@pytest.fixture
def pip_commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The pip commands that `main` would run."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(nvcc.subprocess, "run", run)
    return commands


@pytest.mark.usefixtures("no_toolkit")
def test_a_library_is_built_without_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled and linked with pip's packages, including the CUDA runtime."""
    found = nvcc.find()
    assert found is not None and "site-packages" in found
    monkeypatch.setattr(machine, "gpu_archs", lambda: ("sm_80",))
    source = tmp_path / "fill.cu"
    source.write_text(
        '__global__ void fill(float* x) { *x = 1; }\nextern "C" int go(float* x) { fill<<<1, 1>>>(x); return 0; }\n'
    )
    (tmp_path / "build.ninja").write_text(build.ninja_file(build.Library("fill", (source,))))
    done = subprocess.run([str(machine.ninja()), "-C", str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_lost_execute_permissions_are_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "cu13"
    for program in ("bin/nvcc", "bin/ptxas", "nvvm/bin/cicc"):
        (home / program).parent.mkdir(parents=True, exist_ok=True)
        (home / program).write_text("#!/bin/sh\n")
        (home / program).chmod(0o644)

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(nvcc.importlib.util, "find_spec", lambda name: Spec() if name == "nvidia" else None)
    assert nvcc._from_pip() == home / "bin" / "nvcc"
    assert all((home / p).stat().st_mode & 0o111 == 0o111 for p in ("bin/nvcc", "bin/ptxas", "nvvm/bin/cicc"))


@pytest.mark.parametrize(
    ("card", "found", "cuda", "installs", "said"),
    [
        (True, None, "13.0", True, "271 MB"),
        (True, "/usr/bin/nvcc", "13.0", False, ""),
        (False, None, "13.0", False, ""),
        (True, None, "12.8", False, "CUDA toolkit 12.8"),
        (True, None, None, False, "without CUDA"),
    ],
)
def test_it_is_installed_where_a_gpu_needs_it(
    card: bool,
    found: str | None,
    cuda: str | None,
    installs: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    pip_commands: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(nvcc, "has_gpu", lambda: card)
    monkeypatch.setattr(nvcc, "find", lambda: found)
    monkeypatch.setattr(nvcc, "torch_cuda", lambda: cuda)
    assert nvcc.main() == 0
    assert [command[-1] for command in pip_commands] == ([str(nvcc.REQUIREMENTS)] if installs else [])
    reported = capsys.readouterr().err
    assert said in reported and reported.count("\n") == (1 if said else 0)


def test_a_gpu_without_kernels_logs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line with loss and remedy. If the kernels were requested by name, the start fails."""
    monkeypatch.setattr(CudaOps, "unavailable_reason", staticmethod(lambda device: "no CUDA compiler"))
    ops, refusals = registry.choose_ops("auto", torch.device("cuda", 0))
    assert (ops.name, refusals["cuda"]) == ("naive", "no CUDA compiler")
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 1
    assert all(part in lines[0] for part in ("no CUDA compiler", "make install-nvcc", "459 tokens/s"))
    with pytest.raises(ValueError, match="no CUDA compiler"):
        registry.choose_ops("cuda", torch.device("cuda", 0))
