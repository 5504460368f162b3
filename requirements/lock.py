"""Writes requirements/*.lock and licences.md from requirements*.txt: `make lock`. Needs uv and pip.

All sets are resolved together, so a package has one version everywhere. A lock names the locks that it builds on and
lists only what it adds. release.lock stands alone: it has the tools of a release. cpu.lock has PyTorch's CPU build,
which needs none of CUDA's packages. That build is one file per Python and platform; the hash is this machine's file's.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TOP = HERE.parent
LOWEST_PYTHON = "3.11"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
INPUTS = {
    set_: f"requirements{'-' if set_ else ''}{set_}.txt" for set_ in ("", "nvcc", "gpu", "cluster", "dev", "release")
}
CUDA = re.compile(r"(nvidia|cuda)-|triton$")
LAYERS = {
    "common": ("", (), ()),
    "cpu": ("", ("common",), ("common",)),
    "cuda": ("", ("common",), ("common",)),
    "nvcc": ("nvcc", (), ("common",)),
    "gpu": ("gpu", ("cuda", "nvcc"), ("common", "cuda", "nvcc")),
    "cluster": ("cluster", (), ("common", "cuda")),
    "dev": ("dev", ("cluster", "nvcc"), ("common", "cuda", "cluster", "nvcc")),
    "release": ("release", (), ()),
}
"""Lock -> (its input, the locks that it names, the locks whose packages it leaves out)."""


def main() -> int:
    """Write the locks, then the table of licences."""
    with tempfile.TemporaryDirectory() as folder:
        every = compile_(list(INPUTS.values()), "--generate-hashes")
        entries: dict[str, str] = {}
        for text in re.split(r"\n(?=\S)", every.strip()):  # a package that dropped a Python has a version for each
            entries[name_of(text)] = "\n".join(filter(None, (entries.get(name_of(text)), text)))
        constraints = Path(folder, "all.txt")
        constraints.write_text(every, "utf-8")
        closures = {set_: names_in(compile_([file], "-c", str(constraints))) for set_, file in INPUTS.items()}
        no_torch = Path(folder, "no_torch.txt")
        no_torch.write_text("torch\n", "utf-8")
        common = names_in(compile_([INPUTS[""]], "-c", str(constraints), "--excludes", str(no_torch)))
        torch_plain = {name for name in closures[""] - common - {"torch"} if not CUDA.match(name)}
        held: dict[str, set[str]] = {"common": common | torch_plain, "cpu": {"torch"}}
        entries_of_cpu = {**entries, "torch": cpu_torch(entries["torch"], folder)}
        for lock, (input_, below, without) in LAYERS.items():
            held.setdefault(lock, closures[input_].difference(*(held[one] for one in without)))
            write(lock, below, [(entries_of_cpu if lock == "cpu" else entries)[name] for name in sorted(held[lock])])
    write_licences(sorted(entries))
    return 0


def compile_(files: list[str], *flags: str) -> str:
    """What uv resolves the files to."""
    fixed = ("--universal", "--python-version", LOWEST_PYTHON, "--no-header", "--no-annotate", "--quiet")
    command = ["uv", "pip", "compile", *fixed, *flags, *files]
    return subprocess.run(command, cwd=TOP, check=True, capture_output=True, text=True).stdout


def name_of(entry: str) -> str:
    """The package of one entry."""
    return re.split(r"[=\[ ]", entry, maxsplit=1)[0]


def names_in(resolved: str) -> set[str]:
    """The packages of a resolution."""
    return {name_of(line) for line in resolved.splitlines() if line[:1].isalpha()}


def cpu_torch(entry: str, folder: str) -> str:
    """torch's CPU build with its file's hash for this Python. pip downloads the file."""
    version = entry.split(maxsplit=1)[0].partition("==")[2]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, f"torch=={version}+cpu"]
    if subprocess.run(pip, check=False, capture_output=True).returncode:
        subprocess.run([*pip, "--extra-index-url", TORCH_INDEX], check=True)
    (wheel,) = Path(folder).glob("torch-*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"# {wheel.name}\ntorch=={version}+cpu \\\n    --hash=sha256:{digest}"


def write(lock: str, below: tuple[str, ...], entries: list[str]) -> None:
    """One lock file."""
    head = ["# Written by `make lock`. Install with: pip install --require-hashes -r FILE"]
    if lock == "cpu":
        head.append(f"# torch's CPU build is on the index {TORCH_INDEX} (--extra-index-url).")
    if lock in ("nvcc", "cluster", "dev"):
        head.append("# With cpu.lock, cuda.lock or gpu.lock: the service's own packages are there.")
    lines = [*head, *(f"-r {one}.lock" for one in below), *entries]
    (HERE / f"{lock}.lock").write_text("\n".join(lines) + "\n", "utf-8")


def write_licences(names: list[str]) -> None:
    """licences.md: each locked package with the licence that its metadata name."""
    found: dict[str, tuple[str, str]] = {}
    for lock in ("gpu", "cluster", "dev", "release"):
        found |= licences(lock, set(names))
    rows = [f"| {name} | {version} | {licence} |" for name, (version, licence) in sorted(found.items())]
    text = "# Licences of the dependencies\n\nWritten by `make lock` from the packages' own metadata.\n\n"
    text += "\n".join(["| package | version | licence |", "|---|---|---|", *rows]) + "\n"
    (HERE / "licences.md").write_text(text, "utf-8")


def licences(lock: str, wanted: set[str]) -> dict[str, tuple[str, str]]:
    """Package -> (version, licence) of a lock's packages on this platform; pip reads metadata and installs nothing."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    command = [*pip, "--report", "-", "-r", str(HERE / f"{lock}.lock")]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    made = {}
    for one in report["install"]:
        metadata = one["metadata"]
        name = re.sub(r"[-_.]+", "-", metadata["name"]).lower()
        if name in wanted:
            made[name] = metadata["version"], licence_of(metadata)
    return made


def licence_of(metadata: dict[str, object]) -> str:
    """The licence as a package names it: an SPDX expression, a classifier, or the first line of the old field."""
    if expression := metadata.get("license_expression"):
        return str(expression)
    classifiers = metadata.get("classifier") or []
    assert isinstance(classifiers, list)
    named = [one.rpartition(" :: ")[2] for one in classifiers if one.startswith("License ::")]
    field = str(metadata.get("license") or "").strip().partition("\n")[0][:60]
    return ", ".join(named) or field or "not named"


if __name__ == "__main__":
    sys.exit(main())
