"""Weight files: every public size is recognised by its tensors, everything else refused with a reason."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from demo.random_weights import random_weights
from native import files as private_files
from rwkv_batch import load_progress
from rwkv_batch.model import content_digest
from rwkv_batch.model.export import write_model
from rwkv_batch.model.loader import FOLD_ROWS, LayerLoader, Precision
from rwkv_batch.model.mmap_release import release
from rwkv_batch.model.state import ModelShape, StateFormat
from rwkv_batch.model.weights import SAMPLE_RUN, Weights, WeightsError, expected_shapes, open_weights, weights_from
from rwkv_batch.runner.pipeline import Pipeline, resolve_device

Tensors = dict[str, Tensor]


def small(**changes: object) -> Tensors:
    return random_weights(2, 64, vocab=128, ranks=(8, 12, 4, 20), **changes)  # type: ignore[arg-type]


def written(path: Path, tensors: object) -> Path:
    if path.suffix == ".gguf":
        write_model(weights_from(tensors), path, "q8_0")  # type: ignore[arg-type]
    elif path.suffix == ".safetensors":
        save_file(tensors, path)  # type: ignore[arg-type]
    else:
        torch.save(tensors, path)
    return path


def check_refused(path: Path, why: str) -> str:
    """Return the message that refuses a model."""
    with pytest.raises(WeightsError, match=why) as caught:
        open_weights(path)
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("first_v", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_both_formats_are_equal(tmp_path: Path, suffix: str, first_v: bool, dtype: torch.dtype) -> None:
    tensors = small(first_v=first_v, dtype=dtype)
    weights = open_weights(written(tmp_path / f"model{suffix}", tensors))
    assert weights.shape == ModelShape(2, 64, 128, 256, decay_rank=8, a_rank=12, v_rank=4, gate_rank=20)
    assert weights.tensors.keys() == tensors.keys()
    assert all(torch.equal(weights.tensors[name], tensors[name]) for name in tensors)
    assert weights.num_bytes == sum(t.numel() for t in tensors.values()) * dtype.itemsize
    assert weights.fingerprint == weights_from(tensors).fingerprint


def test_the_fingerprint_changes_with_the_weights() -> None:
    seen = {weights_from(small()).fingerprint, weights_from(small(seed=1)).fingerprint}
    seen.add(weights_from(small(first_v=False)).fingerprint)
    one = small()
    one["blocks.1.att.k_k"][0, 0, 5] += 1
    assert len(seen | {weights_from(one).fingerprint}) == 4


def test_the_fingerprint_covers_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change between the sampled numbers changes the second half. This also holds for a file whose digest is kept."""
    monkeypatch.setattr(content_digest, "MIN_CACHED_BYTES", 0)
    monkeypatch.setenv(private_files.VARIABLE, str(tmp_path))
    tensors = random_weights(1, 64, vocab=1024, ranks=(8, 12, 4, 20))
    path = written(tmp_path / "model.safetensors", tensors)
    first = open_weights(path).fingerprint
    with monkeypatch.context() as patched:
        patched.setattr(content_digest, "_computed", lambda _: pytest.fail("the file is read again"))
        assert open_weights(path).fingerprint == first
    table = tensors["head.weight"]
    table[: len(table) // 4, SAMPLE_RUN:] *= -1
    written(path, tensors)
    second = open_weights(path).fingerprint
    assert second.split(".")[0] == first.split(".")[0] and second.split(".")[1] != first.split(".")[1]
    assert second == weights_from(tensors).fingerprint


PUBLIC = {
    # name: layers, width, ranks w/a/v/g, parameters in millions
    "0.1B": (12, 768, (64, 64, 32, 128), 191),
    "0.4B": (24, 1024, (64, 64, 32, 128), 451),
    "1.5B": (24, 2048, (96, 96, 64, 256), 1527),
    "2.9B": (32, 2560, (96, 96, 64, 320), 2948),
    "7.2B": (32, 4096, (128, 128, 96, 480), 7199),
    "13.3B": (61, 4096, (192, 192, 128, 384), 13269),
}


def public_shape(name: str) -> ModelShape:
    layers, width, ranks, _ = PUBLIC[name]
    return ModelShape(layers, width, 65536, 4 * width, *ranks)


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("vectors", [(), (1, 1)])
def test_public_sizes(name: str, vectors: tuple[int, ...]) -> None:
    """By shapes only: every tensor is one number, expanded."""
    shape, millions = public_shape(name), PUBLIC[name][3]
    tensors = {
        key: torch.ones(1, dtype=torch.bfloat16).expand(*(vectors if len(size) == 1 else ()), *size)
        for key, size in expected_shapes(shape).items()
    }
    recognised = weights_from(tensors)
    assert recognised.shape == shape and shape.heads * 64 == PUBLIC[name][1]
    assert abs(recognised.num_parameters / 1e6 - millions) < 1 + millions / 1000


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda t: {key: value for key, value in t.items() if key not in names}


def plus(name: str, *size: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[Tensors], Tensors]:
    return lambda t: {**t, name: torch.zeros(size, dtype=dtype)}


def with_nan(name: str) -> Callable[[Tensors], Tensors]:
    def change(t: Tensors) -> Tensors:
        t[name].view(-1)[3] = float("nan")
        return t

    return change


REFUSED = [
    ("rwkv7a", plus("blocks.0.ffn.s_emb.weight", 4), r"RWKV-7a .*blocks\.0\.ffn\.s_emb\.weight"),
    ("rwkv7b", plus("blocks.0.qkv.weight", 4), r"RWKV-7b .*blocks\.0\.qkv\.weight"),
    ("v8", plus("blocks.0.enn.weight", 4), r"RWKV-8 .*blocks\.0\.enn\.weight"),
    ("v6", plus("blocks.0.att.time_maa_x", 64), r"\(RWKV-6\) lacks"),
    ("v5", plus("blocks.0.att.time_faaaa", 4), r"\(RWKV-5.0\) lacks"),
    ("v4", lambda _: plus("blocks.0.att.time_first", 4)({}), "is not RWKV-4: it has no 'emb.weight'"),
    ("transformers", lambda _: {"model.layers.0.attn.r_proj.weight": torch.zeros(4)}, "transformers"),
    ("ARWKV", lambda _: {"model.layers.0.self_attn.time_mixer.x_r": torch.zeros(4)}, "is ARWKV"),
    (
        "RWKV-5 of transformers",
        lambda _: {"rwkv.blocks.0.attention.key.weight": torch.zeros(4)},
        "transformers' layout",
    ),
    ("a session", lambda _: {"stage0.wkv": torch.zeros(4)}, "a session .* import it with POST /state/import"),
    ("ROSA", plus("blocks.0.rosa.weight", 4), r"RWKV with ROSA .*blocks\.0\.rosa\.weight"),
    ("experts", plus("blocks.0.ffn.experts.1.key.weight", 4), "a mixture of experts"),
    ("lora", plus("blocks.0.att.key.weight.lora_A", 4), "an adapter .*with --adapter FILE"),
    ("PEFT's lora", lambda _: {"base.blocks.0.att.key.lora_A.weight": torch.zeros(4)}, "an adapter .*--adapter FILE"),
    ("bone", plus("blocks.0.att.key.bone", 4), "an adapter"),
    ("tuned state", lambda _: {"blocks.0.att.time_state": torch.zeros(1, 64, 64)}, "a tuned state .*--state NAME=FILE"),
    ("something else", lambda _: {"conv.weight": torch.zeros(4)}, "is not RWKV-7: it has no 'emb.weight'"),
    ("empty", lambda _: {}, "is not RWKV-7"),
    ("an unknown tensor", plus("blocks.1.att.x_q", 1, 1, 64), r"1 tensors .*blocks\.1\.att\.x_q"),
    ("no head", without("head.weight"), "no 'head.weight'"),
    ("no vector", without("blocks.1.att.k_a"), r"lacks the tensor 'blocks\.1\.att\.k_a' of shape \(64,\)"),
    ("no v in layer 1", without("blocks.1.att.v1"), r"blocks\.1\.att\.v"),
    ("no norm", without("blocks.0.ln0.bias"), r"lacks the tensor 'blocks\.0\.ln0\.bias'"),
    ("a layer missing", plus("blocks.3.ln1.weight", 64), "4 layers but none numbered 2"),
    ("a wrong shape", plus("blocks.1.att.key.weight", 64, 32), r"has shape \(64, 32\), expected \(64, 64\)"),
    ("a flat embedding", plus("emb.weight", 64), r"'emb\.weight' is \(64,\)"),
    ("a bad width", plus("emb.weight", 128, 96), "multiple of the head size 64"),
    ("a flat matrix", plus("blocks.1.att.w1", 64), r"att\.w1'"),
    ("integers", plus("blocks.1.ln1.weight", 64, dtype=torch.int8), r"is torch\.int8"),
    ("NaN", with_nan("blocks.1.ln2.weight"), r"'blocks\.1\.ln2\.weight' has NaN"),
]


@pytest.mark.parametrize(("change", "reason"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_other_models_are_refused(
    tmp_path: Path, change: Callable[[Tensors], Tensors], reason: str, suffix: str
) -> None:
    path = written(tmp_path / f"model{suffix}", change(small()))
    message = check_refused(path, reason)
    assert str(path) in message and "\n" not in message


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    check_refused(tmp_path / "none.pth", "does not exist")
    check_refused(tmp_path, "is a folder")
    for pipe in (tmp_path / "pipe.pth", tmp_path / "pipe.safetensors"):
        os.mkfifo(pipe)  # opening it would wait for a writer
        check_refused(pipe, "is not a regular file")
    other = tmp_path / "model.rwkvq"
    other.write_bytes(b"GGUF")
    check_refused(other, r"ends in '\.rwkvq'; .* come as \.pth, \.safetensors, \.st or \.gguf")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".gguf"])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n",
            "a git-lfs pointer.*git lfs pull",
        ),
        (b"\n<!DOCTYPE html><html><head><title>Not found", "a web page; download the file itself"),
        (b'{"error":"Entry not found"}', "a text, like a server's error.*Entry not fou"),
        (b"<?xml version='1.0'?>\n<Error><Code>NoSuchKey", "a text, like a server's error"),
        (b'{\r\n  "error": "Entry not found"\n}', "a text, like a server's error"),
        ("\ufeff<Error>\nfichier supprim\u00e9".encode(), "a text, like a server's error"),
    ],
    ids=["git-lfs", "a web page", "JSON", "XML", "lines", "BOM"],
)
def test_what_a_download_leaves_in_place_of_a_file(tmp_path: Path, suffix: str, content: bytes, why: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(content)
    check_refused(path, why)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros(1).expand(1 << 20, 64, 64), r"would take 171\d{8} bytes"),
        (torch.empty(64, 64, device="meta"), "uses 'torch._utils._rebuild_meta_tensor_no_storage'"),
        (torch.eye(64).to_sparse(), "uses 'torch._utils._rebuild_sparse_tensor'"),
    ],
    ids=["one number for all", "meta", "sparse"],
)
def test_tensors_without_their_own_data_are_refused(tmp_path: Path, tensor: Tensor, why: str) -> None:
    torch.save(small() | {"blocks.0.att.key.weight": tensor}, tmp_path / "model.pth")
    check_refused(tmp_path / "model.pth", why)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = written(tmp_path / "model.pth", small())
    path.chmod(0)
    check_refused(path, "cannot be read")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("keep", [0, 1, 7, 100, 5000, -1000, -1])
def test_cut_files_are_refused(tmp_path: Path, suffix: str, keep: int) -> None:
    path = written(tmp_path / f"model{suffix}", small())
    path.write_bytes(path.read_bytes()[:keep])
    assert "unpack" not in check_refused(path, r"damaged|truncated")


@pytest.mark.parametrize(("suffix", "least"), [(".pth", 150_000), (".safetensors", 200_000)])
def test_a_cut_file_says_how_many_bytes_are_missing(tmp_path: Path, suffix: str, least: int) -> None:
    path = written(tmp_path / f"model{suffix}", small())
    path.write_bytes(path.read_bytes()[:-200_000])
    message = check_refused(path, r"[ (]truncated: .*\d+ .*bytes are missing")
    reported = re.search(r"truncated: (?:at least )?(\d+) ", message)
    assert reported is not None and least <= int(reported[1]) <= 200_000


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_noise_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"\xff\x07noise" * 1000)
    check_refused(path, r"damaged|truncated")


def test_a_zip_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    check_refused(path, "damaged or not a weight file")


@pytest.mark.parametrize("content", [[1, 2], {"model": {"emb.weight": torch.zeros(2)}}, {"step": 3}, torch.zeros(3)])
def test_checkpoints_are_refused(tmp_path: Path, content: object) -> None:
    check_refused(written(tmp_path / "model.pth", content), "not a dict of tensors")


class Exploit:
    """Unpickling this writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"touch {self.target}",))


def test_code_in_a_pickle_does_not_run(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    path = written(tmp_path / "zipped.pth", {**small(), "x": Exploit(target)})
    check_refused(path, r"not a weight file .its pickle uses 'posix\.system'")
    bare = tmp_path / "bare.pth"
    bare.write_bytes(pickle.dumps({"x": Exploit(target)}))
    check_refused(bare, r"not a zip-format \.pth \(truncated, or saved by torch < 1\.6\)")
    assert not target.exists()


def test_releasing_pages_loses_nothing(tmp_path: Path) -> None:
    in_memory = torch.arange(100_000, dtype=torch.float32)
    release(in_memory)
    assert torch.equal(in_memory, torch.arange(100_000, dtype=torch.float32))
    torch.save({"x": in_memory}, tmp_path / "x.pth")
    mapped = torch.load(tmp_path / "x.pth", mmap=True)["x"]
    release(mapped)
    assert torch.equal(mapped, in_memory)


LOAD = """
import resource, sys
import torch
from rwkv_batch.runner.pipeline import Pipeline
from rwkv_batch.model.weights import open_weights
from rwkv_batch.kernels.cpu.ops import CpuOps
from rwkv_batch.model.state import StateFormat

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) << 10

CpuOps().make_linear(torch.zeros(64, 64))
before = status("VmRSS")
weights = open_weights(sys.argv[1])
opened = status("VmRSS")
Pipeline(weights, devices=("cpu",), dtype="bf16", kernels=sys.argv[2])
print(opened - before, status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("suffix", "kernels"), [(".safetensors", "cpu"), (".pth", "naive"), (".gguf", "naive")])
def test_loading_takes_about_the_weights_memory(tmp_path: Path, suffix: str, kernels: str) -> None:
    tensors = random_weights(6, 768, vocab=1024)
    path = written(tmp_path / f"model{suffix}", tensors)
    size = sum(tensor.nbytes for tensor in tensors.values())
    done = subprocess.run([sys.executable, "-c", LOAD, str(path), kernels], capture_output=True, text=True, check=True)
    opened, peak = map(int, done.stdout.split())
    assert opened < 0.25 * size, "opening maps, it does not read"
    assert peak < (1.6 if suffix == ".gguf" else 1.35) * size, "the C library may keep freed pieces of decoded numbers"


def test_more_devices_than_layers_are_refused(tmp_path: Path) -> None:
    weights = open_weights(written(tmp_path / "two-layers.pth", small()))
    with pytest.raises(ValueError, match="3 pipeline devices for a model of 2 layers"):
        Pipeline(weights, devices=("cpu",) * 3)


@pytest.mark.parametrize("name", ["cuda:٣", "٣", "cuda:" + "9" * 30, "bogus", "meta", "mps", "cuda:-1"])
def test_a_missing_device_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"device '?(cuda:)?{name}.*change --pp-devices"):
        resolve_device(name)


@pytest.mark.parametrize("number", [2, 128, 255, 256, 257, 4096])
def test_a_missing_gpu_is_not_replaced(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=rf"there is no device (cuda:)?{number}: this machine has 2 CUDA"):
        resolve_device(f"cuda:{number}")
    with pytest.raises(ValueError, match=f"there is no device {number}"):
        resolve_device(str(number))
    assert [resolve_device(name) for name in ("0", "cuda", "cuda:1")] == [torch.device("cuda", i) for i in (0, 0, 1)]


def test_a_large_file_shows_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights: Weights = open_weights(written(tmp_path / "large.pth", small()))
    Pipeline(weights, devices=("cpu",))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("rwkv_batch.model.loader.PROGRESS_FROM_BYTES", 1)
    shares: list[float] = []
    monkeypatch.setattr(load_progress, "listeners", [shares.append])
    Pipeline(weights, devices=("cpu",))
    shown = capsys.readouterr().err
    assert "loading large.pth" in shown and "2/2" in shown and shares == [0.5, 1.0]


def test_a_folded_table_equals_the_norm_of_each_row() -> None:
    weights = weights_from(random_weights(1, 64, vocab=FOLD_ROWS + 100))
    precision = Precision(torch.device("cpu"), torch.float16, torch.float16, StateFormat.FP16)
    plain = LayerLoader(weights, precision).embedding()
    assert plain.ln0 is not None and plain.table.data_ptr() == weights.tensors["emb.weight"].data_ptr()
    folded = plain.fold(torch.float16)
    assert folded.ln0 is None and folded.fold(torch.float16) is folded
    rows = plain.table.float()
    expected = torch.nn.functional.layer_norm(rows, (64,), plain.ln0.weight, plain.ln0.bias, 1e-5)
    assert torch.equal(folded.table, expected.half())
