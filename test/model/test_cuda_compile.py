"""Every CUDA source compiles: for two architectures, and by `make test-long` for all.

What compiled.json has is not compiled again: `python -m test.model.card_launches` writes it.

The compiler is nvcc from pip. The kernels have no large spills.
Every launch of a step fits the GPU: shared memory, registers, clusters and early starts, by cubins and a table of GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rwkv_batch.kernels.cuda import library as cuda_library
from sampling import rapid
from test.model import card_launches, cuda_check
from test.model.card_launches import (
    CARDS,
    CHECKED_ARCHS,
    COMPILED,
    EMULATED,
    KIB,
    LAUNCHES,
    LAUNCHING_FILES,
    Needs,
    Record,
    archs_of,
    check_compiled,
    check_launches,
    compiling,
    digest,
    emulated_digest,
    is_recorded,
    launches_digest,
    problems,
    product_sources,
    to_compile,
)

pytestmark = pytest.mark.slow

SOURCES = product_sources()


@pytest.fixture(scope="module", autouse=True)
def _begun(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start to compile all selected tests' sources at the first test.

    With one nvcc at a time, this file would end minutes after all others.
    """
    of_this_file = (item for item in request.session.items if item.path == request.path)
    parameters = (item.callspec.params for item in of_this_file if hasattr(item, "callspec"))
    selected = {one["source"] for one in parameters if "source" in one}
    with compiling(source for source in to_compile() if source in selected):
        yield


def test_there_is_a_compiler() -> None:
    """requirements-dev.txt has nvcc, so no source is left out for want of it."""
    assert cuda_check.unavailable_reason() is None


@pytest.mark.timeout(900)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_compiles(source: Path) -> None:
    if not is_recorded(source.name, digest(source)):
        check_compiled(source)


def test_a_changed_source_is_compiled(tmp_path: Path) -> None:
    """compiled.json names a source with its headers and compiler."""
    (tmp_path / "some.cuh").write_text("#pragma once\n")
    source = tmp_path / "some.cu"
    source.write_text('#include "some.cuh"\n')
    digests = {digest(source)}
    for changed in (tmp_path / "some.cuh", source):
        changed.write_text(changed.read_text() + "// changed\n")
        digests.add(digest(source))
    assert len(digests) == 3
    assert not is_recorded("some.cu", digest(source))
    assert set(json.loads(COMPILED.read_text())) <= {*(path.name for path in SOURCES), LAUNCHES, EMULATED}, (
        "one that is gone"
    )


def test_a_changed_launcher_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of launches is of the sources and of the Python side's files."""
    monkeypatch.setattr(card_launches, "sources", list)
    monkeypatch.setattr(card_launches, "ROOT", tmp_path)
    assert "rwkv_batch/kernels/cuda/shift_mix.py" in LAUNCHING_FILES
    monkeypatch.setattr(card_launches, "LAUNCHING_FILES", ("shift_mix.py",))
    digests = set()
    for number in range(2):
        (tmp_path / "shift_mix.py").write_text(f"BLOCKS = {number}\n")
        digests.add(launches_digest())
    monkeypatch.setattr(card_launches, "sources", lambda: SOURCES[:1])
    assert len(digests | {launches_digest()}) == 3


def test_changed_code_is_emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is of kernels, their Python side, headers, the emulation and its tests."""
    changed = ("native/csrc/a.cuh", "rwkv_batch/kernels/cuda/csrc/a.cu", "rwkv_batch/kernels/cuda/a.py")
    changed += ("rwkv_batch/model/a.py", "test/model/emulated/emulation.h", "demo/random_weights.py")
    digests = set()
    monkeypatch.setattr(card_launches, "ROOT", tmp_path)
    for content in ("", "1"):
        for file in changed:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(content)
            if content or file == changed[-1]:
                digests.add(emulated_digest.__wrapped__())
    assert len(digests) == len(changed) + 1


def test_every_source_belongs_to_a_library() -> None:
    """A library has its architectures: special instructions are only in the library of their architecture."""
    hopper = {f"{Path(name).name}.cu" for name in cuda_library.HOPPER_NAMES}
    others = {f"{Path(name).name}.cu" for name in cuda_library.NAMES} | {path.name for path in rapid.LIBRARY.sources}
    assert {path.name for path in SOURCES} == hopper | others
    assert len(SOURCES) == len(hopper) + len(others)
    assert {path.name for path in SOURCES if cuda_check.is_arch_specific(path)} == hopper
    assert {arch for path in SOURCES for arch in archs_of(path)} == {*CHECKED_ARCHS, "sm_90a"}


def test_a_source_is_read_for_each_architecture_it_tests(tmp_path: Path) -> None:
    (tmp_path / "plain.cuh").write_text("#pragma once\n")
    (tmp_path / "asking.cuh").write_text("#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890\n#endif\n")
    read = {}
    for name in ("plain", "asking"):
        source = tmp_path / f"{name}.cu"
        source.write_text(f'#include "programmatic_launch.cuh"\n#include "{name}.cuh"\n')
        read[name] = [cuda_check.virtual_arch(arch, source) for arch in (*cuda_check.CHECKED_ARCHS, "sm_90a")]
    assert read["plain"] == ["80", "80", "80", "90", "100", "100", "90"]
    assert read["asking"] == ["80", "80", "89", "90", "100", "100", "90"]
    source.write_text("#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n#endif\n")
    assert cuda_check.virtual_arch("sm_90a", source) == "90a"


@pytest.mark.timeout(900)
def test_every_launch_fits_the_gpu(tmp_path: Path) -> None:
    if not is_recorded(LAUNCHES, launches_digest()):
        check_launches(tmp_path)


def test_a_launch_that_exceeds_a_gpu_is_found() -> None:
    card = next(card for card in CARDS if card.arch == "sm_86")
    launch = Record(kernel=b"wkv_decode", grid=(1, 1, 1), threads=128, cluster=1)
    needs = {"wkv_decode": Needs(registers=64, static_shared=0)}
    launch.dynamic_shared = launch.raised = 96 * KIB
    assert problems(card, launch, needs) == []
    assert len(problems(card, launch, {})) == 1
    launch.dynamic_shared = launch.raised = 100 * KIB
    launch.cluster, launch.early = 2, 1
    assert len(problems(card, launch, needs)) == 3
