"""`inspect`, `convert` and `doctor`: what they print, and their exit codes."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from app import main
from demo.random_weights import random_weights
from native import machine
from programs.tools.inspect_file import chat_form
from programs.tools.plan import MEASURED, MEASURED_CPU
from rwkv_batch.model.weights import open_weights
from test.ray_nodes import free_port

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def rwkv_batch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Return a function that runs a command in this process. It returns the exit code and both outputs."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(one) for one in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.pth"
    torch.save(random_weights(2, 128, vocab=256, ranks=(32, 64, 32, 96)), path)
    return path


def test_formats_are_converted_into_each_other(rwkv_batch: Run, model: Path, tmp_path: Path) -> None:
    """Through GGUF in bf16 and back, the model has the same bits."""
    for source, target in (("model.pth", "a.gguf"), ("a.gguf", "b.safetensors"), ("b.safetensors", "c.pth")):
        code, out, _ = rwkv_batch("convert", source, target, "--dtype", "bf16")
        assert code == 0 and out.startswith(f"{target}: RWKV-7, 2 layers x 128 (2 heads), vocabulary 256, bf16, ")
    first, last = open_weights(model), open_weights(tmp_path / "c.pth")
    for name, tensor in last.tensors.items():
        assert torch.equal(tensor.reshape(first.tensors[name].shape), first.tensors[name]), name


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("model.pth", "model.pth"), "model.pth exists; give a new file"),
        (("model.pth", "a.bin"), "ends in '.bin'; allowed are .pth, .safetensors, .gguf"),
        (("model.pth", "a.pth", "--dtype", "q8_0"), ".pth has no type q8_0; give --dtype bf16"),
        (("none.pth", "a.gguf"), "none.pth does not exist"),
        (("model.pth", "folder/a.gguf"), "No such file or directory"),
    ],
)
def test_what_cannot_be_converted_is_one_line(
    rwkv_batch: Run, model: Path, arguments: tuple[str, ...], why: str
) -> None:
    code, out, error = rwkv_batch("convert", *arguments)
    assert code == 1 and out == "" and why in error and error.startswith("error: ") and error.count("\n") == 1
    assert [file.name for file in model.parent.iterdir()] == ["model.pth"], "no half-written file stays"


def test_a_model_is_described(rwkv_batch: Run, model: Path) -> None:
    assert rwkv_batch("convert", model, "model.gguf", "--dtype", "q8_0")[0] == 0
    code, out, _ = rwkv_batch("inspect", "model.gguf", "--checksum")
    lines = out.splitlines()
    assert code == 0 and lines[0] == "kind        model, gguf"
    assert "RWKV-7, 2 layers x 128 (2 heads), vocabulary 256" in lines[1] and "w 32, a 64, v 32, g 96" in lines[2]
    assert any(line.startswith("type        q8_0: ") and "ffn.key.weight" in line for line in lines)
    sizes = {line.split()[0]: float(line.split()[1]) for line in lines if line.endswith("  8 GB (RTX 4060)")}
    assert list(sizes) == ["fp16", "bf16", "fp32", "fp8", "int8", "int4"]
    digest = hashlib.sha256(Path("model.gguf").read_bytes()).hexdigest()
    assert (
        "chat form   rwkv-world: labels User and Assistant, or the request's template" in lines
        and lines[-1] == f"sha256      {digest}  model.gguf"
    )


@pytest.mark.parametrize(
    ("file", "parts"),
    [
        ("demo/tuned/chinese.pth", ("tuned state, pth; use it with --state", "6 x 4 heads")),
        ("demo/tuned/french.safetensors", ("adapter; use it with --adapter", "LoRA on 36", "rank        16")),
        (
            "test/state_pool/upgrades/session-6.safetensors",
            ("session; import it", "tokens      3", "a.wkv: int32 [28]"),
        ),
    ],
)
def test_other_files_are_described(rwkv_batch: Run, file: str, parts: tuple[str, ...]) -> None:
    code, out, _ = rwkv_batch("inspect", ROOT / file)
    assert code == 0 and all(part in out for part in parts), out


def test_the_templates_of_a_file_are_shown_but_not_run() -> None:
    assert chat_form("").startswith("none in the file: labels User")
    shown = chat_form("{% for i in range(10**9) %}\x1b[2J{{ ''.__class__ }}{% endfor %}" + "x" * 10**6)
    assert shown.startswith("Jinja, not used") and len(shown) < 200 and shown.isprintable()


def test_a_file_that_cannot_be_read_is_one_line(rwkv_batch: Run, tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_bytes(b"<!doctype html>")
    code, _, error = rwkv_batch("inspect", "page.gguf")
    assert code == 1 and "a web page" in error and error.count("\n") == 1
    assert rwkv_batch("inspect", "none.pth")[::2] == (
        1,
        "error: file none.pth does not exist; give a .pth, .safetensors, .st or .gguf file\n",
    )


@pytest.mark.parametrize("command", [("inspect",), ("convert",), ("plan", "--model")])
def test_tools_take_the_names_of_models(
    rwkv_batch: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    code, _, error = rwkv_batch(*command, "ollama:no-such-model", *(["a.gguf"] if command == ("convert",) else []))
    assert code == 1 and "ollama:no-such-model is not in ollama's store" in error, error


def test_the_doctor_finds_nothing_wrong_here(rwkv_batch: Run) -> None:
    code, out, _ = rwkv_batch("doctor", "--port", free_port())
    names = [line.split()[1] for line in out.splitlines() if line.startswith("ok ")]
    assert code == 0, out
    assert list(dict.fromkeys(names)) == ["python", "packages", "gpu", "compiler", "cpu", "model", "disk", "port"]


def test_the_doctor_says_what_to_do(rwkv_batch: Run, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, _ = rwkv_batch("doctor", "--port", port, "--model-path", model)
    bad = [line for line in out.splitlines() if not line.startswith("ok ")]
    assert code == 1 and len(bad) == 2, out
    assert bad[0].startswith("bad model     cannot be served; ") and "use 'World' weights" in bad[0]
    assert bad[1].startswith(f"bad port      127.0.0.1:{port} cannot be used (") and "give another --port" in bad[1]
    assert rwkv_batch("doctor", "--no-flag")[0] == 2


def test_a_plan_says_what_fits(rwkv_batch: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, _ = rwkv_batch("plan", "--model", str(model), "--rows", "32", "--gpu", "24 GB")
    assert code == 0 and ": fits" in said and "32 rows at once" in said and "speed       not measured" in said
    most = int(re.search(r"most rows +([\d,]+)", said)[1].replace(",", ""))  # type: ignore[index]
    for rows, fits in ((most, True), (most + most // 100, False)):
        code, said, _ = rwkv_batch("plan", "--model", str(model), "--rows", str(rows), "--gpu", "24")
        assert (code == 0) == fits and ("remedy" in said) != fits
    code, said, _ = rwkv_batch("plan", "--model", str(model), "--gpu", "0.00001")
    assert code == 1 and "a GPU of 8 GB" in said and "fewer --rows" not in said
    assert rwkv_batch("plan", "--model", "absent.pth")[0] == 1
    code, said, _ = rwkv_batch("plan", "--model", "demo", "--rows", "1")
    assert code == 0 and said.startswith("on          this machine's ") and "plans for another one" in said
    monkeypatch.setattr(machine, "first_gpu", lambda: ("NVIDIA L4", 24 * 10**9))
    code, said, _ = rwkv_batch("plan", "--model", str(model), "--rows", "1")
    assert code == 0 and "this machine's NVIDIA L4" in said and " of 24 GB: fits" in said and "GB in fp16" in said
    code, said, _ = rwkv_batch("plan", "--model", str(model), "--rows", "32", "--cpu", "16GB")
    assert code == 0 and "GB in fp32" in said and "fits" in said and "1,309 tokens/s with 32 rows" in said
    code, said, _ = rwkv_batch("plan", "--model", str(model), "--cpu", "0.0001", "--dtype", "fp8")
    assert code == 1 and "GB in bf16" in said and "a machine with more memory" in said and "GPU" not in said
    assert rwkv_batch("plan", "--model", str(model), "--cpu", "16GB", "--gpu", "24GB")[0] == 2


def test_a_plans_speeds_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for (weights, states), figures in MEASURED.items():
        assert f"| {weights}, {states} | {' | '.join(f'{one:,}' for one in figures)} |" in page
    assert f"bf16 decodes {MEASURED_CPU[1]} tokens/s with one row and {MEASURED_CPU[32]:,} with 32" in page
