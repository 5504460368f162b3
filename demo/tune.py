"""Data of the shipped tuned states and adapters, and their scores.

`python -m demo.tune data chinese --out FILE` writes JSON lines for `rwkv-batch tune`; `score chinese FILE` loads the
result into an engine and prints the share of exact answers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

from demo.corpus import tuning
from demo.corpus.documents import STOP, Document
from demo.engine_client import EngineClient, open_engine
from demo.files import ensure_model

SOURCES: dict[str, Callable[[Random], Document]] = {
    "chinese": tuning.in_chinese,
    "json": tuning.in_json,
    "french": tuning.french,
    "spanish": tuning.spanish,
}
ADAPTERS = ("french", "spanish")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("data", "score"))
    parser.add_argument("name", choices=SOURCES)
    parser.add_argument("file", type=Path, nargs="?", help="what `rwkv-batch tune` wrote")
    parser.add_argument("--out", type=Path, help="the file of lines")
    parser.add_argument("--count", type=int, help="documents: 4000 to train on, 200 to score")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    if args.action == "data":
        args.out.write_text("\n".join([*data(args.name, args.count or 4000, args.seed), ""]), encoding="utf-8")
        return
    is_adapter = args.name in ADAPTERS
    with open_engine(
        ensure_model(),
        device="cpu",
        states=[] if is_adapter else [f"{args.name}={args.file}"],
        adapters=[f"{args.file}:1"] if is_adapter else [],
    ) as client:
        exact = score(
            args.name, EngineClient(client.engine, "" if is_adapter else args.name), args.count or 200, args.seed
        )
    print(json.dumps({"exact": round(exact, 4)}))


if __name__ == "__main__":
    main()
