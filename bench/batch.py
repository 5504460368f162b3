"""Speed of `app.py batch`, compared with the engine alone and with the `rwkv` package.

    python -m bench.batch [--model-path FILE] [--lines 512] [--rows 64] [--rounds 3]

Put `taskset -c 0,1` in front to use two cores.

Each measurement runs in its own process. The lines have 8 to 100 words; 32 tokens are generated greedily for each.
- cli: lines/s of the command with its own engine and `--rows` running slots, from the first request to the last
  synced line.
- engine: the same rows in one job of an engine with as many running slots, from submission to the last event.
- peer: the `rwkv` package with the same file. It processes one line at a time.

A ratio compares figures of one round; the result is the median over the rounds. Rounds alternate between cli first
and engine first. Bound of cli: on a CPU the command's event loop shares the cores with the engine.

Without --model-path the demo model runs. The peer reads .pth files only. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.tools.record import Arguments, finish, origin

MAX_TOKENS = 32
PEER_LINES = 4
WORDS = "time people water house light river stone morning winter garden letter answer music window story".split()
TARGETS = {"cli_over_engine": 0.97, "cli_over_peer": 10.0}


def write_lines(path: Path, count: int) -> None:
    """Write `count` lines of different lengths."""
    rng = random.Random(5)
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            text = " ".join(rng.choices(WORDS, k=rng.randint(8, 100)))
            file.write(json.dumps({"id": i, "text": text}) + "\n")


def demo_as_pth(path: Path) -> None:
    """Save the demo model as .pth, the format that the peer reads."""
    import torch
    from safetensors.torch import load_file

    from demo.files import ensure_model

    torch.save(load_file(ensure_model()), path)


def measure_cli(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    target = folder / "out.jsonl"
    command = [sys.executable, "-m", "app", "batch", str(options.input), "-o", str(target)]
    command += ["--fresh", "--task", "complete"]
    command += ["--max-tokens", str(MAX_TOKENS), "--temperature", "0", "--max-running", str(options.rows)]
    command += ["--progress", "json", *(["--model-path", options.model_path] if options.model_path else [])]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    progress = json.loads([line for line in ran.stderr.splitlines() if line.startswith("{")][-1])
    return {"lines_per_s": progress["lines_per_s"], "tokens_per_s": progress["tokens_per_s"]}


def measure_engine(options: argparse.Namespace) -> dict[str, float]:
    """Measure the same rows as one job of an engine."""
    from programs.settings import parse_settings
    from programs.settings.model_file import with_default_model
    from routes.config import HttpConfig
    from routes.request.bodies import DEFAULT_STOPS, PromptBody
    from routes.request.jobs import build_rows
    from rwkv_batch.engine import Engine
    from rwkv_batch.request import Job, JobEvents, Priority
    from rwkv_batch.tokenizer import Tokenizer

    flags = ["--max-running", str(options.rows), "--state-db", ""]
    flags += ["--model-path", options.model_path] if options.model_path else []
    texts = [json.loads(line)["text"] for line in Path(options.input).read_text().splitlines()]
    body = PromptBody(contents=texts, max_tokens=MAX_TOKENS, temperature=0.0)
    engine = Engine(with_default_model(parse_settings(flags, {})).engine)
    engine.start()
    done = threading.Event()
    tokens = 0

    def sink(events: JobEvents) -> None:
        nonlocal tokens
        ends = [delta.finish for delta in events.deltas if delta.finish is not None]
        tokens += sum(end.prompt_tokens + end.completion_tokens for end in ends)
        if events.done:
            done.set()

    config = HttpConfig(max_contents=len(texts))
    started = time.perf_counter()
    rows = build_rows(Tokenizer(), config, body, texts, DEFAULT_STOPS, "contents")
    engine.submit(Job(job_id="bench", rows=rows, priority=Priority.INTERACTIVE), sink, lambda refusal: None)
    done.wait()
    seconds = time.perf_counter() - started
    engine.stop()
    return {"lines_per_s": round(len(texts) / seconds, 2), "tokens_per_s": round(tokens / seconds, 1)}


def measure_peer(options: argparse.Namespace) -> dict[str, float]:
    """Measure the `rwkv` package: one line at a time, greedy."""
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0"}
    from rwkv.model import RWKV

    from rwkv_batch.tokenizer import Tokenizer

    model = RWKV(model=str(Path(options.model_path).with_suffix("")), strategy="cpu fp32")
    texts = [json.loads(line)["text"] for line in Path(options.input).read_text().splitlines()[: PEER_LINES + 1]]
    tokenizer, seconds = Tokenizer(), []
    for text in texts:
        started = time.perf_counter()
        logits, state = model.forward(tokenizer.encode(text), None)
        for _ in range(MAX_TOKENS - 1):
            logits, state = model.forward([int(logits.argmax())], state)
        seconds.append(time.perf_counter() - started)
    return {"lines_per_s": round(1 / statistics.mean(seconds[1:]), 3)}


def run_in_process(options: argparse.Namespace, what: str) -> Any:
    command = [sys.executable, "-m", "bench.batch", "--only", what, "--input", str(options.input)]
    command += ["--rows", str(options.rows), *(["--model-path", options.model_path] if options.model_path else [])]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def run(options: argparse.Namespace) -> dict[str, Any]:
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options.input = folder / "in.jsonl"
        write_lines(options.input, options.lines)
        if not options.model_path:
            options.model_path = str(folder / "demo.pth")
            demo_as_pth(Path(options.model_path))
        peers = ["peer"] if options.model_path.endswith(".pth") else []
        for number in range(options.rounds):
            ours = ["engine", "cli"] if number % 2 else ["cli", "engine"]
            one = {what: run_in_process(options, what) for what in (*ours, *peers)}
            print(json.dumps(one), flush=True)
            rounds.append(one)
    ratios = {
        f"cli_over_{peer}": round(
            statistics.median(one["cli"]["lines_per_s"] / one[peer]["lines_per_s"] for one in rounds), 3
        )
        for peer in ("engine", "peer")
        if peer in rounds[0]
    }
    about = {"model": Path(options.model_path).name, "load": round(os.getloadavg()[0], 2), **origin(options.commit)}
    setting = {"rows": options.rows, "lines": options.lines, "rounds": rounds}
    return {"bench": "batch", **about, **setting, **ratios, "targets": TARGETS}


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--model-path", default="")
    parser.add_argument("--lines", type=int, default=512)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("cli", "engine", "peer"), help=argparse.SUPPRESS)
    parser.add_argument("--input", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        match options.only:
            case "cli":
                found: Any = measure_cli(options, Path(folder))
            case "engine":
                found = measure_engine(options)
            case "peer":
                found = measure_peer(options)
            case _:
                found = run(options)
    finish(found, options.out)


if __name__ == "__main__":
    main()
