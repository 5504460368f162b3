"""The CPU libraries of the wheel for aarch64 compute what this machine's compute. QEMU runs them."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from native import build
from native.instruction_sets import INSTRUCTION_SETS
from requirements import prebuild

ARM = prebuild.compiler("aarch64")
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
EMULATOR = (QEMU or "", "-L", "/usr/aarch64-linux-gnu")
DRIVER = Path(__file__).with_name("arm_products.cpp")
LIBRARIES = (prebuild.KERNELS, prebuild.SAMPLER)


@pytest.mark.skipif(
    platform.machine() != "x86_64" or ARM is None or QEMU is None,
    reason="needs an x86-64 machine with g++-aarch64-linux-gnu and qemu-user-static of Debian",
)
def test_products_and_tokens_are_the_same_on_aarch64(tmp_path: Path) -> None:
    assert ARM is not None
    (neon,) = INSTRUCTION_SETS["aarch64"]
    found = []
    for cxx, prefix, files in (
        ("g++", (), [build.build(one) for one in LIBRARIES]),
        (ARM, EMULATOR, [prebuild.compile_library(one, neon, ARM, tmp_path) for one in LIBRARIES]),
    ):
        driver = str(tmp_path / "driver")
        flags = ["-std=c++17", "-fopenmp", *build.INCLUDES, f"-I{prebuild.KERNELS.sources[0].parent}"]
        links = [str(DRIVER), *map(str, files), *(f"-Wl,-rpath,{one.parent}" for one in files)]
        subprocess.run([cxx, *flags, *links, "-o", driver], check=True)
        ran = subprocess.run([*prefix, driver], stdout=subprocess.PIPE, check=True, timeout=60)
        found.append(np.array(ran.stdout.split(), dtype=np.float64))
    ours, arm = found
    tokens = slice(-64, None)
    assert np.array_equal(ours[tokens], arm[tokens]) and len(set(ours[tokens])) > 16
    # bf16 splits x into three numbers
    np.testing.assert_allclose(arm[:-64], ours[:-64], rtol=1e-5, atol=1e-4)
