"""Parallel masks: several lexers per grammar, and slices of the vocabulary."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import llguidance
import numpy as np
import pytest
import torch

from rwkv_batch.core import grammar_compile_queue
from rwkv_batch.core.grammar_compile_queue import GrammarCompileQueue, Grammars
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.request import Job
from rwkv_batch.tokenizer import VOCAB_SIZE, Tokenizer
from sampling.grammar import compiler as compilers
from sampling.grammar.compiler import GrammarCompiler, make_vocabulary
from sampling.grammar.constraint import Constraint, Form
from sampling.grammar.masks import Masks
from sampling.grammar.matcher import Grammar, Matcher
from test.harness import WAIT_S, make_request

TOKENIZER = Tokenizer()
SHORT = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
THREADS = 2
MOST = 2 * THREADS
"""Lexers of one grammar."""


def regex(source: str) -> Constraint:
    return Constraint(form=Form.REGEX, source=source, field="regex")


@pytest.fixture(scope="module")
def one() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.byte_table, TOKENIZER.encode_bytes, VOCAB_SIZE, threads=THREADS)


@pytest.fixture
def compiler(one: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarCompiler]:
    """A compiler for which no grammar is slow, on any machine."""
    monkeypatch.setattr(compilers, "SLOW_COMPILE_S", 60.0)
    yield one
    one.forget()


def test_rows_of_one_grammar_are_spread_over_lexers(compiler: GrammarCompiler) -> None:
    held = regex("[a-z]{1,9}")
    grammar = compiler.compile(held)
    assert not compiler.needs_lexers(grammar, 8) and compiler.needs_lexers(grammar, 9)
    compiler.add_lexers(held, grammar, 17)
    assert len(grammar.templates) == 3
    rows = [Matcher(grammar) for _ in range(30)]
    compiler.add_lexers(held, grammar, 1)
    assert len(grammar.templates) == MOST, "more are of no use to so few threads"
    room = Masks(VOCAB_SIZE, torch.device("cpu"), THREADS)
    for token in TOKENIZER.encode("abc"):
        masks, errors = room.fill(rows)
        assert errors == [None] * len(rows) and torch.equal(masks, masks[:1].expand_as(masks))
        assert not any(row.advance(token) for row in rows)
    assert sorted({row.template_index for row in rows}) == list(range(MOST))
    rows.clear()
    assert len(grammar.matchers) == 0


def test_one_thread_has_one_lexer_of_a_grammar() -> None:
    compiler = GrammarCompiler(TOKENIZER.byte_table, TOKENIZER.encode_bytes, VOCAB_SIZE, threads=1)
    held = regex("[a-z]{1,9}")
    grammar = compiler.compile(held)
    compiler.add_lexers(held, grammar, 100)
    assert not compiler.needs_lexers(grammar, 100) and len(grammar.templates) == 1


def test_masks_reach_their_rows_from_any_lexer(compiler: GrammarCompiler) -> None:
    digits, letters = regex("[0-9]+x"), regex("[a-z]+0")
    compiled = [compiler.compile(digits), compiler.compile(letters)]
    for held, grammar in zip((digits, letters), compiled, strict=True):
        compiler.add_lexers(held, grammar, 16)
    rows = [Matcher(compiled[number % 2]) for number in range(12)]
    masks, _ = Masks(VOCAB_SIZE, torch.device("cpu"), THREADS).fill(rows)
    for number, mask in enumerate(masks.numpy()):
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        first = {TOKENIZER.byte_table[token][:1] for token in allowed}
        assert all(byte.isalpha() if number % 2 else byte.isdigit() for byte in first)


def test_a_slow_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    held = regex("a+")
    grammar = compiler.compile(held)
    grammar.compile_s = 2 * compilers.SLOW_COMPILE_S
    compiler.add_lexers(held, grammar, 100)
    assert len(grammar.templates) == 1


def test_lexers_count_in_the_cache(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "MAX_CACHED", 5)
    old, new = regex("old"), regex("new")
    compiler.compile(old)
    grammar = compiler.compile(new)
    compiler.add_lexers(new, grammar, 32)
    assert compiler.cached(old) is not None, "five are kept"
    compiler.compile(regex("newest"))
    assert compiler.cached(new) is None and compiler.cached(old) is not None, "the one used longest ago goes"


def test_jobs_of_many_rows_get_lexers_for_later_rows_too(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compile_queue, "THREADS", 1)
    desk = GrammarCompileQueue(lambda: compiler, pytest.fail, lambda: ServiceError(ErrorKind.DRAINING, "it ends"))
    found: list[Grammar] = []
    reported = threading.Event()

    def put(ready: Grammars) -> None:
        found.extend(ready.values())
        reported.set()

    def prepare(name: str, rows: int, source: str = "[a-f]+") -> None:
        reported.clear()
        row = make_request("x", constraint=regex(source), n=rows)
        desk.prepare(Job(job_id=name, rows=[row]), lambda refusal: pytest.fail(f"{refusal}"), put)
        assert reported.wait(WAIT_S)

    prepare("few", 16)
    assert len(found[0].templates) == 2
    prepare("many", 32)
    assert found[1] is found[0]
    prepare("behind", 1, "[g-z]+")  # the queue's only thread has reached it
    assert len(found[0].templates) == MOST
    desk.close()


def test_slices_change_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SHORT))
    texts = ['{"name": "abcdefghijk', '{"name": "é 日本語 of it', '{"name": "", "other": [1.5, "an unbounded']
    masks: list[list[bytes]] = []
    for slices in (compilers.SLICES, ()):
        monkeypatch.setattr(compilers, "SLICES", slices)
        make = make_vocabulary.__wrapped__  # the cached one has all slices
        matcher = llguidance.LLMatcher(make(tuple(TOKENIZER.byte_table), TOKENIZER.encode_bytes, 65536), grammar)
        masks.append([])
        for text in texts:
            matcher.reset()
            for token in TOKENIZER.encode(text):
                masks[-1].append(matcher.compute_bitmask())
                assert matcher.consume_token(token), text
            masks[-1].append(matcher.compute_bitmask())
    assert masks[0] == masks[1]
    assert len(set(masks[0])) > 20


def test_compilers_of_a_process_share_their_vocabulary() -> None:
    first, second = (
        GrammarCompiler(TOKENIZER.byte_table, Tokenizer().encode_bytes, VOCAB_SIZE)._vocabulary for _ in range(2)
    )
    assert first is second
