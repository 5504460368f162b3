"""Context in translations: what the model makes of it, what the service keeps, and what a page costs.

    python -m bench.translation                              # the demo model, on this machine's CPU
    python -m bench.translation --model-path FILE --cases 500 --out FILE

- skills: held-out sentences of demo/corpus/pages.py, from English to Chinese. `right`: the translation has the term,
  the pronoun, the form of address or the markers of its page. `exact`: it is the whole expected translation. `alone`:
  the same sentences without what comes before them. Prompts are those of the service.
- kept: held-out sentences through the service's own route. `markers`: all are in the answer; `markers_split`: the text
  was split around markers that the model lost; `lines`: equal numbers of lines; `enforced`: all terms of a glossary
  with the mode `enforce` are in the answer; `_exact`: it is the whole expected translation.
- page: time of 200 paragraphs of 40 to 80 tokens without context, with a context of 1,500 tokens that is read once
  (`page`), and with the context in each prompt, with and without the prefix cache. `plugin`: the same as fifty requests
  of four paragraphs. All rows sample 60 tokens, so the times are comparable. Medians of --rounds rounds, in seconds
  (`wall`) and in seconds of CPU (`cpu`), which other programs disturb less. `ratio` is a paragraph's time over one's
  without context, of `cpu` on a CPU. Without the prefix cache only a tenth of the paragraphs run.
- `page` and `masks` with --size: a random model of that size, for the share of a step that takes as long as a real one.
- masks: the same --rows sentences with markers or enforced terms, with and without their masks, in turns, with answers
  of equal lengths. `ratio` is the time of a token with masks over one without, of CPU seconds on a CPU, after the
  prefills: the median of --mask-rounds pairs. `steps` is the ratio of the median steps, in wall time.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import tempfile
import time
from collections.abc import Awaitable, Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any, NamedTuple, TypeVar

import msgspec

from bench.tools.gpu_model import SIZES, write_random_file
from bench.tools.record import Arguments, finish, origin
from demo.corpus import pages
from demo.corpus.translation import fresh_pair
from demo.engine_client import EngineClient, open_engine, run_jobs
from demo.files import MODEL, ensure_model
from programs.backends.local_engine import LocalEngine
from programs.settings.command_line import parse_settings
from programs.settings.model_file import with_default_model
from routes.request.validation import MAX_WARNINGS
from routes.translation.translator import required_constraint
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.engine import Engine
from rwkv_batch.request import GenerateRequest
from rwkv_batch.runner.step_sampling import SampledToken
from rwkv_batch.tokenizer import Tokenizer
from rwkv_batch.translation.glossary import Glossary, GlossaryMode
from rwkv_batch.translation.plan import Query, TranslationCache, TranslationPlan, TranslationRequest
from rwkv_batch.translation.prompts import shared_prompt
from sampling.params import SamplingParams

T = TypeVar("T")
PATH = "/translate/v1/batch-translate"
PARAGRAPHS, CONTEXT_TOKENS, ANSWER_TOKENS = 200, 1500, 60
PLUGIN_TEXTS = 4
BLOCK = 500
"""Sentences between two lines about what the service keeps."""
_MARKER = re.compile(r"\$?\{+\w+\}+|%\d*\$?s|</?\d+/?>")
SKILLS = {skill.__name__: skill for skill in pages.SKILLS}


def _prompt(query: Query, *, alone: bool) -> str:
    asked = replace(query, context="", history=(), terms=()) if alone else query
    return shared_prompt(asked) + pages.prompt_of(asked)


def skills(client: EngineClient, names: Iterable[str], cases: int, seed: int) -> dict[str, Any]:
    """Return each skill's right and exact translations, as shares. With and without what comes before."""
    found = {}
    for skill in (SKILLS[name] for name in names):
        rng = Random(f"{skill.__name__}/{seed}")
        sampled = [skill(rng, held=True) for _ in range(cases)]
        queries = [pages.query(rng, case) for case in sampled]
        figures = {}
        for alone in (False, True):
            prompts = [_prompt(query, alone=alone) for query in queries]
            answers = [answer.strip() for answer in client.complete(prompts, 160)]
            both = list(zip(sampled, answers, strict=True))
            end = "_alone" if alone else ""
            figures[f"right{end}"] = sum(all(one in answer for one in case.expected) for case, answer in both) / cases
            figures[f"exact{end}"] = sum(case.target == answer for case, answer in both) / cases
        found[skill.__name__] = {name: round(value, 4) for name, value in figures.items()}
    return found


async def kept(flags: list[str], cases: int, seed: int) -> dict[str, float]:
    """Return the share of texts whose markers, lines and enforced terms the service keeps."""
    backend = LocalEngine(with_default_model(parse_settings(flags, {})))
    await backend.open()
    rng = Random(f"kept/{seed}")
    blocks: list[dict[str, float]] = []
    figures = dict[str, float]()
    sizes = [min(BLOCK, cases - start) for start in range(0, cases, BLOCK)]
    try:
        for size in sizes:
            blocks.append(await _kept_of(backend, rng, size))
            done = sizes[: len(blocks)]
            means = {
                name: sum(one[name] * n for one, n in zip(blocks, done, strict=True)) / sum(done) for name in blocks[0]
            }
            figures = {"cases": sum(done), **{name: round(share, 4) for name, share in means.items()}}
            print("kept", msgspec.json.encode(figures).decode(), flush=True)  # a later block may be ended by its time
    finally:
        await backend.close()
    return figures


async def _kept_of(backend: LocalEngine, rng: Random, cases: int) -> dict[str, float]:
    marked = [pages.markers(rng, held=True) for _ in range(cases)]
    lines = ["\n".join(fresh_pair(rng, held=True).en for _ in range(20)) for _ in range(max(cases // 20, 1))]
    termed = [pages.listed_terms(rng, held=True) for _ in range(cases)]
    english = [case.source for case in marked if case.english]
    chinese = [case.source for case in marked if not case.english]
    answers = [*await _translated(backend, english, "en", "zh"), *await _translated(backend, chinese, "zh", "en")]
    texts, targets = [*english, *chinese], {case.source: case.target for case in marked}
    pairs = list(zip(texts, answers, strict=True))
    counts = zip(lines, await _translated(backend, lines, "en", "zh"), strict=True)
    enforced = [
        _translated(backend, [case.source], "en", "zh", glossary=dict(case.terms), glossary_mode="enforce")
        for case in termed
    ]
    both = [(case, one) for case, (one,) in zip(termed, await _together(enforced), strict=True)]
    shares: dict[str, Iterable[bool]] = {
        "markers": (sorted(_MARKER.findall(one)) == sorted(_MARKER.findall(other.text)) for one, other in pairs),
        "markers_exact": (targets[one] == other.text for one, other in pairs),
        "markers_split": (one.was_split for one in answers),
        "lines": (one.count("\n") == other.text.count("\n") for one, other in counts),
        "enforced": (all(one in answer.text for one in case.expected) for case, answer in both),
        "enforced_exact": (case.target == answer.text for case, answer in both),
    }
    return {name: mean(share) for name, share in shares.items()}


class _Answer(NamedTuple):
    text: str
    was_split: bool
    """Whether the text was split around markers that the model lost."""


async def _translated(backend: LocalEngine, texts: list[str], source: str, target: str, **more: Any) -> list[_Answer]:
    """Translate texts by the service's route, a few at once, so that all warnings are in the answers."""

    async def translated(part: list[str]) -> list[_Answer]:
        body = {"source_lang": source, "target_lang": target, "cache": "off", "text_list": part, **more}
        reply = await backend.request(PATH, body)
        if reply.status != 200:
            raise SystemExit(f"the route answered {reply.status}: {reply.reason}")
        warned = {one["field"] for one in reply.value.get("warnings", ()) if "was split around" in one["message"]}
        entries = enumerate(reply.value["translations"])
        return [_Answer(entry["text"], f"text_list[{index}]" in warned) for index, entry in entries]

    parts = [texts[start : start + MAX_WARNINGS] for start in range(0, len(texts), MAX_WARNINGS)]
    return [one for found in await _together(map(translated, parts)) for one in found]


async def _together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of calls, of which a few run at a time."""
    slots = asyncio.Semaphore(32)

    async def limited(call: Awaitable[T]) -> T:
        async with slots:
            return await call

    return await asyncio.gather(*map(limited, calls))


class _Run(NamedTuple):
    """What a run of jobs took."""

    wall: float
    cpu: float
    """Seconds of all threads."""
    cached: int
    """Tokens of prompts from the cache."""
    lengths: dict[int, int]
    """Tokens of each row of the last job."""


def _run(engine: Engine, jobs: list[list[GenerateRequest]]) -> _Run:
    """Run jobs that arrive together."""
    started, cpu_started = time.perf_counter(), time.process_time()
    answers = run_jobs(engine, jobs)
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    lengths = {row: finish.completion_tokens for row, finish in answers[-1].finishes.items()}
    return _Run(wall, cpu, sum(answer.cached_tokens for answer in answers), lengths)


class _Steps:
    """Times of an engine's steps, from the one that samples the last row's first token."""

    def __init__(self, engine: Engine) -> None:
        self._times: list[tuple[float, float]] = []
        """wall, CPU of all threads"""
        self._started = dict[int, Any]()
        """sequences that sampled, by id"""
        self.rows = 0
        commit = engine.jobs.commit

        def timed(rows: list[ScheduledRow], sampled: list[SampledToken], number: int) -> None:
            if len(self._started) < self.rows:
                self._started |= {id(row.sequence): row.sequence for row in rows if row.samples_token}
            if len(self._started) >= self.rows:
                self._times.append((time.perf_counter(), time.process_time()))
            commit(rows, sampled, number)

        setattr(engine.jobs, "commit", timed)  # noqa: B010 - a method

    def read(self) -> _Times:
        """Return the times since the last call."""
        times, self._times, self._started = self._times, [], {}
        steps = tuple(after[0] - before[0] for before, after in itertools.pairwise(times))
        return _Times(times[-1][0] - times[0][0], times[-1][1] - times[0][1], steps)


class _Times(NamedTuple):
    wall: float
    cpu: float
    steps: tuple[float, ...]
    """seconds of each step"""


def _texts(rng: Random, low: int, high: int) -> list[int]:
    """Sample the tokens of a text of `low` to `high` tokens."""
    length, ids = rng.randint(low, high), list[int]()
    while len(ids) < length:
        ids += Tokenizer().encode(fresh_pair(rng).en + " ")
    return ids[:length]


def page_cost(engine: Engine, rounds: int, paragraphs: int) -> dict[str, Any]:
    """Return a page's times by how it gets its context."""
    rng = Random(0)
    texts = [_texts(rng, 40, 80) for _ in range(paragraphs)]
    found: dict[str, list[_Run]] = {}
    counts: dict[str, int] = {}
    for _ in range(rounds):
        context = _texts(rng, CONTEXT_TOKENS, CONTEXT_TOKENS)
        ways = {
            "no_context": ([], False, False),
            "page": (context, True, True),
            "in_each_prompt_cached": ([*context[1:], context[0]], True, False),
            "in_each_prompt": (context, False, False),
        }
        for size, name in ((paragraphs, "page"), (PLUGIN_TEXTS, "plugin")):
            for way, (ids, uses_cache, is_named) in ways.items():
                part = texts if uses_cache or not ids else texts[: max(paragraphs // 10, PLUGIN_TEXTS)]
                before = ids if name == "page" else [*ids[7:], *ids[:7]]  # no state of the other page fits
                rows = [
                    GenerateRequest(
                        prompt=[*before, *text],
                        max_tokens=ANSWER_TOKENS,
                        sampling=SamplingParams(temperature=0.0),
                        ignore_eos=True,
                        chunk_size=0,
                        use_prefix_cache=uses_cache,
                        cached_tokens=len(before) if is_named else 0,
                    )
                    for text in part
                ]
                jobs = [rows[start : start + size] for start in range(0, len(rows), size)]
                found.setdefault(f"{name}: {way}", []).append(_run(engine, jobs))
                counts[f"{name}: {way}"] = len(rows)
    on_cpu = engine.model_runner.device.type == "cpu"
    figures = {}
    for way, runs in found.items():
        wall, cpu, cached = (median(values) for values in zip(*(run[:3] for run in runs), strict=True))
        figures[way] = {"wall": round(wall, 2), "cpu": round(cpu, 2), "cached_tokens": int(cached)}
    measure = "cpu" if on_cpu else "wall"
    for way, values in figures.items():
        base = figures[f"{way.partition(':')[0]}: no_context"]
        values["ratio"] = round(values[measure] / counts[way] / base[measure] * paragraphs, 3)
        values["paragraphs"] = counts[way]
    return figures


def mask_cost(engine: Engine, rows: int, rounds: int, stops: list[bytes]) -> dict[str, Any]:
    """Return the time of tokens with masks over that of tokens without. Pairs run in alternating order.

    stops: texts that end an answer. A random model would write them at once.
    """
    rng = Random(3)
    cases = [pages.markers(rng) if index % 2 else pages.listed_terms(rng) for index in range(rows)]
    limits = [rng.randint(32, 96) for _ in cases]  # a random model ends no answer, and real ones end one by one
    requests = list[GenerateRequest]()
    for case, limit in zip(cases, limits, strict=True):
        glossary = Glossary(dict(case.terms))
        source, target = ("en", "zh") if case.english else ("zh", "en")
        asked = TranslationRequest(
            texts=[case.source], source=source, target=target, glossary=glossary, glossary_mode=GlossaryMode.ENFORCE
        )
        (query,) = TranslationPlan(asked, 1, TranslationCache(0)).missing()
        required = query.required
        constraint = None if required is None else required_constraint(required, ["\n"])
        prompt = Tokenizer().encode(shared_prompt(query) + pages.prompt_of(query))
        row = GenerateRequest(
            prompt=prompt, max_tokens=limit, sampling=SamplingParams(temperature=0.0), stop_strings=stops, chunk_size=0
        )
        requests.append(msgspec.structs.replace(row, constraint=constraint, use_prefix_cache=False))
    unmasked = [msgspec.structs.replace(row, constraint=None) for row in requests]
    # Compiles the automata. Rows without masks get these lengths, else more of them would run at the end.
    lengths = _run(engine, [requests]).lengths
    plain = [
        msgspec.structs.replace(row, max_tokens=lengths[number], ignore_eos=True, stop_strings=[])
        for number, row in enumerate(unmasked)
    ]
    on_cpu = engine.model_runner.device.type == "cpu"
    steps, figures, tokens = _Steps(engine), dict[str, Any](), sum(lengths.values()) - rows
    steps.rows = rows
    times: dict[str, list[_Times]] = {"masks": [], "plain": []}
    masked = sum(row.constraint is not None for row in requests)
    for number in range(-1, rounds):  # the first pair warms up
        pair = [("masks", requests), ("plain", plain)]
        for name, batch in pair[:: -1 if number % 2 else 1]:
            _run(engine, [batch])
            times[name].append(steps.read())
        if number < 0:
            continue
        pairs = list(zip(times["masks"][1:], times["plain"][1:], strict=True))
        ratios = [one.cpu / other.cpu if on_cpu else one.wall / other.wall for one, other in pairs]
        figures = {
            "rows": rows,
            "masked": masked,
            "us": {
                name: round(1e6 * median(one.cpu if on_cpu else one.wall for one in values[1:]) / tokens, 1)
                for name, values in times.items()
            },
            "ratio": round(median(ratios), 3),
            "range": [round(one, 3) for one in (min(ratios), max(ratios))],
            "steps": round(median(median(one.steps) / median(other.steps) for one, other in pairs), 3),
        }
        print("masks", msgspec.json.encode(figures).decode(), flush=True)  # later rounds may be ended by their time
    return figures


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--model-path", type=Path, help="a model file or a compact file; default: the demo model")
    parser.add_argument("--size", choices=SIZES, help="a random model instead; give --cases 0 --kept 0")
    parser.add_argument("--cases", type=int, default=200, help="held-out sentences of each skill")
    parser.add_argument("--skills", nargs="+", choices=SKILLS, default=list(SKILLS), metavar="NAME")
    parser.add_argument("--kept", type=int, default=200, help="held-out sentences of each check of the service")
    parser.add_argument("--paragraphs", type=int, default=PARAGRAPHS)
    parser.add_argument("--rounds", type=int, default=3, help="of the page's cost; 0: none")
    parser.add_argument("--rows", type=int, default=64, help="of the masks' cost: 320 on a GPU")
    parser.add_argument("--mask-rounds", type=int, default=5, help="of the masks' cost; 0: none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = arguments.model_path or MODEL
        if arguments.size:
            given = write_random_file(arguments.size, Path(folder, f"{arguments.size}.safetensors"), arguments.device)
        measure(ensure_model(source=given) if given.suffix == MODEL.suffix else given, arguments)


def measure(model: Path, arguments: argparse.Namespace) -> None:
    """Measure what the arguments name."""
    result: dict[str, Any] = {"program": "bench.translation", "model": model.name, **origin(arguments.commit)}

    def add(name: str, figures: dict[str, Any]) -> None:
        result[name] = figures
        print(name, msgspec.json.encode(figures).decode(), flush=True)  # a later part may be ended by its time

    with open_engine(model, device=arguments.device, dtype=arguments.dtype) as client:
        if arguments.cases:
            add("skills", skills(client, arguments.skills, arguments.cases, arguments.seed))
        if arguments.rounds:
            add("page", page_cost(client.engine, arguments.rounds, arguments.paragraphs))
        if arguments.mask_rounds:
            stops = [] if arguments.size else [b"\n"]
            add("masks", mask_cost(client.engine, arguments.rows, arguments.mask_rounds, stops))
    if arguments.kept:
        flags = ["--model-path", str(model), "--pp-devices", arguments.device, "--dtype", arguments.dtype]
        add("kept", asyncio.run(kept(flags, arguments.kept, arguments.seed)))
    finish(result, arguments.out)


if __name__ == "__main__":
    main()
