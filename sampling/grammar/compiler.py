"""From constraints to compiled grammars, the latest of which are kept. Any thread; Python's lock is let go."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import llguidance

from sampling.grammar.compile_sandbox import CompileSandbox
from sampling.grammar.constraint import MAX_SOURCE_CHARACTERS, Constraint, Form, SchemaRule
from sampling.grammar.error_location import locate_error
from sampling.grammar.errors import GrammarError, in_one_line
from sampling.grammar.matcher import Grammar
from sampling.grammar.schema_restrictions import check_numbers, narrow
from sampling.grammar.termination import check_terminates
from sampling.grammar.vocabulary import make_vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CACHED = 256
"""Compiled grammars, each as often as it was compiled."""
MAX_CACHED_CHARACTERS = 4_194_304
"""Of their sources together."""
JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it: no model loses itself in white space, and what is certain need not be drawn."""
ROWS_PER_LEXER = 8
"""With more rows of a grammar it is compiled once more, so that their masks are computed by several threads at once."""
LEXERS_PER_THREAD = 2
"""At most: a thread that is done early takes rows of another, and the other goes on with a lexer of its own."""
SLOW_COMPILE_S = 0.02
"""A grammar that takes longer to compile is compiled once, and its masks are computed one after another."""
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=4_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Of llguidance: a grammar is refused, or its row ended, before compiling takes a second or a mask 50 ms."""


class GrammarCompiler:
    """Compiles for one vocabulary."""

    def __init__(
        self,
        byte_table: Sequence[bytes],
        encode: Callable[[bytes], list[int]],
        vocab: int,
        sandbox: CompileSandbox | None = None,
        threads: int = 1,
    ) -> None:
        """`byte_table`, `encode`: the tokenizer's; `vocab`: number of logits; `sandbox`: tries each grammar first.

        `threads`: how many compute masks at once.
        """
        self._sandbox = sandbox
        self._threads = threads
        self._lexer_lock = threading.Lock()
        self._vocabulary = make_vocabulary(byte_table, encode, vocab)
        self._lock = threading.Lock()
        self._cache: OrderedDict[object, tuple[Grammar, int]] = OrderedDict()
        """and the size of each"""
        self._characters = 0

    def cached(self, constraint: Constraint) -> Grammar | None:
        """The grammar if it is compiled already."""
        with self._lock:
            found = self._cache.get(constraint.key)
            if found is None:
                return None
            self._cache.move_to_end(constraint.key)
            return found[0]

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint. Raises GrammarError if it cannot be served, naming the place."""
        if constraint.size > MAX_SOURCE_CHARACTERS:
            raise GrammarError(f"has {constraint.size} characters, the limit is {MAX_SOURCE_CHARACTERS}")
        found = self.cached(constraint)
        if found is None:
            if self._sandbox is not None:
                self._sandbox.check(constraint)
            started = time.thread_time()
            start = self._matcher(constraint)
            found = Grammar(start, constraint.field, time.thread_time() - started)
            self._keep(constraint, found)
        if found.is_too_slow:
            raise GrammarError("its masks take too long; write it with less ambiguity")
        return found

    def needs_lexers(self, grammar: Grammar, rows: int) -> bool:
        """Whether masks would be computed by more threads, were it compiled once more: with so many rows to come."""
        most = LEXERS_PER_THREAD * self._threads if self._threads > 1 else 1
        wanted = min(most, -(-(len(grammar.matchers) + rows) // ROWS_PER_LEXER))
        return len(grammar.templates) < wanted and grammar.compile_s <= SLOW_COMPILE_S

    def add_lexers(self, constraint: Constraint, grammar: Grammar, rows: int) -> None:
        """Compile it as often as that helps so many rows more."""
        with self._lexer_lock:
            while self.needs_lexers(grammar, rows):
                grammar.templates.append(self._new_matcher(_as_llguidance(constraint)))
        with self._lock:
            self._drop_oldest()

    def forget(self) -> None:
        """Keep nothing of what was compiled."""
        with self._lock:
            self._cache.clear()
            self._characters = 0

    def close(self) -> None:
        """End the processes that try grammars."""
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
                raise GrammarError(why, self._place(rule.source, rule.strict), rule.field)
        is_schema = constraint.form is Form.JSON_SCHEMA
        place = self._place(constraint.source, constraint.strict) if is_schema else ""
        raise GrammarError(in_one_line(matcher.get_error()), place)

    def _place(self, schema: str, strict: bool) -> str:
        return locate_error(json.loads(schema), lambda part: self._error_of(part, strict))

    def _error_of(self, schema: Any, strict: bool) -> str:
        """Why a part of a schema cannot be served; "": it can.

        Not asked is whether it ends: alone, it refers to itself where it referred to the whole.
        """
        part = Constraint(form=Form.JSON_SCHEMA, source=json.dumps(schema), strict=strict)
        return in_one_line(self._new_matcher(_as_llguidance(part)).get_error())

    def _new_matcher(self, grammar: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=LIMITS)

    def _keep(self, constraint: Constraint, grammar: Grammar) -> None:
        with self._lock:
            if constraint.key not in self._cache:
                self._characters += constraint.size
            self._cache[constraint.key] = grammar, constraint.size
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Down to the limits, those used longest ago first."""
        lexers = sum(len(grammar.templates) for grammar, _ in self._cache.values())
        while lexers > MAX_CACHED or self._characters > MAX_CACHED_CHARACTERS:
            _, (grammar, size) = self._cache.popitem(last=False)
            self._characters -= size
            lexers -= len(grammar.templates)


def _as_llguidance(constraint: Constraint) -> str:
    """Its JSON form of a grammar. Raises GrammarError for what is no JSON."""
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
    except ValueError as error:
        raise GrammarError(in_one_line(str(error))) from error
    return grammar if not constraint.after else _after_text(constraint, grammar)


def _json_grammar(source: str, strict: bool) -> str:
    loose: JsonCompileOptions = {"lenient": not strict, "coerce_one_of": not strict}
    return llguidance.LLMatcher.grammar_from_json_schema(
        _schema_of(source, strict), defaults=JSON_STYLE, overrides=loose
    )


def _json_rule(source: str, strict: bool) -> str:
    """A schema with its options, as Lark has it behind `%json`."""
    return json.dumps(json.loads(_json_grammar(source, strict))["grammars"][0]["json_schema"])


def _rule_of(rule: SchemaRule) -> str:
    try:
        return _json_rule(rule.source, rule.strict)
    except GrammarError as error:
        raise GrammarError(str(error), error.place, rule.field) from error


def _schema_of(source: str, strict: bool) -> dict[str, Any]:
    """A schema that is an object; `true` is {}. Raises GrammarError for what cannot be held to.

    That is false, under which no answer is valid; see also `narrow` and `check_numbers`. How JSON is written is not
    the client's to say.
    """
    schema = {} if (given := json.loads(source)) is True else given
    if not isinstance(schema, dict):
        raise GrammarError("the schema is false: no answer is valid" if given is False else "a schema is an object")
    schema.pop("x-guidance", None)
    narrow(schema, strict)
    check_numbers(schema)
    return schema


def _check_terminates(constraint: Constraint) -> None:
    """Raises GrammarError for a schema, whole as it was sent, of which no value can end."""
    if constraint.form is Form.JSON_SCHEMA:
        check_terminates(json.loads(constraint.source))
    for rule in constraint.rules:
        try:
            check_terminates(json.loads(rule.source))
        except GrammarError as error:
            raise GrammarError(str(error), error.place, rule.field) from error


def _escaped(text: str) -> str:
    """A regular expression that matches this text alone."""
    return re.sub(r"[^0-9A-Za-z_<>\s\x80-\U0010ffff]", lambda found: "\\" + found[0], text)


def _after_text(constraint: Constraint, grammar: str) -> str:
    """Anything that ends in `constraint.after` for the first time, then the grammar. Raises GrammarError for Lark."""
    match constraint.form:
        case Form.LARK:
            raise GrammarError("cannot follow a thought; write the thought into the grammar, or do not ask for one")
        case Form.JSON_SCHEMA:
            rest = f"rest: %json {_json_rule(constraint.source, constraint.strict)}"
        case _:
            rest = json.loads(grammar)["grammars"][0]["lark_grammar"].replace("start:", "rest:", 1)
    start = f"start: before rest\nbefore[suffix={json.dumps(constraint.after)}]: /(?s:.*)/"
    return llguidance.LLMatcher.grammar_from_lark(f"{start}\n{rest}\n")
