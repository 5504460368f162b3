"""The JSON Schema Test Suite against answers held to its schemas: what is served is valid, the rest refused by place.

    pip download --no-deps --no-binary jsonschema jsonschema==4.26.0 && tar xzf jsonschema-4.26.0.tar.gz
    python -m bench.grammar.suite --suite jsonschema-4.26.0/json [--drafts draft2020-12,draft7] [--walks 3] [--out FILE]

The suite (github.com/json-schema-org/JSON-Schema-Test-Suite) comes with the source of the package `jsonschema`. Each of
its schemas is compiled strictly. Of those served, texts are drawn at random from what the masks allow, and every one
that ends is judged by jsonschema-rs; and the suite's own instances, written as answers are (`json.dumps`), are put to
the grammar: one that is not valid must not be taken. Told too is how many of the valid ones are taken; one may be left
out because its names come in another order or its numbers in another form. The optional tests (formats) count with the
others, if jsonschema-rs agrees with the suite, but for those of `contentEncoding` and `contentMediaType`: here these
are notes, as the newer drafts say. The exit code is 1 if a text or an instance is wrong. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema_rs

from bench.grammar.schemas import TOKENIZER, constraint_of, random_text
from bench.tools.origin import origin
from rwkv_batch.tokenizer import VOCAB_SIZE
from sampling.grammar.compiler import GrammarCompiler
from sampling.grammar.errors import GrammarError
from sampling.grammar.matcher import Grammar, Matcher
from sampling.grammar.trial import Trials

DIALECTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}

NOTES = Path("optional/content.json")


class Case(NamedTuple):
    """A schema of the suite and the instances that it judges."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


def cases(suite: Path, draft: str) -> Iterator[Case]:
    """Those of a draft, each schema with its dialect."""
    folder = suite / "tests" / draft
    for file in sorted(folder.rglob("*.json")):
        if file.relative_to(folder) == NOTES:
            continue
        for case in json.loads(file.read_text(encoding="utf-8")):
            schema = case["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DIALECTS[draft], **schema}
            name = f"{draft}/{file.relative_to(folder)}: {case['description']}"
            yield Case(name, schema, [(test["data"], test["valid"]) for test in case["tests"]])


def is_valid(schema: Any, value: Any) -> bool | None:
    """What jsonschema-rs says; None: it cannot judge."""
    try:
        return jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(value)
    except Exception:  # noqa: BLE001 - a reference to nowhere, a schema that is none: another's business
        return None


def takes(grammar: Grammar, text: str) -> bool:
    """Whether a text is a whole answer."""
    matcher = Matcher(grammar)
    ids = TOKENIZER.encode(text)
    return matcher.state.try_consume_tokens(ids) == len(ids) and matcher.state.is_accepting()


def judge(case: Case, grammar: Grammar, walks: int, counted: Counter[str]) -> list[str]:
    """What is wrong with a schema that is served."""
    wrong = []
    for turn in range(walks):
        try:
            text = random_text(grammar, random.Random(f"{case.name}{turn}"))
        except GrammarError:
            counted["dead ends"] += 1
            continue
        counted["unfinished" if text is None else "finished"] += 1
        if text is not None and not _holds(case.schema, text):
            wrong.append(f"{case.name}: {text!r} is not valid: {json.dumps(case.schema)}")
    for value, valid in case.instances:
        if is_valid(case.schema, value) is not valid:
            counted["instances that the judge sees otherwise"] += 1
            continue
        taken = takes(grammar, json.dumps(value, ensure_ascii=False))
        counted[f"{'valid' if valid else 'invalid'} instances {'taken' if taken else 'not taken'}"] += 1
        if taken and not valid:
            wrong.append(f"{case.name}: takes {value!r}: {json.dumps(case.schema)}")
    return wrong


def _holds(schema: Any, text: bytes) -> bool:
    try:
        return is_valid(schema, json.loads(text, parse_float=_finite)) is not False
    except ValueError:
        return False


def _finite(digits: str) -> float:
    """A number; what no double holds counts as the largest one."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(digits)))


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, required=True, help="folder that has `tests`")
    parser.add_argument("--drafts", default="draft2020-12,draft7")
    parser.add_argument("--walks", type=int, default=3, help="random texts of each schema")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    args = parser.parse_args(arguments)
    table = TOKENIZER.byte_table
    compiler = GrammarCompiler(table, TOKENIZER.encode_bytes, VOCAB_SIZE, Trials(table, VOCAB_SIZE))
    wrong, drafts = [], {}
    for draft in args.drafts.split(","):
        counted: Counter[str] = Counter()
        for case in cases(args.suite, draft):
            try:
                grammar = compiler.compile(constraint_of(case.schema))
            except GrammarError as error:
                counted["refused"] += 1
                print(f"refused: {case.name}: schema{error.place}: {error}")
                continue
            counted["served"] += 1
            wrong += judge(case, grammar, args.walks, counted)
        drafts[draft] = dict(counted)
    compiler.close()
    for line in wrong:
        print(f"WRONG: {line}")
    text = json.dumps({"bench": "grammar_suite", **origin(), "drafts": drafts, "wrong": len(wrong)})
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
