"""The machine's abilities, and builds: caching, sharing, errors. CUDA sources compile where nvcc is."""

from __future__ import annotations

import ctypes
import multiprocessing
from pathlib import Path

import pytest
import torch

from native import build, machine, tensors
from native.priority import cores
from test.model import cuda_check

needs_cpp = pytest.mark.skipif(
    machine.cpp_unavailable_reason() is not None, reason=str(machine.cpp_unavailable_reason())
)
needs_nvcc = pytest.mark.skipif(
    cuda_check.unavailable_reason() is not None, reason=str(cuda_check.unavailable_reason())
)

SOURCE = """
#include <omp.h>
extern "C" __attribute__((visibility("default"))) int twice(const float* in, float* out, long count) {
  #pragma omp parallel for
  for (long i = 0; i < count; ++i) out[i] = FACTOR * in[i];
  return omp_get_max_threads();
}
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> build.Library:
    monkeypatch.setenv("RWKV_BUILD_DIR", str(tmp_path / "cache"))
    source = tmp_path / "twice.cpp"
    source.write_text(SOURCE)
    return build.Library("twice", (source,), flags=("-DFACTOR=2",))


def _build_in_child(library: build.Library, paths: multiprocessing.Queue[str]) -> None:
    paths.put(str(build.build(library)))


@needs_cpp
def test_builds_loads_and_shares_the_thread_pool(library: build.Library) -> None:
    source, result = torch.arange(1000.0), torch.full((1000,), float("nan"))
    device = torch.device("cpu")
    twice = tensors.bind(build.load(library), "twice", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long)
    addresses = [tensors.pointer(tensor, "tensor", torch.float32, (None,), device) for tensor in (source, result)]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert twice(*addresses, 1000) == 3
    finally:
        torch.set_num_threads(before)
    assert torch.equal(result, 2 * source)
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(loaded) == 1


@needs_cpp
def test_an_unchanged_library_is_not_built_again(library: build.Library) -> None:
    first = build.build(library)
    written = first.stat().st_mtime_ns
    assert build.build(library) == first
    assert first.stat().st_mtime_ns == written


@needs_cpp
def test_key_follows_sources_headers_and_flags(library: build.Library, tmp_path: Path) -> None:
    keys = {build.content_key(library)}
    keys.add(build.content_key(build.Library("twice", library.sources, flags=("-DFACTOR=3",))))
    header = library.sources[0].parent / "common.h"
    header.write_text("// a header")
    library.sources[0].write_text('#include "common.h"\n' + SOURCE)
    keys.add(build.content_key(library))
    header.write_text("// changed")
    keys.add(build.content_key(library))
    library.sources[0].write_text('#include "common.h"\n' + SOURCE + "// changed")
    keys.add(build.content_key(library))
    folder = tmp_path / "given"
    folder.mkdir()
    library.sources[0].write_text('#include "far.h"\n' + SOURCE)
    for text in ("// a header", "// changed"):
        (folder / "far.h").write_text(text)
        keys.add(build.content_key(build.Library("twice", library.sources, flags=("-I", str(folder)))))
    assert len(keys) == 7


@needs_cpp
def test_a_compiler_error_is_shown(library: build.Library) -> None:
    library.sources[0].write_text("int broken( {")
    with pytest.raises(build.BuildError, match=r"(?s)cannot build twice.*broken"):
        build.build(library)


@needs_cpp
def test_concurrent_processes_build_once(library: build.Library) -> None:
    context = multiprocessing.get_context("fork")
    paths: multiprocessing.Queue[str] = context.Queue()
    children = [context.Process(target=_build_in_child, args=(library, paths)) for _ in range(3)]
    for child in children:
        child.start()
    assert len({paths.get(timeout=120) for _ in children}) == 1
    for child in children:
        child.join()
    assert len(list(build.cache_folder().glob("*.so"))) == 1


def test_cuda_without_a_gpu_is_refused_with_the_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "CUDA device" in str(machine.cuda_unavailable_reason(torch.device("cpu")))
    assert "sees no CUDA device" in str(machine.cuda_unavailable_reason(torch.device("cuda")))
    with pytest.raises(build.BuildError, match="cannot build kernels"):
        build.build(build.Library("kernels", (Path("kernels.cu"),)))


def test_pointer_errors_name_the_mismatch() -> None:
    device = torch.device("cpu")
    tensor = torch.zeros(2, 3)
    assert tensors.pointer(tensor, "x", torch.float32, (None, 3), device) == tensor.data_ptr()
    with pytest.raises(TypeError, match=r"x: must be torch.float16, not torch.float32"):
        tensors.pointer(tensor, "x", torch.float16, (2, 3), device)
    with pytest.raises(ValueError, match=r"x: must have shape \(2, 4\), not \(2, 3\)"):
        tensors.pointer(tensor, "x", torch.float32, (2, 4), device)
    with pytest.raises(ValueError, match="x: must be contiguous"):
        tensors.pointer(tensor.t(), "x", torch.float32, (3, 2), device)
    with pytest.raises(ValueError, match="x: must be on device cuda"):
        tensors.pointer(tensor, "x", torch.float32, (2, 3), torch.device("cuda"))


def test_cores_are_counted() -> None:
    assert cores() >= 1


@needs_nvcc
def test_a_cuda_error_is_found(tmp_path: Path) -> None:
    (tmp_path / "good.cu").write_text("__global__ void fill(float* out) { out[threadIdx.x] = 1.0f; }")
    (tmp_path / "bad.cu").write_text("__global__ void fill(float* out) { undeclared(); }")
    good = cuda_check.compile_source(tmp_path / "good.cu", ["sm_90"])
    assert good and all(compiled.ok for compiled in good.values())
    bad = cuda_check.compile_source(tmp_path / "bad.cu", ["sm_90"])
    assert bad and all(not compiled.ok and "undeclared" in compiled.output for compiled in bad.values())
