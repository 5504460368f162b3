"""Compiles constraints to grammars and caches the latest. Thread-safe; llguidance releases the GIL."""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import llguidance

from sampling.grammar.compile_sandbox import CompileSandbox
from sampling.grammar.constraint import MAX_SOURCE_CHARACTERS, Constraint, Form, GrammarError, SchemaRule, in_one_line
from sampling.grammar.error_location import locate_error
from sampling.grammar.matcher import Grammar
from sampling.grammar.schema_restrictions import check_numbers, check_terminates, narrow
from sampling.grammar.token_index import END

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_INSIDE_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_INSIDE_STRING}{{1,{length}}}" for length in (1, 3, 5, 8, 10, 14, 17, 30)),
    f"{_INSIDE_STRING}+",
)
"""Parts of the vocabulary that a mask allows in one step if the grammar allows all their texts.

Other tokens are checked one by one. These are llguidance's own slices, with more lengths between them. Near the end of
a string with a maximum length only short tokens fit. Finding them was most of a mask's cost.
"""


class _Tokens:
    """The attributes that `llguidance.TokenizerWrapper` reads."""

    bos_token_id = None
    eos_token_id = END
    special_token_ids = (END,)

    def __init__(self, table: Sequence[bytes], encode: Callable[[bytes], list[int]]) -> None:
        self.tokens = [b"<end>", *table[1:]]
        self._encode = encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, bytes) else text.encode())


@functools.lru_cache(2)
def make_vocabulary(
    byte_table: tuple[bytes, ...], encode: Callable[[bytes], list[int]], size: int
) -> llguidance.LLTokenizer:
    """Return llguidance's tokenizer of a vocabulary. It takes 0.4 s; engines of one process share it.

    byte_table: bytes of each id, b"" for ids without a token.
    size: number of logits, which may exceed the number of ids.
    """
    table = [*byte_table[:size], *[b""] * (size - len(byte_table))]
    tokens = llguidance.TokenizerWrapper(_Tokens(table, encode))
    return llguidance.LLTokenizer(tokens, n_vocab=size, eos_token=END, slices=list(SLICES))


MAX_CACHED = 256
"""Cached templates: each grammar counts once per lexer."""
MAX_CACHED_CHARACTERS = 4_194_304
"""of all sources together"""
JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it, so models generate no long white space and more text is jump-forward."""
ROWS_PER_LEXER = 8
"""For each so many rows, a grammar gets one more lexer. Masks of different lexers are computed in parallel."""
LEXERS_PER_THREAD = 2
"""Upper limit of lexers. Two per thread let a thread that finishes early take rows of another."""
SLOW_COMPILE_S = 0.02
"""A grammar that takes longer to compile gets one lexer only; its masks are computed one by one."""
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=4_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""llguidance's limits. A grammar is refused, or its row ended, before a compile takes 1 s or a mask 50 ms."""


class GrammarCompiler:
    def __init__(
        self,
        byte_table: Sequence[bytes],
        encode: Callable[[bytes], list[int]],
        vocab: int,
        sandbox: CompileSandbox | None = None,
        threads: int = 1,
    ) -> None:
        """
        byte_table, encode: the tokenizer's; vocab: number of logits.
        sandbox: compiles each grammar first.
        threads: number of threads that compute masks.
        """
        self._sandbox = sandbox
        self._threads = threads
        self._lexer_lock = threading.Lock()
        self._vocabulary = make_vocabulary(tuple(byte_table), encode, vocab)
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, object], tuple[Grammar, int]] = OrderedDict()
        """(tenant, key) -> the grammar and its number of characters"""
        self._characters = 0

    def cached(self, constraint: Constraint, tenant: str = "") -> Grammar | None:
        key = (tenant, constraint.key)
        with self._lock:
            entry = self._cache.get(key)
            if entry is None:
                return None
            self._cache.move_to_end(key)
            return entry[0]

    def compile(self, constraint: Constraint, tenant: str = "") -> Grammar:
        """Return the compiled grammar, from the tenant's cache or for it. Raises GrammarError with the error's place.

        Tenants share no grammars: the time of a request would tell one whether another had sent the same.
        """
        if constraint.size > MAX_SOURCE_CHARACTERS:
            raise GrammarError(f"has {constraint.size} characters; send at most {MAX_SOURCE_CHARACTERS}")
        found = self.cached(constraint, tenant)
        if found is None:
            if self._sandbox is not None:
                self._sandbox.check(constraint)
            started = time.thread_time()
            start = self._matcher(constraint)
            found = Grammar(start, constraint.field, time.thread_time() - started)
            self._add_to_cache((tenant, constraint.key), constraint.size, found)
        if found.is_too_slow:
            raise GrammarError("its masks take too long to compute; write it with less ambiguity")
        return found

    def needs_lexers(self, grammar: Grammar, rows: int) -> bool:
        """Return whether one more lexer would let more threads compute masks.

        rows: number of rows to come
        """
        limit = LEXERS_PER_THREAD * self._threads if self._threads > 1 else 1
        num_lexers = min(limit, -(-(len(grammar.matchers) + rows) // ROWS_PER_LEXER))
        return len(grammar.templates) < num_lexers and grammar.compile_s <= SLOW_COMPILE_S

    def add_lexers(self, constraint: Constraint, grammar: Grammar, rows: int) -> None:
        """Add as many lexers as help for `rows` more rows."""
        with self._lexer_lock:
            while self.needs_lexers(grammar, rows):
                grammar.templates.append(self._new_matcher(_as_llguidance(constraint)))
        with self._lock:
            self._drop_oldest()

    def forget(self) -> None:
        with self._lock:
            self._cache.clear()
            self._characters = 0

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()

    def _matcher(self, constraint: Constraint) -> llguidance.LLMatcher:
        grammar = _as_llguidance(constraint)
        _check_terminates(constraint)
        matcher = self._new_matcher(grammar)
        if not matcher.is_error():
            return matcher
        for rule in constraint.rules:
            if why := self._error_of(json.loads(rule.source), rule.strict):
                raise GrammarError(why, self._locate(rule.source, rule.strict), rule.field)
        is_schema = constraint.form is Form.JSON_SCHEMA
        place = self._locate(constraint.source, constraint.strict) if is_schema else ""
        raise GrammarError(in_one_line(matcher.get_error()), place)

    def _locate(self, schema: str, strict: bool) -> str:
        return locate_error(json.loads(schema), lambda part: self._error_of(part, strict))

    def _error_of(self, schema: Any, strict: bool) -> str:
        """Return why a part of a schema cannot be compiled; "" if it can.

        Does not check termination: alone, a part may refer to itself where it referred to the whole.
        """
        part = Constraint(form=Form.JSON_SCHEMA, source=json.dumps(schema), strict=strict)
        return in_one_line(self._new_matcher(_as_llguidance(part)).get_error())

    def _new_matcher(self, grammar: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=LIMITS)

    def _add_to_cache(self, key: tuple[str, object], size: int, grammar: Grammar) -> None:
        with self._lock:
            if key not in self._cache:
                self._characters += size
            self._cache[key] = grammar, size
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        lexers = sum(len(grammar.templates) for grammar, _ in self._cache.values())
        while lexers > MAX_CACHED or self._characters > MAX_CACHED_CHARACTERS:
            _, (grammar, size) = self._cache.popitem(last=False)
            self._characters -= size
            lexers -= len(grammar.templates)


def _as_llguidance(constraint: Constraint) -> str:
    """Return llguidance's JSON form of a grammar. Raises GrammarError for text that is not JSON."""
    matcher = llguidance.LLMatcher
    try:
        match constraint.form:
            case Form.LARK:
                rules = (f"{rule.name}: %json {_rule_of(rule)}\n" for rule in constraint.rules)
                grammar = matcher.grammar_from_lark("\n".join([constraint.source, *rules]))
            case Form.REGEX:
                grammar = matcher.grammar_from_regex(constraint.source)
            case Form.CHOICE:
                grammar = matcher.grammar_from_regex("|".join(map(_escaped, json.loads(constraint.source))))
            case Form.JSON_SCHEMA:
                grammar = _json_grammar(constraint.source, constraint.strict)
            case Form.REQUIRED_TEXT:
                raise GrammarError("is not a grammar")
    except ValueError as error:
        raise GrammarError(in_one_line(str(error))) from error
    return grammar if not constraint.after else _after_text(constraint, grammar)


def _json_grammar(source: str, strict: bool) -> str:
    loose: JsonCompileOptions = {"lenient": not strict, "coerce_one_of": not strict}
    return llguidance.LLMatcher.grammar_from_json_schema(
        _schema_of(source, strict), defaults=JSON_STYLE, overrides=loose
    )


def _json_rule(source: str, strict: bool) -> str:
    """Return a schema with its options, as Lark has it after `%json`."""
    return json.dumps(json.loads(_json_grammar(source, strict))["grammars"][0]["json_schema"])


def _rule_of(rule: SchemaRule) -> str:
    try:
        return _json_rule(rule.source, rule.strict)
    except GrammarError as error:
        raise GrammarError(str(error), error.place, rule.field) from error


def _schema_of(source: str, strict: bool) -> dict[str, Any]:
    """Return a schema as a dict that llguidance can enforce; `true` becomes {}.

    Removes `x-guidance`: clients do not choose the JSON style. Raises GrammarError for `false` and for anything that
    `narrow` or `check_numbers` refuse.
    """
    schema = {} if (value := json.loads(source)) is True else value
    if not isinstance(schema, dict):
        raise GrammarError(
            "the schema is false, so no answer is valid" if value is False else "a schema must be an object"
        )
    schema.pop("x-guidance", None)
    narrow(schema, strict)
    check_numbers(schema)
    return schema


def _check_terminates(constraint: Constraint) -> None:
    """Check the schema as sent. Raises GrammarError for a schema without a finite value."""
    if constraint.form is Form.JSON_SCHEMA:
        check_terminates(json.loads(constraint.source))
    for rule in constraint.rules:
        try:
            check_terminates(json.loads(rule.source))
        except GrammarError as error:
            raise GrammarError(str(error), error.place, rule.field) from error


def _escaped(text: str) -> str:
    """Return a regular expression that matches exactly this text."""
    return re.sub(r"[^0-9A-Za-z_<>\s\x80-\U0010ffff]", lambda found: "\\" + found[0], text)


def _after_text(constraint: Constraint, grammar: str) -> str:
    """Return the grammar, preceded by any text.

    That text ends in the first `constraint.after`. Raises GrammarError for Lark.
    """
    match constraint.form:
        case Form.LARK:
            raise GrammarError("a grammar cannot follow reasoning; add the reasoning to the grammar or turn it off")
        case Form.JSON_SCHEMA:
            rest = f"rest: %json {_json_rule(constraint.source, constraint.strict)}"
        case _:
            rest = json.loads(grammar)["grammars"][0]["lark_grammar"].replace("start:", "rest:", 1)
    start = f"start: before rest\nbefore[suffix={json.dumps(constraint.after)}]: /(?s:.*)/"
    return llguidance.LLMatcher.grammar_from_lark(f"{start}\n{rest}\n")
