"""The CUDA sources as a library for the CPU: PTX in functions of their own is replaced by what it does."""

from __future__ import annotations

import atexit
import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from native.build import SHARED_HEADERS
from rwkv_batch.kernels.cuda.hopper_gemm import HopperWorkspace
from rwkv_batch.kernels.cuda.library import HOPPER_SIGNATURES, SIGNATURES, SOURCES
from test.model import cuda_check

HERE = Path(__file__).parent
needs_headers = pytest.mark.skipif(cuda_check.unavailable_reason() is not None, reason="no CUDA headers")
BODIES = {
    "smem_address": "return emulation::address(p);",
    "current_device": "return 0;",
    "launch_result": "return 0;",
    "reciprocal": "return 1.0f / x;",
    "fast_exp": "return std::exp(x);",
    "mbarrier_init": ("emulation::barriers[barrier] = {static_cast<int>(arrivals), static_cast<int>(arrivals), 0, 0};"),
    "fence_mbarrier_init": "",
    "acquire_at_least": "while (*at < count) emulation::yield();",
    "release_increment": "++*at;",
    "throttle": "",
    "fence_proxy_async": "",
    "sync_warpgroups": "emulation::sync_warpgroups();",
    "mbarrier_expect_tx": "emulation::arrive(barrier, bytes);",
    "arrive": "emulation::arrive(barrier);",
    "mbarrier_wait": "emulation::mbarrier_wait(barrier, parity);",
    "elect_one": "return emulation::running % 32 == 0;",
    "tma_load": "emulation::tma_load(to, map, inner, outer, plane, barrier);",
    "prefetch_l2": "",
    "cluster_arrive": "",
    "cluster_wait": "",
    "store_remote": "",
    "launch_clusters": "emulation::launch_clusters(kernel, size, grid, threads, smem_bytes, args...);",
    "bulk_load": "emulation::bulk_load(to, from, bytes, barrier);",
    "smem_descriptor": "return address >> 4;",
    "wgmma_fence": "",
    "wgmma_commit": "",
    "wgmma_wait": "",
    "ld_shared_u16": "return emulation::shared<uint16_t>(at);",
    "ld_shared_u32": "return emulation::shared<uint32_t>(at);",
    "ld_shared_u128": "return emulation::shared<uint4>(at);",
    "st_shared": "std::memcpy(emulation::dynamic_shared.data() + at, &v, sizeof v);",
    "store_vector": "store16(p, v);",
    "store_evict_first": "store16(p, v);",
    "ld_global_ca": "return *p;",
    "st_global": "*static_cast<uint4*>(at) = v;",
    "stmatrix_transposed": "emulation::stmatrix_transposed(to, {low, high});",
    "stmatrix_x4_transposed": "emulation::stmatrix_transposed(to, {a, b, c, d});",
    "peer_address": "return emulation::peer_address(address, rank);",
    "arrive_peer": "",
    "arrive_cluster": "emulation::arrive_cluster();",
    "wait_cluster": "emulation::wait_cluster();",
    "sync": "emulation::arrive_cluster(); emulation::wait_cluster();",
    "peer_pointer": "return emulation::peer_pointer(p, rank);",
    "tma_multicast": "",
    "store_peer": "emulation::store_words(to, {a, b, c, d});",
    "meet_ctas": "emulation::meet_blocks(counter, SPLITS);",
    "sync_consumers": "emulation::sync_warpgroups();",
    "load_shared_pair": "std::memcpy(v, emulation::dynamic_shared.data() + at, 8);",
    "load_shared_int4": "return emulation::shared<int4>(at);",
    "store_global_int4": "*static_cast<int4*>(to) = v;",
    "load_pairs": "emulation::load_pairs(pairs, at);",
    "encode_tiled": "return emulation::encode;",
    "load_stream": "return *static_cast<const uint4*>(p);",
    "mma": "emulation::multiply(c, a.x[0], a.x[1], a.x[2], a.x[3], b0, b1);",
    "device_info": (
        "static DeviceInfo m; m = {emulation::num_sms, emulation::smem_bytes, 228 << 10, 1024, true}; return m;"
    ),
    "ldmatrix_x2_transposed": (
        "const int t = emulation::running & 3, g = emulation::running / 4 & 7; "
        "const auto of = [&](int i) { return uint32_t(emulation::shared<uint16_t>("
        "__shfl_sync(FULL_MASK, emulation::address(row), i) + 2 * g)); }; "
        "const uint32_t x[4] = {of(2 * t), of(2 * t + 1), of(2 * t + 8), of(2 * t + 9)}; "
        "return make_uint2(x[0] | x[1] << 16, x[2] | x[3] << 16);"
    ),
    "load_matrix": "Fragment f; emulation::load_matrices<TRANSPOSED>(f.x, row); return f;",
    "barrier_sync": "emulation::meet_named(barrier, threads);",
    "barrier_arrive": "emulation::arrive_named(barrier, threads);",
    "exp2_fast": "return std::exp2(x);",
    "rsqrt_fast": "return 1.0f / std::sqrt(x);",
    "pack2_saturated": "return pack2(std::clamp(lo, -65504.0f, 65504.0f), std::clamp(hi, -65504.0f, 65504.0f));",
    "mma_k8": "emulation::multiply(c, a0, a1, 0, 0, b, 0);",
    "mma_s8": "emulation::multiply_codes<int8_t>(c, a.x, a.y, a.z, a.w, b0, b1);",
    "mma_s8_u8": "emulation::multiply_codes<uint8_t>(c, a.x, a.y, a.z, a.w, b0, b1);",
    "max_or_nan": "return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b);",
    "rounded_int": "return emulation::saturated(x, -2147483648.0f, 2147483520.0f);",
    "pack_s8": "return emulation::packed({a, b, c, d}, -128.0f, 127.0f);",
    "pack_u8": "return emulation::packed({a, b, c, d}, 0.0f, 255.0f);",
    "load_head": (
        "if (lane == 0) { std::memcpy(to, from, BYTES); ++emulation::barriers[emulation::address(arrived)].phase; }"
    ),
    "store_head": "__syncwarp(); if (lane == 0) std::memcpy(to, from, BYTES);",
    "wait_stored": "",
    "init_arrival": "emulation::barriers[emulation::address(arrived)] = {};",
    "wait_loaded": "emulation::mbarrier_wait(emulation::address(arrived), parity);",
    "launch_with_carveout": "emulation::launch(kernel, grid, threads, smem_bytes, args...);",
    "load_exchanged": "emulation::yield(); return load16(p);",
    "store_exchanged": "*reinterpret_cast<uint32_t*>(p) = word;",
    "load_key": "emulation::yield(); return *p;",
    "store_key": "*p = key;",
    "prefetch_bytes": "",
    "launch_cooperative": "emulation::launch_clusters(kernel, grid, dim3(grid), threads, smem_bytes, args);",
    "launch_streaming": "emulation::launch(kernel, grid, threads, 0, args...);",
}
"""Function -> what its body becomes."""


REGISTER_PRODUCT = (
    """
template <int N, bool TRANSPOSED>
void wgmma_fp16(float (&sums)[N / 2], uint64_t a, uint64_t b, int add) {
  static_assert(!TRANSPOSED, "not emulated");
  emulation::multiply_shared<N, emulation::WORDS>(sums, a << 4, b << 4, add);
}
"""
    """
template <int N>
void wgmma_fp8(float (&sums)[N / 2], uint64_t a, uint64_t b, int add) {
  emulation::multiply_shared<N, emulation::CODES>(sums, a << 4, b << 4, add);
}
"""
    """
template <int N>
void wgmma_two_part(float (&sums)[N / 2], uint64_t a, uint64_t b, int add) {
  emulation::multiply_shared<N, emulation::CODES, emulation::PARTS>(sums, a << 4, b << 4, add);
}
"""
    """
template <int N, bool PARTS>
void wgmma_rs(float (&sums)[N / 2], const uint32_t (&a)[4], uint64_t b, int add) {
  emulation::multiply_code_rows<N, PARTS ? __NV_E5M2 : __NV_E4M3>(sums, a, b << 4, add);
}
"""
    """
template <int N>
void wgmma_u8s8(int (&sums)[N / 2], uint32_t a, uint32_t b, int add) {
  emulation::multiply_bytes<N, uint8_t, int8_t>(sums, a << 4, b << 4, add);
}
"""
    """
template <int N>
void wgmma_u8s8(int (&sums)[N / 2], const uint32_t (&a)[4], uint32_t b, int add) {
  emulation::multiply_byte_rows<N>(sums, a, b << 4, add);
}
"""
    """
template <int N>
void wgmma_rs(float (&sums)[N / 2], const uint32_t (&a)[4], uint64_t b, int add) {
  emulation::multiply_rows<N>(sums, a, b << 4, add);
}
"""
)


INT8_PRODUCT = """
template <int N, bool UNSIGNED>
struct WgmmaInt8 {
  static void multiply(int* sums, uint64_t a, uint64_t b, int add) {
    emulation::multiply_bytes<N, int8_t, std::conditional_t<UNSIGNED, uint8_t, int8_t>>(sums, a << 4, b << 4, add);
  }
};
"""


NOT_OPTIMISED = ("shift_mix", "quantise", "skinny", "skinny_quant", "weight_only_fp8", "weight_only_int4")
"""Sources that take a compiler longer to optimise than their tests to run without it."""


def emulated(
    source: str,
    folder: Path,
    tiles: tuple[int, ...] = (),
    splits: tuple[int, ...] = (1, 2, 4),
    others: tuple[str, ...] = (),
) -> ctypes.CDLL:
    """A source of csrc/ by name, and `others`, compiled for the CPU. Its launchers run their kernels to the end.

    `tiles`, `splits`: rows of a tile, and blocks that share its k, of the launches that a test plans; others are
    refused. Without them all of a launcher's are compiled, of which there may be 46.
    """
    for path in [*SOURCES.rglob("*.cu*"), *SHARED_HEADERS.iterdir()]:
        (folder / path.name).write_text(_without_plans(_without_ptx(path), tiles, splits))
    out = folder / f"{source}.so"
    level = "-O0" if source in NOT_OPTIMISED else "-O1"
    command = [*_compiler(), level, "-shared", "-include", str(_header(level))]
    files = [str(folder / f"{name}.cu") for name in (source, *others)]
    command += ["-x", "c++", *files, "-o", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(out))


def emulation_of(source: str, tiles: tuple[int, ...] = (), splits: tuple[int, ...] = (1, 2, 4)) -> Any:
    """Return a fixture: the library of `emulated`, compiled once for a module's tests."""

    @pytest.fixture(scope="module")
    def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
        return emulated(source, tmp_path_factory.mktemp("emulated"), tiles, splits)

    return compiled


def _compiler() -> list[str]:
    fortify = "-U_FORTIFY_SOURCE"  # it allows no longjmp to another stack
    own = "-fno-gnu-unique"  # else libraries share static variables of templates with the first one
    return ["g++", "-std=c++17", "-w", "-fPIC", fortify, own, "-D__CUDA_ARCH_FEAT_SM90_ALL", "-I", _cuda_include()]


@functools.cache
def _header(level: str) -> Path:
    """Return emulation.h in a folder with its compiled form: else each source takes seconds for CUDA's headers."""
    folder = Path(tempfile.mkdtemp(prefix="emulation-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header = Path(shutil.copy(HERE / "emulation.h", folder))
    command = [*_compiler(), level, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
    subprocess.run(command, check=True, capture_output=True)
    return header


def call(library: ctypes.CDLL, name: str, *args: object) -> None:
    function = library[name]
    function.argtypes = (SIGNATURES | HOPPER_SIGNATURES)[name]
    assert function(*args, None) == 0, f"{name} is refused"


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def send_launches_to(
    library_of: Callable[[str], ctypes.CDLL], monkeypatch: pytest.MonkeyPatch, *modules: Any
) -> HopperWorkspace:
    """Let the modules' launches go to the emulation, with a workspace on the CPU, which is returned.

    library_of: returns a launcher's library
    """

    class Kernels:
        def call(self, name: str, *args: object) -> None:
            call(library_of(name), name, *args)

    work = HopperWorkspace(torch.empty(132, 1), torch.zeros(132, 2, dtype=torch.int32))
    replaced = {
        "library": Kernels,
        "hopper_library": Kernels,
        "cuda_pointer": lambda tensor, dtype=None: None if tensor is None else tensor.data_ptr(),
        "slots_pointer": lambda slots, dtypes: slots.data_ptr(),
        "prepare_hopper_gemm": lambda device: work,
    }
    for module in modules:
        for name in replaced.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, replaced[name])
    return work


def _without_plans(text: str, tiles: tuple[int, ...], splits: tuple[int, ...]) -> str:
    """Removes launches of other plans from a source (gemm/gemm_launch.cuh); keeps all if `tiles` is empty."""

    def kept(found: re.Match[str]) -> str:
        known = (size for size in found[1].split(", ") if int(size) in tiles)
        return f"dispatch_tile<{', '.join(known)}>"

    if tiles:
        text = re.sub(r"dispatch_tile<([\d, ]+)>", kept, text)
        text = re.sub(r"^    W8A8_(?:CLUSTER|MEMORY|TILE)\(.*", "", text, flags=re.MULTILINE)
        text = re.sub(
            r"^    W8A8_ROWS\((\d+).*", lambda f: f[0] if int(f[1]) in tiles else "", text, flags=re.MULTILINE
        )
    return re.sub(r"case (\d): code = launch\(.*", lambda found: found[0] if int(found[1]) in splits else "", text)


@functools.cache
def _without_ptx(path: Path) -> str:
    text = re.sub(r'#include "[\w./]*/', '#include "', path.read_text())
    for name, body in BODIES.items():
        for found in reversed(list(re.finditer(rf"^[^\n=();]* &?{name}\([^;{{}}]*\) {{", text, re.MULTILINE))):
            text = text[: found.end()] + f" {body} " + text[_end_of_block(text, found.end()) :]
    text = re.sub(r"template <int N, bool TRANSPOSED>\n__device__[^;]*;", "", text)
    text = re.sub(r"#define HOPPER_WGMMA_FP16_RS\(.*?\n\n", REGISTER_PRODUCT, text, flags=re.DOTALL)
    text = re.sub(r"^HOPPER_WGMMA_\w+\((?!N,).*?\)\)\n", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(
        r"template <int N, bool UNSIGNED>\nstruct WgmmaInt8;.*(?=}  // namespace)", INT8_PRODUCT, text, flags=re.DOTALL
    )
    text = re.sub(r'asm volatile\("(setmaxnreg|bar.sync)[^"]*"[^;]*;', "", text)
    text = re.sub(r'asm volatile\("" : "\+[fr]"[^;]*;', ";", text)
    text = text.replace("#include <cuda_pipeline.h>", "")
    # Of clusters, which no test launches.
    text = re.sub(r"(config\.(gridDim|blockDim) =|cudaLaunchKernelEx\(&config, kernel, p,)[^;]*;", ";", text)
    text = re.sub(r"extern __shared__ [^;]*\bdynamic\[\];", "auto* dynamic = emulation::block_shared();", text)
    return re.sub(r"cudaFuncSetAttribute\([^;]*\);", "cudaSuccess;", text)


def _end_of_block(text: str, at: int) -> int:
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at - 1


def _cuda_include() -> str:
    from native import machine

    nvcc = machine.nvcc()
    assert nvcc is not None
    return str(Path(nvcc).resolve().parents[1] / "include")
