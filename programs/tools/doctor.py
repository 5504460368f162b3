"""The command `doctor`: checks whether this machine can serve with the given flags."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from native import build, machine
from native.files import VARIABLE, cache_folder
from native.nvcc import torch_cuda
from programs.settings import Settings, parse_settings, reports_errors
from programs.settings.command_line import gpu_names
from programs.settings.model_file import with_default_model
from programs.tools.parsers import doctor_parser
from rwkv_batch.errors import StartupError
from rwkv_batch.kernels.cpu.library import LIBRARY
from rwkv_batch.runner.model_files import open_model

MIN_PYTHON = (3, 11)
MIN_DISK_BYTES = 1 << 30
PACKAGES = ("torch", "robyn", "msgspec", "numpy", "pyrwkv-tokenizer", "llguidance")
_INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "i8mm")
_DRIVER = Path("/proc/driver/nvidia/version")


class Finding(NamedTuple):
    text: str
    """what was found"""
    remedy: str = ""
    """what to do; "": all is well"""


@reports_errors()
def main(arguments: Sequence[str]) -> int:
    """Print one line per check. Returns 0 if all are well, 1 if one is not, 2 for a wrong flag."""
    _, flags = doctor_parser().parse(arguments)
    settings = parse_settings(flags, os.environ)
    bad = 0
    for name, check in CHECKS.items():
        for finding in check(settings):
            bad += bool(finding.remedy)
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            sys.stdout.write(f"{'bad' if finding.remedy else 'ok':<4}{name:<10}{finding.text}{remedy}\n")
            sys.stdout.flush()
    return 1 if bad else 0


def _python(_: Settings) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    required = ".".join(map(str, MIN_PYTHON))
    yield Finding(version, "" if sys.version_info >= MIN_PYTHON else f"install Python {required} or newer")


def _packages(_: Settings) -> Iterator[Finding]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            yield Finding(f"{package} is missing", "pip install -r requirements.txt")
    yield Finding(", ".join(f"{package} {version}" for package, version in found.items()))


def _gpu(_: Settings) -> Iterator[Finding]:
    names, cuda, archs = gpu_names(), torch_cuda(), machine.gpu_archs()
    if names == "none" and not archs:
        yield Finding("no NVIDIA GPU; the CPU is used")
        return
    driver = re.search(r"\b(\d{3,}\.[\d.]+)", _DRIVER.read_text("utf-8", "replace")) if _DRIVER.is_file() else None
    text = f"{names}, driver {driver[1] if driver else 'unknown'}, CUDA {cuda or 'none'} of torch"
    if cuda is None:
        yield Finding(text, "this torch is for CPUs; pip install -r requirements-gpu.txt")
    elif not archs:
        yield Finding(text, "torch sees no GPU; update the driver, or check CUDA_VISIBLE_DEVICES and nvidia-smi")
    else:
        unsupported = sorted(set(archs) - set(machine.SUPPORTED_ARCHS))
        yield Finding(f"{text}, {', '.join(archs)}", f"{', '.join(unsupported)} is too old" if unsupported else "")


def _compiler(_: Settings) -> Iterator[Finding]:
    if ready := build.prebuilt(LIBRARY):
        yield Finding(f"not needed: the kernels of this CPU are in {ready.parent}")
    else:
        missing = machine.cpp_unavailable_reason()
        yield Finding(missing or f"{machine.cxx()}", "install it; without it plain torch is used" if missing else "")
    if machine.gpu_archs():
        nvcc = machine.nvcc()
        yield Finding(nvcc or "no nvcc", "" if nvcc else "pip install -r requirements-nvcc.txt")


def _cpu(_: Settings) -> Iterator[Finding]:
    features = set(machine.cpu_features().split())
    found = [name for name in _INSTRUCTIONS if name in features]
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    yield Finding(f"{cores}, {' '.join(found) or 'unknown instructions'}")


def _model(settings: Settings) -> Iterator[Finding]:
    try:
        path = with_default_model(settings).engine.model_path
        weights = open_model(path)
    except StartupError as error:
        yield Finding("cannot be served", str(error))
        return
    yield Finding(f"{path}: {weights.shape.describe()}, {weights.num_bytes / 1e9:.2f} GB")
    free = machine.free_memory()
    text = "free memory is unknown" if free is None else f"{free / 1e9:.1f} GB of memory are free"
    is_too_little = free is not None and free < weights.num_bytes
    yield Finding(text, "it is less than the weights; close programs or use a smaller model" if is_too_little else "")


def _disk(settings: Settings) -> Iterator[Finding]:
    database = settings.engine.pool.state_db
    folders = {cache_folder(): f"give another folder as {VARIABLE}"}
    if database and "://" not in database:
        folders[Path(database).absolute().parent] = "give another place as --state-db"
    for folder, remedy in folders.items():
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        free = shutil.disk_usage(existing).free
        if not os.access(existing, os.W_OK | os.X_OK):
            yield Finding(f"{existing} cannot be written by this user", f"allow it, or {remedy}")
        else:
            text = f"{free / 1e9:.1f} GB are free in {folder}"
            yield Finding(text, f"free some space, or {remedy}" if free < MIN_DISK_BYTES else "")


def _port(settings: Settings) -> Iterator[Finding]:
    host, port = settings.http.host, settings.http.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            yield Finding(f"{host}:{port} cannot be used ({error.strerror})", "give another --port or --host")
            return
    yield Finding(f"{host}:{port} is free")


CHECKS: dict[str, Callable[[Settings], Iterator[Finding]]] = {
    "python": _python,
    "packages": _packages,
    "gpu": _gpu,
    "compiler": _compiler,
    "cpu": _cpu,
    "model": _model,
    "disk": _disk,
    "port": _port,
}
