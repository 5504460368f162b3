"""Constrained rows together with other rows: alone and in batches, in every loop, with every kind of end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch

from rwkv_batch.engine import Engine
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.request import FinishReason, GenerateRequest, Resumed
from sampling.grammar import masks
from sampling.grammar.compiler import GrammarCompiler
from sampling.grammar.constraint import Constraint, Form, GrammarError, SchemaRule
from sampling.grammar.matcher import Matcher
from sampling.params import Method, SamplingParams
from test.conftest import rest_slow
from test.engine.schema_answers import answer, numbered, walk
from test.harness import TOKENIZER, RunningJob, call, make_request, run, started_engine, submit, turn

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "code"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
LOOPS: dict[str, dict[str, Any]] = {
    "plain": {"samplers": ("cpu",)},
    "naive": {"samplers": ("naive",)},
    "overlapped": {"overlap_on_cpu": True},
    "pipeline": {"devices": ("cpu", "cpu"), "micro_batches": 3, "overlap_on_cpu": True},
}


def schema(value: Any, **fields: Any) -> Constraint:
    return Constraint(form=Form.JSON_SCHEMA, source=json.dumps(value), field="json_schema", **fields)


def choice(*texts: str) -> Constraint:
    return Constraint(form=Form.CHOICE, source=json.dumps(texts), field="choice")


def lark(source: str) -> Constraint:
    return Constraint(form=Form.LARK, source=source, field="grammar")


def regex(source: str, **fields: Any) -> Constraint:
    return Constraint(form=Form.REGEX, source=source, field="regex", **fields)


@pytest.fixture(scope="module", params=["plain", "pipeline"])
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with started_engine(model, **LOOPS[request.param]) as started:
        yield started


def mixed_rows() -> list[GenerateRequest]:
    """Rows of all kinds; every other one has no constraint."""
    samples = {"max_tokens": 40, "sampling": SamplingParams(seed=7, top_p=0.9, presence_penalty=0.5)}
    return [
        make_request("A person:", constraint=schema(PERSON), **samples),
        make_request("Once upon a time", **samples),
        make_request("Yes or no?", constraint=choice("yes", "no", "no | yes?\n")),
        make_request("Greedily"),
        make_request("A number:", constraint=regex("[0-9]{3}-(foo|bar)"), **samples),
        make_request("By noise", sampling=SamplingParams(method=Method.NOISE, noise=2.0, seed=3)),
        make_request("A sum:", constraint=lark('start: N ("+" N)+ "="\nN: /[0-9]{1,3}/'), **samples),
        make_request("As simple", constraint=choice("0", "1"), sampling=SamplingParams(method=Method.NOISE, noise=2.0)),
        make_request("With markers", constraint=MARKED, **samples),
        make_request("Which ends early", constraint=MARKED, **ends_early()),
        make_request("Too late", constraint=MARKED, max_tokens=14, sampling=SamplingParams(seed=2)),
    ]


MARKED = Constraint(
    form=Form.REQUIRED_TEXT,
    source=json.dumps(
        {"markers": ["<0>", "{x}", "</0>"], "partners": [2, -1, 0], "leads": "<{", "words": [[["tea", "teas"], 1]]}
    ),
)


def ends_early() -> dict[str, Any]:
    return {"ignore_eos": False, "sampling": SamplingParams(seed=4, logit_bias={0: 100.0})}


def by_row(running: RunningJob) -> list[tuple[bytes, FinishReason, int]]:
    ends = (running.finishes[row] for row in range(len(running.finishes)))
    return [(text, end.reason, end.completion_tokens) for text, end in zip(running.all_texts, ends, strict=True)]


@pytest.fixture(scope="module")
def plain_answers(model: Path) -> list[tuple[bytes, FinishReason, int]]:
    """The answers of the loop with one step in flight. They are the reference."""
    with started_engine(model, **LOOPS["plain"]) as started:
        return by_row(run(started, *mixed_rows()))


@pytest.mark.parametrize("engine", rest_slow(LOOPS, long=["naive"]), indirect=True)
def test_rows_give_the_same_text_alone_and_batched_in_every_loop_and_sampler(
    engine: Engine, plain_answers: list[tuple[bytes, FinishReason, int]]
) -> None:
    together = by_row(run(engine, *mixed_rows()))
    alone = [by_row(run(engine, row))[0] for row in mixed_rows()]
    assert together == alone == plain_answers
    jsonschema_rs.validate(PERSON, json.loads(together[0][0]))
    assert together[0][1] is FinishReason.STOP
    assert together[2][0].decode() in ("yes", "no", "no | yes?\n")
    assert together[4][0][:3].isdigit() and together[4][0][3:] in (b"-foo", b"-bar")
    assert together[7][0] in (b"0", b"1")
    assert together[9][:2] == (b"<0></0>{x} tea", FinishReason.STOP)
    assert together[10][0].endswith(b"<0></0>{x} tea")


def test_a_text_that_the_constraint_completes_says_so(engine: Engine) -> None:
    ended = run(engine, make_request("Which ends early", constraint=MARKED, **ends_early()), make_request("Free"))
    assert [ended.finishes[row].was_completed for row in range(2)] == [True, False]


def test_a_lost_engines_tokens_are_followed_by_what_the_grammar_allows(engine: Engine) -> None:
    asked: dict[str, Any] = {"constraint": regex("[a-z]{3}-[0-9]{4}-end"), "max_tokens": 30}
    whole = run(engine, make_request("id: ", **asked), return_token_ids=True)
    ids = [token for events in whole.events for delta in events.deltas for token in delta.token_ids]
    for count in (1, len(ids) // 2):
        rest = run(engine, make_request("id: ", **asked, resumed=Resumed(token_ids=ids[:count], shown=0)))
        assert whole.all_texts[0].endswith(rest.all_texts[0]) and len(rest.all_texts[0]) < len(whole.all_texts[0])


def test_a_complete_text_ends_without_an_end_token(engine: Engine) -> None:
    row = make_request("Well?", constraint=choice("yes"), ignore_eos=True)
    ended = run(engine, row)
    assert ended.all_texts == [b"yes"]
    assert ended.finishes[0].reason is FinishReason.STOP
    longest = run(
        engine, make_request("Well?", constraint=choice("yes"), max_tokens=ended.finishes[0].completion_tokens)
    )
    assert longest.finishes[0].reason is FinishReason.STOP, "the last allowed token completes the text"


def test_an_empty_text_is_an_answer_too(engine: Engine) -> None:
    ended = run(engine, make_request("Well?", constraint=regex("(nothing)?"), ignore_eos=False))
    assert ended.all_texts[0] in (b"", b"nothing")
    assert run(engine, make_request("Well?", constraint=regex(""), ignore_eos=True)).all_texts == [b""]


def test_max_tokens_limits_constrained_rows(engine: Engine) -> None:
    ended = run(engine, make_request("Go", constraint=regex("[a-z]{500}"), max_tokens=4))
    assert ended.finishes[0].reason is FinishReason.LENGTH
    assert ended.finishes[0].completion_tokens == 4


def test_stops_keep_their_meaning(engine: Engine) -> None:
    row = make_request("Count", constraint=lark('start: "one" " two" " three"'), stop_strings=[b" two"])
    ended = run(engine, row)
    assert (ended.all_texts[0], ended.finishes[0].reason) == (b"one", FinishReason.STOP)


def test_log_probabilities_cover_the_allowed_tokens(engine: Engine) -> None:
    row = make_request("Yes or no?", constraint=choice("yes", "no"), sampling=SamplingParams(seed=5, top_logprobs=5))
    running = run(engine, row, make_request("Free"))
    entries = [entry for event in running.events for delta in event.deltas for entry in delta.logprobs or ()]
    assert b"".join(entry.token for entry in entries) == running.all_texts[0]
    allowed = {token for token in TOKENIZER.byte_table if token and any(w.startswith(token) for w in (b"yes", b"no"))}
    assert {token for token, _ in entries[0].top} <= allowed
    assert max(value for _, value in entries[0].top) > -10, "the allowed tokens have a total probability of 1"


def test_continuations_of_one_prompt_follow_the_grammar_independently(engine: Engine) -> None:
    digits = regex("[0-9]{6}")
    sampling_params = SamplingParams(seed=11)
    many = run(engine, make_request("Six digits, please:", constraint=digits, n=4, sampling=sampling_params)).all_texts
    singles = [
        run(
            engine, make_request("Six digits, please:", constraint=digits, sampling=SamplingParams(seed=11 + i))
        ).all_texts[0]
        for i in range(4)
    ]
    assert many == singles
    assert len(set(many)) > 1
    assert all(len(text) == 6 and text.isdigit() for text in many)


def test_sessions_keep_constrained_text(engine: Engine) -> None:
    name = f"s{id(engine)}"
    first = run(engine, turn(name, "User: yes or no?", constraint=choice("yes", "no")))
    assert first.all_texts[0] in (b"yes", b"no")
    prompt = "User: yes or no?" + first.all_texts[0].decode()
    second = run(engine, turn(name, "\n\nAnd a number?", constraint=regex("[0-9]{4}")))
    whole = TOKENIZER.encode("User: yes or no?") + TOKENIZER.encode(first.all_texts[0].decode())
    replayed = make_request([*whole, *TOKENIZER.encode("\n\nAnd a number?")], constraint=regex("[0-9]{4}"))
    assert run(engine, replayed).all_texts == second.all_texts, prompt


@pytest.mark.parametrize(
    ("given", "text", "fits"),
    [
        ({"format": "date-time"}, "2024-02-29T23:59:59Z", True),
        ({"format": "date-time"}, "2024-02-29T13:20:60Z", False),
        ({"format": "time", "pattern": "Z$"}, "13:20:60Z", False),
        ({"format": "time", "pattern": "Z$"}, "13:20:59Z", True),
        ({"format": "email"}, "a" * 65 + "@example.com", False),
        ({"format": "email"}, "joe@example.com", True),
    ],
)
def test_formats_are_as_strict_as_validators(given: dict[str, str], text: str, fits: bool) -> None:
    compiler = GrammarCompiler(TOKENIZER.byte_table, TOKENIZER.encode_bytes, 65536)
    nested = {"type": "array", "items": {"anyOf": [{"type": "string", **given}]}}
    state = Matcher(compiler.compile(schema(nested))).state
    tokens = TOKENIZER.encode(json.dumps([text]))
    assert (state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()) is fits


@pytest.mark.parametrize(
    ("constraint", "place", "said"),
    [
        (schema({"properties": {"a": {"items": {"not": {}}}}}), "json_schema.properties.a.items", "not"),
        (schema({"$defs": {"x": {"type": "strin"}}, "$ref": "#/$defs/x"}), "json_schema.$defs.x", "strin"),
        (schema({"$ref": "http://example.com/s"}), "json_schema", "http://example.com/s"),
        (schema(False), "json_schema", "false"),
        (lark("start: foo"), "grammar", "foo"),
        (regex("("), "regex", "unclosed group"),
        (regex("a" * 200_000), "regex", "131072"),
        (schema({"type": "object", "minProperties": 3, "maxProperties": 1}), "json_schema", "roperties"),
    ],
)
def test_unsupported_constraints_are_refused_with_their_location(
    engine: Engine, constraint: Constraint, place: str, said: str
) -> None:
    with pytest.raises(ServiceError) as refused:
        run(engine, make_request("x", constraint=constraint))
    info = refused.value.info
    assert (info.kind, info.field) == (ErrorKind.INVALID_FIELD, place), info
    assert any(part in info.message for part in said.split("|")), info


@pytest.mark.parametrize(
    ("constraint", "given"),
    [
        (schema({"properties": {"a": {"items": {"not": {}}}}}), '{"not": {}}'),
        (schema({"items": {"const": float("nan")}}), "NaN"),
        (regex("(" * 300), "(" * 200 + "... (300 characters)"),
        (
            Constraint(
                form=Form.LARK,
                source="start: x",
                rules=(SchemaRule(name="x", source=json.dumps({"items": {"not": {}}}), field="tools[0]"),),
            ),
            '{"not": {}}',
        ),
    ],
)
def test_a_refusal_shows_the_given_constraint(engine: Engine, constraint: Constraint, given: str) -> None:
    with pytest.raises(ServiceError) as refused:
        run(engine, make_request("x", constraint=constraint))
    assert refused.value.info.given == given


def test_a_non_strict_schema_ignores_unsupported_keywords(engine: Engine) -> None:
    loose = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"], "not": {}}
    ended = run(engine, make_request("x", constraint=schema({**loose, "additionalProperties": False}, strict=False)))
    assert isinstance(json.loads(ended.all_texts[0])["a"], int)


def test_a_row_without_an_allowed_token_ends_only_its_request(engine: Engine) -> None:
    banned = {i: float("-inf") for i, token in enumerate(TOKENIZER.byte_table) if token.startswith(b"y")}
    failing = submit(engine, make_request("x", constraint=choice("yes"), sampling=SamplingParams(logit_bias=banned)))
    other = submit(engine, make_request("y", constraint=choice("yes")), make_request("free"))
    error = failing.wait().events[-1].error
    assert error is not None and (error.kind, error.field) == (ErrorKind.INVALID_FIELD, "logit_bias")
    assert error.message == (
        f"logit_bias: it bans {len(banned)} tokens, and with them every token that choice allows next; ban fewer"
    )
    assert other.wait().all_texts[0] == b"yes"


def test_a_grammar_that_is_too_ambiguous_ends_only_its_request(engine: Engine) -> None:
    wild = lark('start: s\ns: s s | s s s | "a" | ""')
    failing = submit(engine, make_request("x", constraint=wild, max_tokens=400, ignore_eos=True))
    other = submit(engine, make_request("y", constraint=schema(PERSON), max_tokens=60), make_request("free"))
    assert other.wait().finishes.keys() == {0, 1}
    error = failing.wait().events[-1].error
    assert error is not None and error.field == "grammar", failing.all_texts


def test_reasoning_may_precede_constrained_text(engine: Engine) -> None:
    row = make_request("x", constraint=regex("[0-9]{3}", after="e"), max_tokens=400, sampling=SamplingParams(seed=2))
    text = run(engine, row).all_texts[0].decode(errors="replace")
    thought, _, answer = text.partition("e")
    assert len(answer) == 3 and answer.isdigit(), text
    assert thought


def test_a_job_may_be_cancelled_while_its_grammar_is_compiled(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, gate = threading.Event(), threading.Event()
    compile_grammar = GrammarCompiler.compile

    def held(self: GrammarCompiler, *arguments: Any) -> Any:
        entered.set()
        assert gate.wait(60)
        return compile_grammar(self, *arguments)

    monkeypatch.setattr(GrammarCompiler, "compile", held)
    with started_engine(model) as engine:
        cancelled = submit(engine, make_request("x", constraint=choice("a")))
        assert entered.wait(60)
        free = run(engine, make_request("free rows do not wait for a compiler"))
        assert free.finishes[0].reason is not FinishReason.ERROR
        engine.cancel(cancelled.job.job_id)
        gate.set()
        cancelled.wait()
        assert cancelled.refusal is not None and cancelled.refusal.info.kind is ErrorKind.CANCELLED
        assert call(engine, "status")["running_rows"] == 0


def test_failed_sampling_ends_only_constrained_rows(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started_engine(model, overlap_on_cpu=True) as engine:
        run(engine, make_request("warm", constraint=choice("a")))

        def failing(*arguments: Any) -> Any:
            raise RuntimeError("the masks are broken")

        free = submit(engine, make_request("free", max_tokens=30, ignore_eos=True))
        with monkeypatch.context() as patched:
            patched.setattr(engine.model_runner.step_sampler._masks, "fill", failing)
            held = submit(engine, make_request("held", constraint=choice("yes"))).wait()
        assert held.events[-1].error is not None and "masks are broken" in held.events[-1].error.message
        assert free.wait().finishes[0].completion_tokens == 30
        assert run(engine, make_request("held", constraint=choice("yes"))).all_texts == [b"yes"]


def test_a_grammar_whose_masks_take_long_is_found_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(TOKENIZER.byte_table, TOKENIZER.encode_bytes, 65536)
    slow, quick = compiler.compile(choice("slow")), compiler.compile(choice("quick"))
    monkeypatch.setattr(masks, "SLOW_STEP_S", 0.0)
    room = masks.Masks(65536, torch.device("cpu"), threads=2)
    rows = [Matcher(slow), Matcher(quick)]
    assert room.fill(rows)[1] == [None, None]
    assert slow.masks == quick.masks == 0, "steps are timed only after a slow one"
    assert room.fill(rows)[1] == [None, None]
    assert slow.masks == quick.masks == 1
    slow.mask_s += 1.0
    _, errors = room.fill(rows)
    assert errors[0] is not None and errors[1] is None
    with pytest.raises(GrammarError):
        compiler.compile(choice("slow"))


def test_texts_that_masks_allow_are_valid() -> None:
    counted, wrong = walk(numbered(60), walks=1)
    assert not wrong, "\n".join(wrong)
    assert counted["served"] >= 40 and counted["finished"] >= 35, counted
    assert any(name.startswith("refused") for name in counted), "some keywords cannot be held to"
    assert not counted["dead end"]


def test_schemas_with_dead_ends_are_refused_in_advance() -> None:
    """Schemas among the first thousand that once led to a dead end."""
    random_ones = dict(numbered(543))
    counted, _ = walk(((number, random_ones[number]) for number in (36, 345, 518, 542)), walks=2)
    assert list(counted.values()) == [4] and "no value can end" in next(iter(counted)), counted


def test_answers_of_a_random_model_are_valid() -> None:
    counted, wrong = answer(islice(numbered(200), 150, 174), rows=24)
    assert not wrong, "\n".join(wrong)
    assert counted["ended: stop"] >= 10, counted
