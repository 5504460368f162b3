"""Data of the shipped tuned states and adapters, and their scores.

`python -m demo.tune make` makes all of them again with `rwkv-batch tune`, in demo/tuned, and prints their scores.
`data chinese --out FILE` only writes JSON lines for `rwkv-batch tune`; `score chinese FILE` loads a result into an engine
and prints the share of exact answers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file

from demo.corpus import tuning
from demo.corpus.documents import STOP, Document
from demo.engine_client import EngineClient, open_engine
from demo.files import MODEL, ensure_model

SOURCES: dict[str, Callable[[Random], Document]] = {
    "chinese": tuning.in_chinese,
    "json": tuning.in_json,
    "french": tuning.french,
    "spanish": tuning.spanish,
}
ADAPTERS = ("french", "spanish")
_DOCUMENTS, _SEED = 20_000, 7
STATE_OPTIONS = ("--batch-tokens", "8192", "--epochs", "3")
ADAPTER_OPTIONS = ("--batch-tokens", "8192", "--epochs", "4", "--held-out", "0")
"""Nothing is held out: a held-out phrase would never be learned."""


def line(document: Document) -> str | None:
    """Return a document as a data file's line. None if it has another stop."""
    texts = [segment.text for segment in document]
    if any(stop != STOP for stop in texts[2::3]):
        return None
    return json.dumps({"prompt": texts[::3], "completion": texts[1::3]}, ensure_ascii=False)


def data(name: str, count: int, seed: int) -> list[str]:
    """Return `count` lines."""
    rng, found = Random(f"{name}/{seed}"), list[str]()
    while len(found) < count:
        found += filter(None, [line(SOURCES[name](rng))])
    return found


def score(name: str, client: EngineClient, count: int, seed: int) -> float:
    """Return a tuning's share of exact answers in `count` sampled documents."""
    rng = Random(f"tune/{name}/{seed}")
    scripts: list[list[tuple[str, str]]] = []
    while len(scripts) < count:
        if name in ADAPTERS:
            scripts.append([tuning.phrase(rng, name.capitalize())])
            continue
        segments = [segment.text for segment in SOURCES[name](rng)]
        scripts.append([(segments[start], segments[start + 1]) for start in range(0, len(segments), 3)])
    answers = client.converse([[prompt for prompt, _ in script] for script in scripts], 96)
    expected = [answer.strip() for script in scripts for _, answer in script]
    actual = [answer.strip() for given in answers for answer in given]
    return sum(one == other for one, other in zip(expected, actual, strict=True)) / len(expected)


def make(name: str, folder: Path, arguments: list[str]) -> Path:
    """Tune with `rwkv-batch tune`; return the file as it is shipped."""
    with tempfile.TemporaryDirectory() as scratch:
        lines, result = Path(scratch, "lines.jsonl"), Path(scratch, name)
        lines.write_text("\n".join([*data(name, _DOCUMENTS, _SEED), ""]), encoding="utf-8")
        method, options = ("lora", ADAPTER_OPTIONS) if name in ADAPTERS else ("state", STATE_OPTIONS)
        given = ["--method", method, "--model-path", str(ensure_model()), *options, *arguments]
        subprocess.run([sys.executable, "-m", "programs.tune", lines, "-o", result, *given], check=True)
        if name not in ADAPTERS:
            return Path(shutil.copy(f"{result}.state.pth", folder / f"{name}.pth"))
        path = folder / f"{name}.safetensors"
        save_file(torch.load(f"{result}.lora.pth", weights_only=True), path)
        return path


def score_file(name: str, path: Path, count: int, seed: int) -> float:
    """Return the share of exact answers with a tuned state or an adapter."""
    is_adapter = name in ADAPTERS
    with open_engine(
        ensure_model(),
        device="cpu",
        states=[] if is_adapter else [f"{name}={path}"],
        adapters=[f"{path}:1"] if is_adapter else [],
    ) as client:
        return round(score(name, EngineClient(client.engine, "" if is_adapter else name), count, seed), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("make", "data", "score"))
    parser.add_argument("name", choices=SOURCES, nargs="?", help="default of make: all")
    parser.add_argument("file", type=Path, nargs="?", help="what `rwkv-batch tune` wrote")
    parser.add_argument("--out", type=Path, help="data: the file of lines; make: the folder (default: demo/tuned)")
    parser.add_argument("--count", type=int, help="documents: 20000 to train on, 200 to score")
    parser.add_argument("--seed", type=int, default=_SEED)
    args, arguments = parser.parse_known_args()
    if arguments and args.action != "make":
        parser.error(f"unknown: {' '.join(arguments)}; only make passes options on to `rwkv-batch tune`")
    if args.action == "data":
        args.out.write_text("\n".join([*data(args.name, args.count or _DOCUMENTS, args.seed), ""]), encoding="utf-8")
        return
    files = {args.name: args.file}
    if args.action == "make":
        names = [args.name] if args.name else list(SOURCES)
        files = {name: make(name, args.out or MODEL.parent / "tuned", arguments) for name in names}
    print(json.dumps({name: score_file(name, file, args.count or 200, args.seed) for name, file in files.items()}))


if __name__ == "__main__":
    main()
