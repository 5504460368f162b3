"""Every launcher of the CUDA sources on made-up cards: what it would launch, and whether the card could run it.

`python -m test.model.card_launches` compiles changed sources, checks launches, runs the emulated kernels' tests and
writes compiled.json.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import byref, c_int
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from native import machine
from native.build import CUDA_FLAGS, INCLUDES
from native.nvcc import libraries_of
from native.priority import cores
from rwkv_batch.kernels.cuda.channel_mix import SPARSE_FEW_COLUMNS
from rwkv_batch.kernels.cuda.hopper_quantised_launch import MAX_TWO_PART_ROWS
from rwkv_batch.kernels.cuda.library import (
    HOPPER_NAMES,
    SIGNATURES,
    LowRankUpArgs,
    QuantLaunchArgs,
    ShiftMixArgs,
    SkinnyLaunchArgs,
    WkvArgs,
)
from rwkv_batch.kernels.cuda.packed_weights import INPUT_STEP, NUMBERS
from rwkv_batch.kernels.cuda.quantised_rows import SKINNY_ROWS
from rwkv_batch.kernels.cuda.shift_mix import MAX_WIDTH, SHIFT_BLOCKS, TOKEN_CHANNELS, TOKEN_CTAS
from rwkv_batch.kernels.cuda.skinny_quant import MAX_MIXED_GEMM_ROWS
from rwkv_batch.kernels.cuda.w8a8.arguments import W8A8Args, W8A8QuantiseArgs, W8A8SparseArgs
from rwkv_batch.kernels.cuda.w8a8.products import SPARSE_COLUMNS
from rwkv_batch.model.quant.formats import Format
from sampling import rapid
from test.conftest import IS_LONG
from test.model import cuda_check
from test.model.cuda_check import Compiled

ROOT = Path(__file__).parents[2]
CHECKED_ARCHS = cuda_check.CHECKED_ARCHS if IS_LONG else ("sm_86", "sm_90")
"""The least shared memory, and the newest code of a common front end. `make test-long` compiles for all."""
HOPPER_STEMS = {Path(name).name for name in HOPPER_NAMES}
COMPILED = Path(__file__).with_name("compiled.json")
"""Source -> digest of what compiled without large spills; LAUNCHES -> digest of the launches that fit.

EMULATED -> digest of all that the tests of emulated kernels run, with which they passed. Compiling all takes minutes.
"""
LAUNCHES = "launches"
EMULATED = "emulated"
EMULATED_SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".hpp", ".inc", ".json", ".py")
LAUNCHING_FILES = (
    "sampling/rapid.py",
    *(f"{name.replace('.', '/')}.py" for name in re.findall(r"(?m)^from (rwkv_batch\S+)", Path(__file__).read_text())),
)
"""Where the arguments of launches come from: what this module imports."""
WIDTHS = (768, 1024, 1536, 2048, 2560, 3072, 4096)
MAX_SPILL_BYTES = 192
SOMEWHERE = 1 << 20
VOCAB = 65536
KIB = 1024


@dataclass(frozen=True)
class Card:
    """Limits of a GPU, from NVIDIA's table of compute capabilities."""

    name: str
    arch: str
    num_sms: int
    shared_of_block: int
    shared_of_processor: int
    registers: int = 65536
    kept: int = KIB

    @property
    def major(self) -> int:
        """Of the compute capability."""
        return int(self.arch.removeprefix("sm_")) // 10


ALL_CARDS = (
    Card("A100", "sm_80", 108, 163 * KIB, 164 * KIB),
    Card("RTX 3060", "sm_86", 28, 99 * KIB, 100 * KIB),
    Card("RTX 3090", "sm_86", 82, 99 * KIB, 100 * KIB),
    Card("RTX 4060", "sm_89", 24, 99 * KIB, 100 * KIB),
    Card("RTX 4090", "sm_89", 128, 99 * KIB, 100 * KIB),
    Card("H200", "sm_90", 132, 227 * KIB, 228 * KIB),
    Card("B200", "sm_100", 148, 227 * KIB, 228 * KIB),
    Card("RTX 5090", "sm_120", 170, 99 * KIB, 100 * KIB),
)
CARDS = tuple(card for card in ALL_CARDS if card.arch in CHECKED_ARCHS)


class Record(ctypes.Structure):
    """Mirrors fake_runtime.h: one launch."""

    _fields_ = [
        ("kernel", ctypes.c_char * 512),
        ("grid", c_int * 3),
        *[(name, c_int) for name in ("threads", "dynamic_shared", "raised", "cluster", "early")],
    ]


@dataclass(frozen=True)
class Needs:
    """Of a kernel, from its cubin."""

    registers: int
    static_shared: int


_begun: dict[Path, list[Future[list[Compiled]]]] = {}
"""What `compiling` has begun of a source."""


@contextmanager
def compiling(sources: Iterable[Path]) -> Iterator[None]:
    """Compile the sources from now on, in this order.

    With n cores, n + 1 runs of nvcc are active. Each source alone would leave cores idle at its end, and most of those
    for Hopper are a single run. Pytest's other workers want the cores too: with fewer runs this would be the last file
    to end.
    """
    with ThreadPoolExecutor(cores() + 1) as pool:
        _begun.update({source: cuda_check.begin(source, archs_of(source), pool) for source in sources})
        try:
            yield
        finally:
            pool.shutdown(cancel_futures=True)
            _begun.clear()


@functools.cache
def compiled(source: Path) -> dict[str, Compiled]:
    """A source by architecture; compiled once for all tests of this process."""
    if source in _begun:
        return cuda_check.results_of(_begun[source])
    return cuda_check.compile_source(source, archs_of(source))


def archs_of(source: Path) -> tuple[str, ...]:
    """Returns a source's architectures: sm_90a for the Hopper library, otherwise CHECKED_ARCHS."""
    return ("sm_90a",) if source.stem in HOPPER_STEMS else CHECKED_ARCHS


def product_sources() -> list[Path]:
    """The CUDA sources of the product: those of test/ and bench/ are left out."""
    return [path for path in cuda_check.cuda_sources(ROOT) if path.relative_to(ROOT).parts[0] not in ("test", "bench")]


def sources() -> list[Path]:
    """The sources whose launchers are called: all but those for Hopper alone, which size themselves when compiled."""
    return [path for path in product_sources() if path.stem not in HOPPER_STEMS]


@functools.cache
def needs(arch: str) -> dict[str, Needs]:
    """Mangled name of a kernel -> what it needs."""
    found = {}
    for source in sources():
        for part in compiled(source)[arch].output.split("Compiling entry function '")[1:]:
            used = re.search(r"Used (\d+) registers", part)
            shared = re.search(r"(\d+) bytes smem", part)
            assert used is not None, part
            found[part.partition("'")[0]] = Needs(int(used.group(1)), int(shared.group(1)) if shared else 0)
    return found


def digest(source: Path) -> str:
    """Of a source, its headers, the flags and the compiler."""
    compiler = machine.version_of(machine.nvcc() or "nvcc")
    return hashlib.sha256(
        "\0".join([cuda_check.with_headers(source), *cuda_check.FLAGS, compiler]).encode()
    ).hexdigest()


def launches_digest() -> str:
    """Of everything that decides what is launched, and what the kernels need."""
    here = Path(__file__)
    files = (*(ROOT / name for name in LAUNCHING_FILES), *sorted(here.parent.glob("fake_runtime.*")), here)
    texts = [path.read_bytes() for path in files]
    return hashlib.sha256(b"\0".join([*(digest(path).encode() for path in sources()), *texts])).hexdigest()


@functools.cache
def emulated_digest() -> str:
    """Of the kernels, their Python side, the emulation, and its tests."""
    folders = ("native/csrc", "rwkv_batch/kernels", "rwkv_batch/model", "test/model/emulated")
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in EMULATED_SUFFIXES)
    files = sorted([*found, *Path(__file__).parent.glob("*_emulated.py"), ROOT / "demo/random_weights.py"])
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def is_recorded(name: str, current: str) -> bool:
    """Whether compiled.json has this digest; `make test-long` ignores the file."""
    return not IS_LONG and json.loads(COMPILED.read_text()).get(name) == current


def to_compile() -> list[Path]:
    """The sources that compiled.json does not have as they are."""
    return [path for path in product_sources() if not is_recorded(path.name, digest(path))]


def check_compiled(source: Path) -> None:
    """AssertionError if a source does not compile for its architectures, or a kernel has large spills."""
    results = compiled(source)
    assert set(results) == set(archs_of(source))
    for result in results.values():
        assert result.ok, result.output
        spills = [int(size) for size in re.findall(r"(\d+) bytes spill stores", result.output)]
        assert max(spills, default=0) <= MAX_SPILL_BYTES, result.output


def check_launches(folder: Path) -> None:
    """AssertionError if a card could not run a launch of a step."""
    library = build_library(folder)
    for number, card in enumerate(CARDS):
        launcher = Launcher(library, number, card)
        met: set[str] = set()
        for width, rows in product(WIDTHS, [*range(1, 33), *range(33, 1025, 31), 1024]):
            for launch in launcher.step(width, rows):
                met.add(launch.kernel.decode())
                assert problems(card, launch, needs(card.arch)) == [], f"width {width}, {rows} rows"
        assert len(met) > 30


def emulated_tests_pass() -> bool:
    tests = [str(path) for path in sorted(Path(__file__).parent.glob("*_emulated.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *tests]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main() -> int:
    """Record what compiles, fits and passes. Returns 1 if something does not; the record is without it."""
    changed, failed = to_compile(), False
    known = {path.name: digest(path) for path in product_sources() if path not in changed}
    checks = {LAUNCHES: launches_digest(), EMULATED: emulated_digest()}
    known |= {name: current for name, current in checks.items() if is_recorded(name, current)}
    with compiling(changed), tempfile.TemporaryDirectory() as folder:
        for source in changed:
            print(f"compiling {source.name}", flush=True)
            try:
                check_compiled(source)
            except AssertionError as error:
                print(error, flush=True)
                failed = True
            else:
                known[source.name] = digest(source)
        _record(known)
        if LAUNCHES not in known:
            check_launches(Path(folder))
            known[LAUNCHES] = checks[LAUNCHES]
            _record(known)
    if EMULATED not in known:
        if emulated_tests_pass():
            known[EMULATED] = checks[EMULATED]
            _record(known)
        else:
            failed = True
    return int(failed)


def _record(known: dict[str, str]) -> None:
    COMPILED.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def build_library(folder: Path) -> ctypes.CDLL:
    """The sources as a library whose runtime is a fake; its kernels are never run."""
    nvcc = machine.nvcc()
    assert nvcc is not None
    here = Path(__file__).parent
    flags = [
        flag.replace("-fvisibility=hidden", "-fvisibility=default")
        for flag in CUDA_FLAGS
        if flag not in ("-lineinfo", "-O3")
    ]
    flags.append("-w")  # the fake's macros use fewer arguments than they are given
    # So that a kernel's stub has the kernel's name in the library.
    flags += ["-static-global-template-stub=false", "-device-entity-has-hidden-visibility=false"]
    # Of the kernels it holds nothing: only the launchers run, and not for long.
    flags += ["-O0", "-fdevice-syntax-only", "-gencode=arch=compute_80,code=compute_80"]
    flags += [*INCLUDES, "-include", str(here / "fake_runtime.h")]

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        subprocess.run([nvcc, *flags, "-c", str(source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(cores()) as pool:
        objects = list(pool.map(compile_one, [*sources(), here / "fake_runtime.cu"]))
    places = [f"-L{place}" for place in libraries_of(nvcc)]
    subprocess.run([nvcc, "-shared", *objects, *places, "-o", str(folder / "launches.so")], check=True)
    return ctypes.CDLL(str(folder / "launches.so"))


class Launcher:
    """Calls the launchers as the Python side does, on one card."""

    def __init__(self, library: ctypes.CDLL, number: int, card: Card) -> None:
        self._library, self._card = library, card
        self._records = (Record * 64)()
        library.fake_card(number, card.major, card.num_sms, card.shared_of_block, card.shared_of_processor, card.kept)
        for kernel, need in needs(card.arch).items():
            library.fake_static_shared(kernel.encode(), need.static_shared)

    def call(self, name: str, *args: object) -> list[Record]:
        """What a launcher launches. AssertionError if it is refused."""
        function = self._library[name]
        function.argtypes = SIGNATURES[name]
        code = function(*args, None)
        return self._taken(name, code)

    def _taken(self, name: str, code: int) -> list[Record]:
        assert code == 0, f"{name} is refused on {self._card.name}: error {code}"
        count = self._library.fake_take(self._records, len(self._records))
        return [Record.from_buffer_copy(record) for record in self._records[:count]]

    def sample(self, rows: int) -> list[Record]:
        """The sampler's launch."""
        assert self._library.rapid_prepare(VOCAB) == 0, f"the sampler is refused on {self._card.name}"
        launch = rapid.Launch(rows=rows, vocab=VOCAB, max_rows=1024, capacity=1024)
        early = self._card.major >= 9
        return self._taken("rapid", self._library.rapid_sample(byref(launch), self._card.num_sms, early, None))

    def step(self, width: int, rows: int) -> Iterator[Record]:
        """Every launch of a step of `rows` rows: decoding, and reading prompts of several lengths."""
        yield from self._shift(width, rows, rows, ragged=False)
        for item in (1, 2, 4):
            yield from self.call("rwkv_wkv_decode", byref(WkvArgs(rows=rows, heads=width // 64)), item)
        for tokens in (rows, 3 * rows, 64 * rows):
            yield from self._shift(width, rows, tokens, ragged=True)
            for item in (1, 2, 4):
                yield from self.call("rwkv_wkv_chunk", byref(WkvArgs(rows=rows, heads=width // 64)), item, tokens)
                yield from self.call("rwkv_wkv_sequence", byref(WkvArgs(rows=rows, heads=width // 64)), item)
            yield from self.call("rwkv_relu_square", SOMEWHERE, 4 * width * tokens)
            yield from self.call("rwkv_low_rank_act", SOMEWHERE, 64 * tokens, SOMEWHERE, 128 * tokens)
            for inputs in (width, 4 * width):
                yield from self.call("rwkv_quantise_rows", *[SOMEWHERE] * 3, tokens, inputs, 1)
                quantise = W8A8QuantiseArgs(count=3, rows=tokens, k=inputs, relu_squared=inputs > width)
                for quantise.order[0], quantise.is_two_byte in product((None, SOMEWHERE), (False, True)):
                    yield from self.call("rwkv_w8a8_quantise", byref(quantise))
                w8a8 = W8A8Args(count=1, rows=tokens, k=inputs, is_unsigned=inputs > width)
                w8a8.gemms[0].n = 5 * width - inputs
                yield from self.call("rwkv_w8a8_mma", byref(w8a8))
        yield from self.call("rwkv_norm_rows", *[SOMEWHERE] * 5, rows, width)
        yield from self.sample(rows)
        if rows <= 16:
            yield from self._few(width, rows)

    def _few(self, width: int, rows: int) -> Iterator[Record]:
        for outputs, inputs in ((width, width), (4 * width, width), (width, 4 * width), (VOCAB, width)):
            skinny = SkinnyLaunchArgs(count=1, rows=rows)
            skinny.gemms[0].n, skinny.gemms[0].k, skinny.gemms[0].warps_k = outputs, inputs, 8
            yield from self.call("rwkv_skinny", byref(skinny))
            for format_, number in NUMBERS.items():
                yield from self.call("rwkv_dequantise", *[SOMEWHERE] * 3, number, 0, outputs, inputs)
                if rows > SKINNY_ROWS[format_] or inputs % INPUT_STEP[format_]:
                    continue
                quant = QuantLaunchArgs(count=1, rows=rows, format=number)
                for item in quant.gemms[:2]:
                    item.scales, item.n, item.k, item.warps_k = SOMEWHERE, outputs, inputs, 4
                yield from self._quantised(quant, rows == 1 and inputs <= MAX_WIDTH and format_ is not Format.INT4)
                if rows <= MAX_MIXED_GEMM_ROWS:
                    quant.count, quant.gemms[1].scales = 2, None
                    yield from self._quantised(quant, rows == 1 and inputs <= MAX_WIDTH and format_ is not Format.INT4)
        if rows <= 8:
            up_weights = LowRankUpArgs(groups=3, rank=128, gate_rank=512)
            for item in (1, 2, 4) if rows <= 4 else (2, 4):
                yield from self.call(
                    "rwkv_wkv_few", byref(WkvArgs(rows=rows, heads=width // 64)), byref(up_weights), item
                )
            yield from self.call("rwkv_sparse_value", *[SOMEWHERE] * 5, rows, width, 4 * width)
            yield from self.call("rwkv_add_exact_sums", *[SOMEWHERE] * 5, rows, width)
            sparse = W8A8SparseArgs(rows=rows, width=width, ffn=4 * width)
            if width % SPARSE_COLUMNS == 0:
                yield from self.call("rwkv_w8a8_sparse_row" if rows == 1 else "rwkv_w8a8_sparse", byref(sparse))
            for format_, number in NUMBERS.items():
                if rows == 1:
                    yield from self.call("rwkv_sparse_row_quant", *[SOMEWHERE] * 4, number, width, 4 * width)
                else:
                    yield from self.call("rwkv_sparse_value_quant", *[SOMEWHERE] * 4, number, rows, width, 4 * width)
                if format_ is not Format.INT4 and width % SPARSE_FEW_COLUMNS == 0:
                    yield from self.call("rwkv_sparse_few_quant", *[SOMEWHERE] * 4, number, rows, width, 4 * width)

    def _quantised(self, args: QuantLaunchArgs, mixes: bool) -> Iterator[Record]:
        args.norm.x = None
        yield from self.call("rwkv_skinny_quant", byref(args))
        if mixes:
            args.norm.x = SOMEWHERE
            yield from self.call("rwkv_skinny_quant", byref(args))

    def _shift(self, width: int, rows: int, tokens: int, ragged: bool) -> Iterator[Record]:
        halves, parts, codes = (None, None), (SOMEWHERE, None), (SOMEWHERE, SOMEWHERE)
        for mixes, (codes_at, scales) in product((1, 6), (halves, parts, codes)):
            args = ShiftMixArgs(
                tokens=tokens, width=width, mixes=mixes, quantised=codes_at, scales=scales, token_ctas=1
            )
            args.tokens_per_cta = -(-tokens // (SHIFT_BLOCKS * self._card.num_sms))
            args.cu_seqlens = SOMEWHERE if ragged else None
            yield from self.call("rwkv_shift_mix", byref(args), rows)
            if codes_at is not None and scales is None:
                args.order[0] = SOMEWHERE  # w8a8
                yield from self.call("rwkv_shift_mix", byref(args), rows)
                args.order[0] = None
            if ragged or scales is not None or rows > MAX_TWO_PART_ROWS:
                continue
            args.partials, args.num_splits = SOMEWHERE, 4
            yield from self.call("rwkv_shift_mix", byref(args), rows)
            if codes_at is not None and self._card.major >= 9 and width % (TOKEN_CTAS * TOKEN_CHANNELS) == 0:
                args.token_ctas = TOKEN_CTAS
                yield from self.call("rwkv_shift_mix", byref(args), rows)


def problems(card: Card, launch: Record, needs_of: dict[str, Needs]) -> list[str]:
    """What of a launch the card could not run, with the needs of its architecture's kernels."""
    kernel = launch.kernel.decode()
    need = needs_of.get(kernel)
    if need is None:
        return [f"{kernel} is not in the cubin of {card.arch}"]
    warps = -(-launch.threads // 32)
    registers = -(-need.registers * 32 // 256) * 256 * warps
    shared = need.static_shared + launch.dynamic_shared
    free = 48 * KIB - need.static_shared
    limits: dict[str, Callable[[], bool]] = {
        f"{launch.threads} threads": lambda: 0 < launch.threads <= 1024,
        f"{registers} registers": lambda: registers <= card.registers,
        f"{shared} bytes of shared memory": lambda: shared <= card.shared_of_block,
        f"{launch.dynamic_shared} bytes asked for, {launch.raised} raised": lambda: (
            launch.dynamic_shared <= max(free, launch.raised)
        ),
        f"clusters of {launch.cluster}": lambda: launch.cluster == 1 or card.major >= 9,
        "an early start": lambda: not launch.early or card.major >= 9,
        f"a grid of {tuple(launch.grid)}": lambda: min(launch.grid) > 0 and max(launch.grid[1:]) <= 65535,
    }
    return [f"{kernel} on {card.name}: {what}" for what, fits in limits.items() if not fits()]


if __name__ == "__main__":
    sys.exit(main())
