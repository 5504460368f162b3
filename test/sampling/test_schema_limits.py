"""Schemas that llguidance enforces too loosely, and grammars that match no text."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from rwkv_batch.tokenizer import VOCAB_SIZE, Tokenizer
from sampling.grammar.compile_sandbox import CompileSandbox
from sampling.grammar.compiler import GrammarCompiler
from sampling.grammar.constraint import MAX_MESSAGE, Constraint, Form, GrammarError, SchemaRule
from sampling.grammar.error_location import schema_at
from sampling.grammar.matcher import Matcher
from sampling.grammar.schema_restrictions import MAX_VISITS, check_terminates

TOKENIZER = Tokenizer()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    table = TOKENIZER.byte_table
    made = GrammarCompiler(table, TOKENIZER.encode_bytes, VOCAB_SIZE, CompileSandbox(table, VOCAB_SIZE))
    yield made
    made.close()


def schema(value: Any, **fields: Any) -> Constraint:
    return Constraint(form=Form.JSON_SCHEMA, source=json.dumps(value), field="json_schema", **fields)


def takes(compiler: GrammarCompiler, constraint: Constraint, value: Any) -> bool:
    ids = TOKENIZER.encode(json.dumps(value, ensure_ascii=False))
    state = Matcher(compiler.compile(constraint)).state
    return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


def refusal(compiler: GrammarCompiler, constraint: Constraint, why: str = "") -> GrammarError:
    """Return the error that refuses a constraint."""
    with pytest.raises(GrammarError, match=why) as found:
        compiler.compile(constraint)
    return found.value


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29", "2023-02-28", "2023-12-31"], ["2021-02-29", "1900-02-29", "2024-02-30"]),
        ("date-time", ["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z", "2023-03-01T10:00:60Z"]),
    ],
)
def test_real_dates(compiler: GrammarCompiler, form: str, good: list[str], bad: list[str]) -> None:
    for pattern in ({}, {"pattern": "^[0-9]"}):
        held = schema({"type": "string", "format": form, **pattern})
        assert [text for text in [*good, *bad] if takes(compiler, held, text)] == good


@pytest.mark.parametrize(
    ("pattern", "text", "is_taken"),
    [
        (r"^\S$", "\ufeff", False),
        (r"^\S$", "a", True),
        (r"^\s$", "\ufeff", True),
        (r"^[\s]$", "\ufeff", True),
        (r"^[^\s]$", "\ufeff", False),
        (r"^\\S$", r"\S", True),
    ],
)
def test_white_space_of_patterns(compiler: GrammarCompiler, pattern: str, text: str, is_taken: bool) -> None:
    assert takes(compiler, schema({"type": "string", "pattern": pattern}), text) is is_taken


def test_inexact_limits_are_refused_with_their_place(compiler: GrammarCompiler) -> None:
    limits = [{"minimum": 1e300, "maximum": 1e301}, {"exclusiveMinimum": 2**53 + 1}, {"maximum": -(2**60)}]
    for limit in limits:
        held = {"properties": {"a": {"items": {"type": "integer", **limit}}}}
        assert refusal(compiler, schema(held), r"beyond 2\^53").place == ".properties.a.items"
        compiler.compile(schema(held, strict=False))
        rule = SchemaRule(name="x", source=json.dumps(held), field="tools[0]")
        error = refusal(compiler, Constraint(form=Form.LARK, source="start: x\n", rules=(rule,)))
        assert (error.field, error.place) == ("tools[0]", ".properties.a.items")
    assert takes(compiler, schema({"type": "integer", "minimum": 2**53}), 2**53)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "9" * 400, str(2**53 + 1), str(-(2**63))])
def test_unsupported_numbers_are_refused_with_their_place(compiler: GrammarCompiler, number: str, strict: bool) -> None:
    sources = {'{"const": %s}': ".const", '{"items": {"enum": [1, {"a": %s}]}}': ".items.enum[1].a"}
    if number in ("NaN", "-Infinity", "1e999"):
        sources['{"properties": {"a": {"type": "number", "minimum": %s}}}'] = ".properties.a.minimum"
    for source, place in sources.items():
        held = Constraint(form=Form.JSON_SCHEMA, source=source % number, strict=strict)
        assert refusal(compiler, held, r"^(NaN.* not supported|an integer of .* out of range)").place == place
    for value in (2**53, -(2**53), 0.1, {"const": 2**53 - 1}):
        assert takes(compiler, schema({"const": value, "title": 2**60}, strict=strict), value)
    held = schema({"properties": {"const": {"maxLength": 10**19, "minLength": 10**20 - 1}}})
    assert refusal(compiler, held, r"^an integer of 20 digits").place == ".properties.const.minLength"


def test_a_number_is_exact_or_refused(compiler: GrammarCompiler) -> None:
    dice = random.Random(3)
    sampled = [float(f"{dice.random():.{dice.randint(2, 17)}g}e{dice.randint(-30, 30)}") for _ in range(100)]
    reported = 0
    for number in [*sampled, 0.9128847372842237, 4.017736544633e-14, 1e22, 0.25, -12.5]:
        try:
            text = Matcher(compiler.compile(schema({"const": [number]}))).state.compute_ff_bytes()
        except GrammarError as error:
            assert error.place == ".const[0]"
        else:
            reported += 1
            assert float(text[1:-1]) == number
    assert 20 < reported < 100


@pytest.mark.parametrize(
    "value", [{"maximum": 10**400}, {"type": "x" * 5000}, {"type": "string", "pattern": "(" * 999}]
)
def test_a_message_is_short(compiler: GrammarCompiler, value: Any) -> None:
    assert len(str(refusal(compiler, schema(value)))) <= MAX_MESSAGE + 3


def test_a_schema_cannot_change_the_json_style(compiler: GrammarCompiler) -> None:
    held = schema({"type": "array", "x-guidance": {"item_separator": "[xy]"}})
    assert takes(compiler, held, [1, 2])


@pytest.mark.parametrize(
    "constraint",
    [
        schema({"$ref": "#"}),
        schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        Constraint(form=Form.REGEX, source=r"[^\s\S]"),
    ],
    ids=["itself", "each other", "nothing"],
)
def test_a_grammar_without_texts_is_refused(compiler: GrammarCompiler, constraint: Constraint) -> None:
    refusal(compiler, constraint, r"no text matches it|no value can end")


def test_too_many_alternatives_are_refused(compiler: GrammarCompiler) -> None:
    held = Constraint(form=Form.LARK, source="start:" + ' "a"?' * 500)
    refusal(compiler, held, r"takes too much to follow: .*\(limit")


def test_the_one_of_error_uses_the_requests_words(compiler: GrammarCompiler) -> None:
    held = schema({"oneOf": [{"type": "integer"}, {"type": "number"}]})
    refusal(compiler, held, "more than one branch of oneOf may match; write anyOf")


LIST = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
PAIR = {"type": "array", "items": {"$ref": "#/$defs/pair"}, "minItems": 1}


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"$ref": "#"}, ""),
        (LIST, ""),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
         ".properties.a"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}], "$defs": {"pair": PAIR}}, ".anyOf[1]"),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, ""),
        ({"allOf": [{"type": "object"}, {"$ref": "#/allOf/1"}]}, ""),
    ],
)  # fmt: skip
def test_an_endless_schema_is_refused_with_its_place(compiler: GrammarCompiler, value: Any, place: str) -> None:
    for strict in (True, False):
        assert refusal(compiler, schema(value, strict=strict), "no value can end").place == place


@pytest.mark.parametrize(
    ("schema_value", "answer"),
    [
        ({**LIST, "required": []}, {"next": {"next": {}}}),
        ({**LIST, "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}, {"next": {"next": None}}),
        ({**PAIR, "$defs": {"pair": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}}, [[]]),
        ({"type": "null", "$defs": {"unused": {"$ref": "#/$defs/unused"}}}, None),
    ],
)
def test_a_recursive_schema_that_ends_is_accepted(compiler: GrammarCompiler, schema_value: Any, answer: Any) -> None:
    assert takes(compiler, schema(schema_value), answer)


@pytest.mark.parametrize(
    ("fault", "why"),
    [({"not": {"type": "string"}}, "Unimplemented keys"), ({"$ref": "#/nope"}, "'/nope' does not exist")],
)
def test_the_place_belongs_to_the_reported_error(compiler: GrammarCompiler, fault: Any, why: str) -> None:
    """Alone, other parts may have other errors."""
    kinds = {name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]} for name in "ab"}
    either = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    held = schema({"type": "object", "properties": {"u": either, "z": fault}, "$defs": kinds})
    assert refusal(compiler, held, why).place == ".properties.z"


def test_other_errors_of_a_recursive_schema_are_reported(compiler: GrammarCompiler) -> None:
    children = {"type": "array", "uniqueItems": True, "items": {"$ref": "#"}}
    held = {"type": "object", "properties": {"parent": {"$ref": "#"}, "children": children}}
    rule = SchemaRule(name="x", source=json.dumps(held), field="tools[0]")
    for constraint, field in (
        (schema(held), ""),
        (Constraint(form=Form.LARK, source="start: x\n", rules=(rule,)), "tools[0]"),
    ):
        error = refusal(compiler, constraint, "uniqueItems")
        assert (error.field, error.place) == (field, ".properties.children")


def test_an_endless_rule_is_refused_with_its_field(compiler: GrammarCompiler) -> None:
    held = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}], "$defs": {"pair": PAIR}}
    rule = SchemaRule(name="x", source=json.dumps(held), field="tools[0]")
    error = refusal(compiler, Constraint(form=Form.LARK, source="start: x\n", rules=(rule,)), "no value can end")
    assert (error.field, error.place) == ("tools[0]", ".anyOf[1]")


class Counted(dict[str, Any]):
    """A part that counts its reads."""

    asked = 0

    def get(self, key: str, default: Any = None) -> Any:
        """As in dict."""
        Counted.asked += 1
        return super().get(key, default)


def test_visits_of_referenced_parts_are_limited() -> None:
    inner: dict[str, Any] = {"allOf": [Counted() for _ in range(3000)]}
    for _ in range(200):
        inner = {"allOf": [inner]}
    names = ["#/$defs/a" + "/allOf/0" * level for level in range(200)]
    Counted.asked = 0
    check_terminates({"anyOf": [{"$ref": name} for name in names], "$defs": {"a": inner}})
    assert Counted.asked < 20 * MAX_VISITS


def test_a_part_with_many_names_is_visited_once() -> None:
    names = ["#/$defs/" + "".join(tildes) for tildes in itertools.product(("~", "~0"), repeat=6)]
    part = {"type": "array", "minItems": 1, "allOf": [{} for _ in range(3000)], "items": {"$ref": names[0]}}
    with pytest.raises(GrammarError, match="no value can end"):
        check_terminates({"anyOf": [{"$ref": name} for name in names], "$defs": {"~~~~~~": part}})


@pytest.mark.parametrize("links", [300, 3000])
def test_visits_of_long_reference_chains_are_limited(compiler: GrammarCompiler, links: int) -> None:
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(links)}
    whole = {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{links}": {"type": "null"}}}
    check_terminates(whole)
    if links < 1000:
        with pytest.raises(GrammarError, match="no value can end"):
            check_terminates({"$ref": "#/$defs/d0", "$defs": {**chain, f"d{links}": {"$ref": "#/$defs/d0"}}})


def test_endless_jump_forward_text_is_an_error(compiler: GrammarCompiler) -> None:
    matcher = Matcher(compiler.compile(schema({"type": "array", "items": {"const": 1}, "minItems": 10**9})))
    matcher.advance(TOKENIZER.encode("[")[0])
    matcher.jump_forward_tokens()
    with pytest.raises(GrammarError, match="takes too much to follow"):
        matcher.advance(TOKENIZER.encode("1")[0])


TWICE = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    ("properties", "more", "place"),
    [
        ({"b": {"$ref": "#/properties/a"}, "a": {"type": "string"}, "c": TWICE}, {}, ".properties.c"),
        ({"b": {"$ref": "#/properties/a"}, "a": TWICE}, {}, ".properties.a"),
        ({"b": {"items": {"$ref": "#"}}, "a": TWICE}, {}, ".properties.a"),
        ({"b": {"items": {"$ref": "#"}}}, {"not": {}}, ""),
        (
            {"b": {"$ref": "#/properties/a~1/items"}, "a/": {"items": {"items": TWICE}}},
            {},
            ".properties.a/.items.items",
        ),
        ({"b": {"$ref": "#/$defs/a"}}, {"$defs": {"a": {"items": {"$ref": "#/$defs/c"}}, "c": TWICE}}, ".$defs.c"),
        ({"b": {"$ref": "#/nowhere"}, "a": {"type": "string"}}, {}, ".properties.b"),
    ],
)
def test_the_place_of_an_error_behind_references(
    compiler: GrammarCompiler, properties: dict[str, Any], more: dict[str, Any], place: str
) -> None:
    held = schema({"$id": "http://test/s", "type": "object", "properties": properties, **more})
    assert refusal(compiler, held).place == place


def test_unique_items_false_is_ignored(compiler: GrammarCompiler) -> None:
    assert takes(compiler, schema({"items": {"uniqueItems": False, "type": "array"}}), [[1, 1]])
    assert refusal(compiler, schema({"items": {"uniqueItems": True, "type": "array"}}), "uniqueItems").place == ".items"


def test_the_schema_at_a_place() -> None:
    held = {"a": {"b.c": [1, {"d": 2}], "b": {"c": [3]}, "[0]": 4}, "a.b": 5}
    expected = {"": held, ".a.b.c[1].d": 2, ".a.b.c[2]": None, ".a.[0]": 4, ".a[0]": None, ".nowhere": None}
    assert {place: json.loads(schema_at(json.dumps(held), place)) for place in expected} == expected
    assert schema_at("{", ".a") == "{"
