"""What data files say that is no error: unknown fields, repeats, entities."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from programs import tune
from routes.fine_tuning.data import Data, read_data, split, validation_warnings
from routes.request.validation import MAX_WARNINGS
from rwkv_batch.translation.tmx import TmxError, read_pairs
from rwkv_batch.tuning import Document


def line(number: int, **fields: object) -> dict[str, object]:
    answer = {"role": "assistant", "content": f"It is {number}.", **fields}
    return {"messages": [{"role": "user", "content": f"Say {number}"}, answer]}


def as_content(lines: Sequence[object]) -> bytes:
    return "\n".join(map(json.dumps, lines)).encode()


def test_unknown_fields_are_named_with_the_nearest_known_one() -> None:
    """A misspelt weight was learnt without a word."""
    lines = [line(i) for i in range(20)]
    lines += [line(20 + i, wieght=0) for i in range(3)]
    lines += [{**line(30), "template": None, "colour": "blue"}]
    first, second = read_data(as_content(lines), "d.jsonl").warnings
    assert first == (
        "the field messages[].wieght is not known and changes nothing (first in line 21, 3 in all); the nearest known "
        "name is weight"
    )
    assert second == "the field colour is not known and changes nothing (first in line 24, 1 in all)"
    many = read_data(as_content([{**line(i), f"x{i}": 1} for i in range(40)]), "d.jsonl").warnings
    assert len(many) == MAX_WARNINGS + 1 and many[-1] == f"more than {MAX_WARNINGS} unknown fields"


def test_the_command_warns_of_unknown_fields_and_of_a_validation_file_that_was_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d.jsonl").write_bytes(as_content([line(i, nmae=1) for i in range(24)]))
    (tmp_path / "v.jsonl").write_bytes(as_content([line(i) for i in (1, 2, 2, 99)]))
    given, _ = tune.build_parser().parse([
        str(tmp_path / "d.jsonl"), "-o", "x", "--validation", str(tmp_path / "v.jsonl"),
    ])  # fmt: skip
    *_, warnings = tune._Command(given)._documents()
    assert "messages[].nmae is not known" in warnings[0] and warnings[1:] == [
        "validation file: 1 of 4 lines repeat another one",
        "validation file: 3 of 4 lines are in the training file too; give others",
    ]
    data = read_data(as_content([line(1)]), "d.jsonl")
    many = Data([Document([n], [1.0]) for n in range(1001)])
    assert validation_warnings(data, many) == ["validation file: the first 1000 of 1001 lines are evaluated"]
    assert validation_warnings(data, read_data(as_content([line(2)]), "d.jsonl")) == []


def test_a_validation_file_is_compared_in_little_memory() -> None:
    """The training lines' numbers were copied: 36 bytes a token."""
    lines = [{"prompt": f"{i} " * 400, "completion": "x"} for i in range(300)]
    data = read_data(as_content(lines), "d.jsonl")
    tracemalloc.start()
    try:
        assert "300 of 300 lines" in validation_warnings(data, data)[0]
        assert tracemalloc.get_traced_memory()[1] < data.num_tokens
    finally:
        tracemalloc.stop()


def test_held_out_lines_are_not_trained_on() -> None:
    examples = read_data(as_content([line(i) for i in (*range(24), *range(24))]), "d.jsonl").examples
    assert len(split(examples, 1e-320)[1]) <= 1, "1 divided by it is infinite"
    train, held = split(examples, 0.1)
    many = [Document([n], [1.0]) for n in range(15_000)]
    for share in (0.1, 0.5):  # 500 of 15,000 were in neither
        train_many, held_many = split(many, share)
        assert len(held_many) == 1000 and len(train_many) == 14_000
    assert len(held) == 2 and not {tuple(one.ids) for one in held} & {tuple(one.ids) for one in train}


def tmx(declared: str, text: str) -> bytes:
    pair = f'<tuv xml:lang="en"><seg>{text}</seg></tuv><tuv xml:lang="fr"><seg>b</seg></tuv>'
    header = '<tmx version="1.4"><header srclang="en"/><body><tu>'
    return f"<!DOCTYPE tmx [{declared}]>{header}{pair}</tu></body></tmx>".encode()


def test_entities_of_a_tmx_file_become_its_text() -> None:
    """They were trained on as `&name;`."""
    (pair,) = read_pairs(tmx('<!ENTITY who "the World">', "Hello &who; &amp; all"))
    assert pair.text == "Hello the World & all"


def test_what_a_line_cannot_use_is_an_error() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    (problem,) = read_data(as_content([{"prompt": "a", "completion": "b", "tools": tools}]), "d.jsonl").problems
    assert str(problem) == "line 1: tools: is for lines with `messages`; leave it out"
    (problem,) = read_data(b"en,en\na,b\n", "d.csv").problems
    assert "two languages" in problem.reason


def test_an_entry_may_be_the_root_after_a_comment() -> None:
    """It was a TypeError."""
    content = b'<?a b?><tu srclang="en"><tuv xml:lang="en"><seg>a</seg></tuv><tuv xml:lang="fr"><seg>b</seg></tuv></tu>'
    (pair,) = read_pairs(content)
    assert (pair.text, pair.translation) == ("a", "b")


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ("".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10 if i else "x" * 1000}">' for i in range(10)), "&a9;"),
        (f'<!ENTITY a "{"x" * 60_000}">', "&a;" * 20_000),
        ('<!ENTITY a SYSTEM "file:///etc/passwd">', "&a;"),
        ("", "&unknown;"),
    ],
)
def test_entities_that_grow_or_are_elsewhere_are_refused(declared: str, text: str) -> None:
    with pytest.raises(TmxError):
        list(read_pairs(tmx(declared, text)))
