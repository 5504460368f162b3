"""Speculative decoding compared with plain decoding of the same rows, in one engine.

    python -m bench.speculation                                # the demo model on this machine
    python -m bench.speculation --size 7.2b --dtypes fp16,int8   # random weights on a GPU
    python -m bench.speculation --size 7.2b --over-http          # a right prediction, through the service

The demo model answers requests whose texts repeat something: a prediction with some words changed, a list with repeated
items, JSON by a schema. Each round runs a request with `speculation` off and on. The figure is the median of the
rounds' ratios, of CPU seconds. Texts must be equal.

Random weights have no text. There the text is one token, which a logit bias forces. A draft model of the 0.1B shape
runs, and an oracle replaces its guesses: each is right with probability p. A prediction that is right needs no luck.
`--over-http` measures whole answers: from the request to its end, with and without the prediction. `--timeline` adds
when the GPU is busy with what in a step that verifies four guesses, by events in its stream.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from bench.tools.gpu_model import SIZES, write_random_file
from bench.tools.record import Arguments, commit, finish
from bench.tools.service import service
from demo.files import ensure_model
from rwkv_batch.config import EngineConfig
from rwkv_batch.core import speculation as core_speculation
from rwkv_batch.core.drafters import MAX_DRAFT_TOKENS, MAX_ROWS, Drafter, DraftModel, ModelDrafter, Wanted
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.core.speculation import make_drafters
from rwkv_batch.engine import Engine
from rwkv_batch.ipc.process import freeze_garbage_collector
from rwkv_batch.request import GenerateRequest, Job, JobEvents, Priority
from rwkv_batch.runner.draft_steps import DraftSteps
from rwkv_batch.runner.links import DeviceGuesses, TokenCopies
from rwkv_batch.tokenizer import Tokenizer
from sampling.grammar.constraint import Constraint, Form
from sampling.params import SamplingParams
from state_pool.config import PoolConfig

ORACLE_GUESSES = 65536
"""Guesses of an oracle until it repeats itself."""
TIMELINE_ROWS = 8
"""Rows at most of a timeline."""
FORCED, OTHER = 300, 301
"""Token of the text with random weights, and a wrong one."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer"},
        "city": {"enum": ["Paris"]},
    },
    "required": ["name", "age", "city"],
}


class Oracle:
    """A draft model whose steps run. Its guesses are replaced: each is right with probability `rate`."""

    def __init__(self, model: DraftModel | None, rate: float, device: torch.device, seed: int = 0) -> None:
        """model: None: guesses take no time; seed: of which guesses are right"""
        self._model = model
        guesses = random.Random(seed).choices((FORCED, OTHER), (rate, 1 - rate), k=ORACLE_GUESSES)
        self._guesses = torch.tensor(guesses, device=device)
        self._first = 0
        self._copies = TokenCopies(device, MAX_ROWS * MAX_DRAFT_TOKENS)

    def guess(self, wanted: list[Wanted]) -> DeviceGuesses | None:
        """See DraftModel."""
        started = time.monotonic()
        wanted = [one for one in wanted if one.drafter.num_read != one.length]
        if not wanted:
            return None
        longest = num_steps = max(one.num_tokens for one in wanted)
        counts = [one.num_tokens for one in wanted]
        if self._model is not None:
            real = self._model.guess(wanted)
            if real is None:
                return None
            wanted = [one for one in wanted if one.drafter.pending is real]  # the model has read the others in part
            num_steps, counts = real.num_steps, [len(one.drafter.guesses) for one in wanted]
        # The host reads them when the draft model's steps are done: their copy is behind these on the device.
        first = self._first if self._first + longest * len(wanted) <= ORACLE_GUESSES else 0
        self._first = first + longest * len(wanted)
        guesses = DeviceGuesses(self._guesses[first : self._first], num_steps, started, self._copies)
        for i, (drafter, _, length, _) in enumerate(wanted):
            drafter.num_read = length
            drafter.expect(counts[i], guesses, range(i * longest, (i + 1) * longest))
        return guesses

    def graph_s(self, num_rows: int) -> float:
        """See DraftModel."""
        return 0.0 if self._model is None else self._model.graph_s(num_rows)


class Answer:
    """A job's rows, and its speed."""

    def __init__(self, engine: Engine, rows: list[GenerateRequest], name: str) -> None:
        """Runs the job to its end."""
        self.texts = [b""] * len(rows)
        self.ids: list[list[int]] = [[] for _ in rows]
        self._times: list[tuple[float, int]] = []
        """of events while all rows run, with their tokens"""
        self._done, self._all_run = threading.Event(), True
        self.accepted = 0
        job = Job(job_id=name, rows=rows, priority=Priority.INTERACTIVE, return_token_ids=True)
        begin = time.process_time()
        engine.submit(job, self._receive, lambda refusal: print(refusal) if refusal else None)
        assert self._done.wait(300), "no answer"
        self.cpu_s = time.process_time() - begin
        """seconds of all threads: on a shared machine they say more than a clock"""

    def _receive(self, events: JobEvents) -> None:
        self._all_run &= all(delta.finish is None for delta in events.deltas)
        if self._all_run:
            self._times.append((time.perf_counter(), events.num_sampled))
        for delta in events.deltas:
            self.texts[delta.row] += delta.text
            self.ids[delta.row] += delta.token_ids
            if delta.finish is not None:
                self.accepted += sum(delta.finish.accepted_drafts.values())
        if events.done:
            self._done.set()

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first ones, per second, until the first row ends."""
        sampled = [(at, count) for at, count in self._times if count]
        return sum(count for _, count in sampled[1:]) / (sampled[-1][0] - sampled[0][0])


@contextmanager
def started(path: Path, **fields: Any) -> Iterator[Engine]:
    engine = Engine(EngineConfig(model_path=str(path), speculate="auto", pool=PoolConfig(state_db=""), **fields))
    engine.start()
    freeze_garbage_collector()  # as an engine's process does
    try:
        yield engine
    finally:
        engine.stop()
        del engine
        gc.collect()


# Random weights ----------------------------------------------------------------------------------------------


def measure_random(path: Path, draft: Path, dtype: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one type: rows x (off, p, right prediction)."""
    tokens = args.tokens
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=1, logit_bias={FORCED: 1000.0})
    row = GenerateRequest(prompt=[7] * 24, max_tokens=tokens, sampling=sampling, chunk_size=1, speculation="off")
    results = []
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    fields: dict[str, Any] = {"dtype": dtype, "devices": (str(device),), "max_running": 64, "draft_model": str(draft)}
    with started(path, **fields) as engine:
        for draft_dtype in args.draft_dtypes.split(","):
            if draft_dtype:
                engine.model_runner.draft_model = DraftSteps(engine.config, device, (draft_dtype,))
            kinds = {"dtype": dtype, "draft": draft_dtype}
            print(json.dumps({**kinds, "graph_ms": graph_times(engine)}), flush=True)
            for rows in map(int, args.rows.split(",")):
                for result in measure_rows(engine, [row] * rows, args):
                    results.append({**kinds, "rows": rows, **result})
                    print(json.dumps(results[-1]), flush=True)
                print(json.dumps({**kinds, "rows": rows, **costs(engine)}), flush=True)
                if args.timeline and rows <= TIMELINE_ROWS:
                    use_oracle(engine, engine.model_runner.draft_model, 0.7)
                    on = msgspec.structs.replace(row, speculation="")
                    print(json.dumps({**kinds, "rows": rows, **timeline(engine, [on] * rows)}), flush=True)
    return results


def measure_rows(
    engine: Engine, rows: list[GenerateRequest], args: argparse.Namespace
) -> Iterator[dict[str, str | float]]:
    """Yield the speed without drafts, with guesses of each rate, and with a prediction that is right."""
    on = [msgspec.structs.replace(row, speculation="") for row in rows]
    predicted = [msgspec.structs.replace(row, prediction=[FORCED] * row.max_tokens) for row in on]
    cases: dict[str, tuple[list[GenerateRequest], float | None]] = {"off": (rows, None)}
    cases |= {f"p {rate}": (on, rate) for rate in map(float, args.rates.split(","))}
    cases["prediction"] = (predicted, None)
    speeds: dict[str, list[float]] = {}
    for number in range(args.rounds + 1):
        for name, (requests, rate) in cases.items():
            use_oracle(engine, engine.model_runner.draft_model, rate, number)
            answer = Answer(engine, requests, f"{len(rows)}-{name}-{number}")
            assert answer.ids == [[FORCED] * row.max_tokens for row in rows], "the text is forced"
            if number:
                speeds.setdefault(name, []).append(answer.tokens_per_s)
    for name, values in speeds.items():
        # Means: some rounds' guesses are luckier than others'.
        ratio = statistics.harmonic_mean(values) / statistics.harmonic_mean(speeds["off"])
        yield {"case": name, "tokens_per_s": round(statistics.harmonic_mean(values), 1), "ratio": round(ratio, 3)}


def use_oracle(engine: Engine, model: DraftModel | None, rate: float | None, seed: int = 0) -> None:
    """Let an oracle guess the tokens of all rows. rate: None: only predictions and lookups do; seed: see `Oracle`"""

    def drafters(_: Sequence) -> list[Drafter]:
        drafter = ModelDrafter()
        drafter.name = f"oracle {rate}"  # the controller learns the acceptance of each name
        return [drafter]

    engine.speculation.model = None if rate is None else Oracle(model, rate, engine.model_runner.device, seed)
    engine.speculation.make_drafters = drafters if rate is not None else make_drafters


def graph_times(engine: Engine) -> dict[str, dict[str, float]]:
    """Return milliseconds of graphs when they were captured: decode by rows, others by size, guesses by rows."""
    runner = engine.model_runner
    decode, prompts = runner.graphs.decode, runner.graphs.prompts
    if decode is None or prompts is None:
        return {}
    draft = runner.draft_model
    seconds: dict[str, dict[str, float]] = {
        "decode": {str(rows): decode.seconds(rows) for rows in decode.sizes if rows <= MAX_ROWS},
        "verify": {str(tuple(size)): prompts.seconds.get(size, 0.0) for size in prompts.sizes if size.num_drafts},
        "guess": {str(rows): draft.graph_s(rows) for rows in (1, 4, 8, MAX_ROWS) if draft is not None},
    }
    return {kind: {name: round(1e3 * one, 4) for name, one in times.items()} for kind, times in seconds.items()}


def costs(engine: Engine) -> dict[str, Any]:
    """Return what the controller has measured, in ms."""
    figures = engine.speculation.times.figures()
    return {
        f"{name}_ms": {kind: round(1e3 * seconds, 3) for kind, seconds in medians.items()}
        for name, medians in figures.items()
    }


def timeline(engine: Engine, requests: list[GenerateRequest], length: int = 4) -> dict[str, Any]:
    """Return median microseconds of the GPU's work in rounds that guess `length` tokens, and of the time before each.

    A profiler would run kernels one after the other that overlap.
    """
    runner, speculation, seen = engine.model_runner, engine.speculation, list[tuple[str, torch.cuda.Event]]()
    assert speculation.model is not None, "an oracle guesses"
    parts = [
        (speculation.model, "guess"),
        (runner, "_forward"),
        (runner.drafts, "count_ahead"),
        (runner.step_sampler, "sample"),
        (runner.drafts, "sample_ahead"),
    ]

    def watched(part: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            result = part(*given, **named)
            events[1].record()
            seen.extend(zip((f"before {name}", name), events, strict=True))
            return result

        return run

    with ExitStack() as patches:
        patches.enter_context(patch.object(core_speculation, "MAX_DRAFT_TOKENS", length))
        patches.enter_context(patch.object(speculation, "mode", "model"))
        Answer(engine, requests, f"warm-{len(requests)}-{length}")
        for owner, name in parts:
            patches.enter_context(patch.object(owner, name, watched(getattr(owner, name), name)))
        answer = Answer(engine, requests, f"timeline-{len(requests)}-{length}")
        torch.cuda.synchronize()
    spans: dict[str, list[float]] = {}
    for (_, begin), (name, end) in itertools.pairwise(seen):
        spans.setdefault(name, []).append(1000 * begin.elapsed_time(end))
    medians = {name: round(statistics.median(values), 1) for name, values in spans.items()}
    return {"tokens_per_s": round(answer.tokens_per_s, 1), "gpu_us": medians}


# Over HTTP ---------------------------------------------------------------------------------------------------

WORD = 34550
"""Token of "hello", which is one token also if it is repeated."""


def measure_over_http(path: Path, draft: Path, dtype: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one user's whole answers with and without a right prediction: a logit bias forces the text."""
    flags = ["--model-path", str(path), "--dtype", dtype, "--speculate", "auto", "--draft-model", str(draft)]
    fields = {"max_tokens": args.tokens, "ignore_eos": True, "logit_bias": {WORD: 100}, "seed": 1}
    body = {"model": "rwkv7", "messages": [{"role": "user", "content": "hi"}], **fields}
    text = Tokenizer().decode_bytes([WORD] * args.tokens).decode()
    cases = {"off": {"speculation": "off"}, "prediction": {"prediction": {"type": "content", "content": text}}}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    with service(flags) as url:
        for number in range(args.rounds + 1):
            for name, extra in cases.items():
                data = json.dumps(body | extra).encode()
                request = urllib.request.Request(
                    f"{url}/openai/v1/chat/completions", data, {"Content-Type": "application/json"}
                )
                begin = time.perf_counter()
                with urllib.request.urlopen(request) as response:
                    answer = json.load(response)
                assert answer["choices"][0]["message"]["content"] == text, "the text is forced"
                if number:
                    seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return [
        {"dtype": dtype, "case": f"{name}, over HTTP", "ms": round(1e3 * value, 1), "ratio": medians["off"] / value}
        for name, value in medians.items()
    ]


# The demo model ----------------------------------------------------------------------------------------------


def demo_requests(engine: Engine) -> dict[str, GenerateRequest]:
    """Return the requests by name."""
    encode = Tokenizer().encode
    greedy = SamplingParams(temperature=0.0)

    def request(prompt: str, **fields: Any) -> GenerateRequest:
        return GenerateRequest(**{"prompt": encode(prompt), "max_tokens": 200, "sampling": greedy, **fields})

    items = [
        "Where is the station?",
        "The station is closed today.",
        "Where is the market?",
        "The market is closed today.",
    ]
    plain = request("User: Tell me about the city.\n\nAssistant:", ignore_eos=True, speculation="off")
    answer = Answer(engine, [plain], "plain").ids[0]
    changed = [one if i != len(answer) // 2 else OTHER for i, one in enumerate(answer)]
    schema = Constraint(form=Form.JSON_SCHEMA, source=json.dumps({"type": "array", "items": PERSON, "minItems": 6}))
    listed = "\n".join(f"English: {item}" for item in items * 3)
    return {
        "prediction, one word changed": msgspec.structs.replace(plain, prediction=changed, speculation=""),
        "prediction, half the words changed": msgspec.structs.replace(
            plain, prediction=[one if i % 2 else OTHER for i, one in enumerate(answer)], speculation=""
        ),
        "no drafts fit": request("User: Tell me about the sea.\n\nAssistant:", sampling=SamplingParams(seed=1)),
        "JSON by schema": request("People as JSON:", constraint=schema, sampling=SamplingParams(seed=3, top_p=0.5)),
        "repeated items": request(f"{listed}\n\nChinese:", ignore_eos=True),
    }


def measure_demo(rounds: int, dtype: str) -> list[dict[str, Any]]:
    """Measure the demo model on this machine."""
    results = []
    with started(ensure_model(), dtype=dtype, devices=("cpu",)) as engine:
        for name, request in demo_requests(engine).items():
            ratios, answers = [], []
            off = msgspec.structs.replace(request, speculation="off", prediction=[])
            for number in range(rounds + 1):
                pair = [Answer(engine, [one], f"{name}-{number}-{i}") for i, one in enumerate((off, request))]
                assert pair[0].texts == pair[1].texts, "drafts changed a text"
                if number:
                    ratios.append(pair[0].cpu_s / pair[1].cpu_s)
                    answers.append(pair[1])
            ratio, tokens = round(statistics.median(ratios), 2), len(answers[-1].ids[0])
            results.append({"case": name, "ratio": ratio, "tokens": tokens, "accepted": answers[-1].accepted})
            print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--size", choices=SIZES, help="random weights of this size instead of the demo model")
    parser.add_argument("--model-path", type=Path, help="file of `write_random_file`; else one is written")
    parser.add_argument("--draft-model", type=Path, help="file of the draft model; else one of 0.1B is written")
    parser.add_argument("--dtypes", default="auto")
    parser.add_argument("--draft-dtypes", default="", help="of the draft model, instead of the fastest")
    parser.add_argument("--rates", default="0,0.5,0.7,0.9,1", help="chances that a guess is right")
    parser.add_argument("--rows", default="1,4,8,32")
    parser.add_argument("--over-http", action="store_true", help="a prediction that is right, through the service")
    parser.add_argument("--timeline", action="store_true", help="a step's work on the GPU")
    parser.add_argument("--tokens", type=int, default=257)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    if given.size:
        with tempfile.TemporaryDirectory() as folder:
            device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
            path = given.model_path or write_random_file(given.size, Path(folder) / "random.safetensors", device)
            draft = given.draft_model or write_random_file("0.1b", Path(folder) / "draft.safetensors", device)
            for dtype in given.dtypes.split(","):
                results += (measure_over_http if given.over_http else measure_random)(path, draft, dtype, given)
    else:
        results = measure_demo(given.rounds, given.dtypes)
    finish({"commit": commit(given.commit), "size": given.size, "results": results}, given.out)


if __name__ == "__main__":
    main()
