"""Random JSON schemas, and answers constrained by them: each answer that ends must be valid.

`walk` samples texts from the masks, without a model. `answer` runs a random model through the engine, with a bias
towards closing tokens, so that most answers end. jsonschema-rs, with formats, validates them.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np

from demo.random_weights import write_random_model
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import Engine
from rwkv_batch.request import FinishReason, GenerateRequest, Job, JobEvents
from rwkv_batch.tokenizer import VOCAB_SIZE, Tokenizer
from sampling.grammar.compiler import GrammarCompiler
from sampling.grammar.constraint import Constraint, Form, GrammarError
from sampling.grammar.matcher import Grammar, Matcher
from sampling.params import SamplingParams
from state_pool.config import PoolConfig
from test.engine.random_schemas import Schema, random_schema

MAX_TOKENS = 300
CLOSING_BIAS = 12.0
"""Added to the logits of closing tokens."""
WAIT_S = 600.0
TOKENIZER = Tokenizer()
CLOSING = [i for i, token in enumerate(TOKENIZER.byte_table) if token and not token.strip(b'"}],')]


def constraint_of(schema: Schema) -> Constraint:
    return Constraint(form=Form.JSON_SCHEMA, source=json.dumps(schema), field="json_schema")


def fault(schema: Schema, text: bytes) -> str:
    """Why a text is not a valid answer; "" if it is."""
    try:
        validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        validator.validate(json.loads(text, parse_float=_finite))
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return ""


def _finite(digits: str) -> float:
    """A JSON number. Numbers beyond double range count as the largest one, because the validator has no others."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(digits)))


def random_text(grammar: Grammar, rng: random.Random) -> bytes | None:
    """A text sampled from the masks; None if it did not end. Raises GrammarError at a dead end."""
    matcher, mask, text = Matcher(grammar), np.zeros(VOCAB_SIZE // 32, dtype=np.int32), b""
    for _ in range(MAX_TOKENS):
        matcher.state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.state.is_error():
            raise GrammarError(matcher.state.get_error())
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
        closing = [token for token in CLOSING if allowed[token]]
        if allowed[0] and (rng.random() < 0.5 or allowed.sum() == 1):
            return text
        choice = closing if closing and rng.random() < 0.6 else np.flatnonzero(allowed).tolist()
        token = rng.choice(choice)
        text += TOKENIZER.byte_table[token]
        if matcher.advance(token):
            return text
    return None


def walk(schemas: Iterable[tuple[int, Schema]], walks: int) -> tuple[Counter[str], list[str]]:
    """Sample texts without a model. Returns the counts and every invalid text."""
    compiler = GrammarCompiler(TOKENIZER.byte_table, TOKENIZER.encode_bytes, VOCAB_SIZE)
    counted: Counter[str] = Counter()
    wrong: list[str] = []
    for number, schema in schemas:
        try:
            grammar = compiler.compile(constraint_of(schema))
        except GrammarError as error:
            counted[f"refused: {str(error)[:50]}"] += 1
            continue
        counted["served"] += 1
        for turn in range(walks):
            try:
                text = random_text(grammar, random.Random(number * 1000 + turn))
            except GrammarError:
                counted["dead end"] += 1
                continue
            counted["unfinished" if text is None else "finished"] += 1
            if text is not None and (why := fault(schema, text)):
                wrong.append(f"schema {number}: {text!r}: {why}: {json.dumps(schema)}")
    return counted, wrong


class Answers:
    """One job per schema, and its end."""

    def __init__(self, engine: Engine, rows: int) -> None:
        self._engine = engine
        self._places = threading.Semaphore(rows)
        self._texts: dict[str, bytes] = {}
        self.counted: Counter[str] = Counter()
        self.wrong: list[str] = []

    def ask(self, number: int, schema: Schema) -> None:
        """Submit a job when the number in flight permits."""
        assert self._places.acquire(timeout=WAIT_S)
        bias = dict.fromkeys(CLOSING, CLOSING_BIAS)
        row = GenerateRequest(
            prompt=[300 + number % 60000],
            max_tokens=MAX_TOKENS,
            sampling=SamplingParams(seed=number, top_p=0.95, logit_bias=bias),
            constraint=constraint_of(schema),
        )
        name = f"schema{number}"
        self._texts[name] = b""

        def on_admitted(refusal: Any) -> None:
            if refusal is not None:
                assert refusal.info.field.startswith("json_schema"), refusal.info
                self.counted["refused"] += 1
                self._places.release()

        def sink(events: JobEvents) -> None:
            self._texts[name] += b"".join(delta.text for delta in events.deltas)
            if events.done:
                finishes = [delta.finish for delta in events.deltas if delta.finish is not None]
                self._judge(number, schema, finishes[0].reason if finishes else FinishReason.ERROR)
                self._places.release()

        self._engine.submit(Job(job_id=name, rows=[row]), sink, on_admitted)

    def _judge(self, number: int, schema: Schema, reason: FinishReason) -> None:
        text = self._texts.pop(f"schema{number}")
        self.counted[f"ended: {reason}"] += 1
        if reason is FinishReason.STOP and (why := fault(schema, text)):
            self.wrong.append(f"schema {number}: {text!r}: {why}: {json.dumps(schema)}")

    def wait(self, rows: int) -> None:
        for _ in range(rows):
            assert self._places.acquire(timeout=WAIT_S)


def answer(schemas: Iterable[tuple[int, Schema]], rows: int) -> tuple[Counter[str], list[str]]:
    """Run a random model. Returns the counts and every invalid answer."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_model(Path(folder) / "m.safetensors", layers=2, width=128)
        pool = PoolConfig(state_db="")
        engine = Engine(EngineConfig(model_path=str(path), pool=pool, devices=("cpu",), max_running=2 * rows))
        engine.start()
        try:
            answers = Answers(engine, rows)
            for number, schema in schemas:
                answers.ask(number, schema)
            answers.wait(rows)
        finally:
            engine.stop()
    return answers.counted, answers.wrong


def numbered(count: int) -> Iterator[tuple[int, Schema]]:
    """The first schemas by seed."""
    return ((number, random_schema(random.Random(number))) for number in range(count))
