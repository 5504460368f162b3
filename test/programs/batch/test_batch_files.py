"""Every file format through the command, with the fake engine."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from app import main
from programs.batch.command import Selection
from programs.record import Record
from test.programs.batch.runs import batch, errors_of, read_jsonl, started, write_jsonl
from test.serving import Service, wait_for

pytestmark = pytest.mark.slow


def fake_answer(text: str) -> str:
    return text * 3


def test_objects_keep_their_fields_and_get_one_more(fake: Service, tmp_path: Path) -> None:
    lines: list[Any] = [
        {"id": i, "text": f"Zeile {i} ✿\u0085\u2028\u2029", "more": [1.5, None, 10**30]} for i in range(40)
    ]
    source, target = write_jsonl(tmp_path / "in.jsonl", [*lines, "a text alone"]), tmp_path / "out.jsonl"
    assert batch(fake, source, target, "--out-field", "said") == 0
    terms_in = [{**line, "said": fake_answer(line["text"])} for line in lines]
    assert read_jsonl(target) == [*terms_in, {"text": "a text alone", "said": fake_answer("a text alone")}]
    assert errors_of(target) == []


def test_poisoned_lines_fail_alone_with_their_reasons(fake: Service, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = b'{"id": 1, "text": "fine"}'
    bad = {
        b"{": "JSON",
        b"[1]": "object",
        b'{"id": 9}': "text",
        b'{"text": "a", "x": 7.5e400}': "number",
        b'{"text": ["a"]}': "text",
        b'{"text": "\xff"}': "UTF-8",
        b'{"text": "\\ud800"}': "surrogate",
        b'{"text": ""}': "empty",
        b'{"text": "fail@1 on demand"}': "broken on demand",
        b'{"text": "' + b"x" * (17 << 20) + b'"}': "limit",
    }
    source.write_bytes(b"\n".join([good, *bad, b"", good]))
    assert batch(fake, source, target, "--id-field", "id", "--retry", "1") == 3
    assert read_jsonl(target) == [{"id": 1, "text": "fine", "completion": fake_answer("fine")}] * 2
    errors = errors_of(target)
    assert [error["line"] for error in errors] == list(range(2, 2 + len(bad)))
    for error, word in zip(errors, bad.values(), strict=True):
        assert word in error["error"]
    assert errors[2]["id"] == 9


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t")])
def test_tables_keep_their_columns(fake: Service, tmp_path: Path, suffix: str, delimiter: str) -> None:
    source, target = tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
    rows = [["1", 'two\nlines, "quoted"', "ü"], ["2", "plain", ""], ["3", "x" * 5000, "y"]]
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows([["id", "text", "note"], *rows])
    source.write_text(text.getvalue() + f"only{delimiter}two\n", encoding="utf-8-sig", newline="")
    assert batch(fake, source, target) == 3
    with target.open(newline="", encoding="utf-8") as file:
        found = list(csv.reader(file, delimiter=delimiter))
    assert found == [["id", "text", "note", "completion"], *([*row, fake_answer(row[1])] for row in rows)]
    assert "2 columns" in errors_of(target)[0]["error"]


def test_text_stays_line_for_line(fake: Service, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes("eins\r\n\n  \nzwei\n\xff\n".encode("latin-1") + b"drei")
    assert batch(fake, source, target) == 3
    assert target.read_text(encoding="utf-8").split("\n") == [
        fake_answer("eins"),
        "",
        "  ",
        fake_answer("zwei"),
        "",
        fake_answer("drei"),
        "",
    ]
    assert errors_of(target)[0]["line"] == 5


def test_line_breaks_in_answers_do_not_make_lines(fake: Service, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("a\n")
    assert batch(fake, source, target, "--template", "{text}\nb{{}}") == 0
    assert target.read_text() == "a\\nb{}a\\nb{}a\\nb{}\n"


def test_compressed_files_are_read_by_their_bytes_and_written_by_name(fake: Service, tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "n%d"}\n' % i for i in range(100))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines[:500]) + gzip.compress(lines[500:]))
    parallel = b"\x50\x2a\x4d\x18\x04\0\0\0size" + zstandard.compress(lines[:500])  # as pzstd begins a file
    (tmp_path / "b.jsonl").write_bytes(parallel + zstandard.compress(lines[500:]))
    terms_in = [{"text": f"n{i}", "completion": fake_answer(f"n{i}")} for i in range(100)]
    assert batch(fake, tmp_path / "a.jsonl.gz", tmp_path / "out.jsonl.zst") == 0
    with zstandard.open(tmp_path / "out.jsonl.zst", "rt") as file:
        assert [json.loads(line) for line in file] == terms_in
    assert batch(fake, tmp_path / "b.jsonl", tmp_path / "out.jsonl.gz") == 0
    with gzip.open(tmp_path / "out.jsonl.gz", "rt") as file:
        assert [json.loads(line) for line in file] == terms_in
    shouted = (tmp_path / "a.jsonl.gz").rename(tmp_path / "A.JSONL.GZ")
    assert batch(fake, shouted, tmp_path / "OUT.JSONL.GZ") == 0
    with gzip.open(tmp_path / "OUT.JSONL.GZ", "rt") as file:
        assert [json.loads(line) for line in file] == terms_in


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_an_archive_that_was_cut_off_is_not_taken_as_whole(
    fake: Service, tmp_path: Path, capsys: Any, compress: Callable[[bytes], bytes]
) -> None:
    lines = b"".join(b'{"text": "n%d"}\n' % i for i in range(200))
    source, target = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(compress(lines[:2000]) + compress(lines[2000:])[:-20])
    assert batch(fake, source, target) == 1
    assert "ended before the end" in capsys.readouterr().err.splitlines()[-1]
    found = [line["text"] for line in read_jsonl(target)]
    assert found == [f"n{i}" for i in range(len(found))]


def test_standard_input_and_output(fake: Service, tmp_path: Path) -> None:
    process = started(fake, Path("-"), Path("-"), "--format", "text", stdin=-1, stdout=-1)
    output, errors = process.communicate(b"eins\nzwei\n", timeout=60)
    assert (process.returncode, output.decode()) == (0, f"{fake_answer('eins')}\n{fake_answer('zwei')}\n"), errors
    assert b"lines   2; 0 failed\ntokens  " in errors and b" tokens/s\n" in errors


def test_shards_and_limits_share_a_file(fake: Service, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": f"n{i}"} for i in range(50)])
    found: list[str] = []
    for part in (1, 2, 3):
        target = tmp_path / f"out{part}.jsonl"
        assert batch(fake, source, target, "--shard", f"{part}/3", "--limit", "31") == 0
        found += [line["text"] for line in read_jsonl(target)]
    assert sorted(found) == sorted(f"n{i}" for i in range(31))
    assert batch(fake, source, tmp_path / "out1.jsonl", "--shard", "1/3") == 0  # a higher limit goes on
    assert [line["text"] for line in read_jsonl(tmp_path / "out1.jsonl")] == [f"n{i}" for i in range(0, 50, 3)]


def test_order_done_writes_what_ends_first(fake: Service, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": f"{'long ' * (i == 0) * 50}n{i}"} for i in range(200)])
    assert batch(fake, source, tmp_path / "out.jsonl", "--order", "done", "--max-in-flight", "3") == 0
    assert sorted(line["text"] for line in read_jsonl(tmp_path / "out.jsonl")) == sorted(
        line["text"] for line in read_jsonl(source)
    )


def test_equal_lines_are_requested_once(fake: Service, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": i, "text": f"n{i % 3}"} for i in range(90)])
    before = rows_requested(fake)
    assert batch(fake, source, tmp_path / "out.jsonl", "--dedupe") == 0
    wait_for(lambda: rows_requested(fake) >= before + 3, 20, "they are in the log")
    assert rows_requested(fake) - before == 3
    assert read_jsonl(tmp_path / "out.jsonl") == [
        {"id": i, "text": f"n{i % 3}", "completion": fake_answer(f"n{i % 3}")} for i in range(90)
    ]


def rows_requested(fake: Service) -> int:
    """Return the number of POSTs that the service has counted."""
    lines = fake.log.read_text().splitlines()
    return sum("POST /v1/chat/completions" in line for line in lines)


def test_an_error_is_one_line(fake: Service, tmp_path: Path, capsys: Any) -> None:
    source, target = write_jsonl(tmp_path / "in.jsonl", ["a"]), tmp_path / "out.jsonl"
    wrong = {
        ("--temperature", "-1"): (2, "temperature"),
        ("--task", "translate"): (2, "--target-lang"),
        ("--task", "translate", "--target-lang", "de"): (2, "--max-tokens"),
        ("--task", "chat", "--target-lang", "de"): (2, "--target-lang"),
        ("--source-lang", "de"): (2, "--source-lang"),
        ("--task", "fim", "--template", "{text}"): (2, "--template"),
        ("--model-path", "a.pth"): (2, "--model-path"),
        ("--errors", "-"): (2, "--errors"),
        ("--shard", "4/3"): (2, "i/n"),
        ("--nonsense",): (2, "--nonsense"),
        ("--url", "http://127.0.0.1:1"): (1, "127.0.0.1:1"),
        ("--glossary", "x.csv"): (2, "--glossary"),
    }
    for flags, (code, word) in wrong.items():
        assert batch(fake, source, target, *flags) == code, flags
        message = capsys.readouterr().err.strip().splitlines()[-1]
        assert message.startswith("error: ") and word in message, message
    bare = ["batch", str(source), "-o", str(target), "--url", fake.url, "--task", "score"]
    for flag in (["--stop", "x"], ["--think"]):
        assert main([*bare, *flag]) == 2
        assert f"error: {flag[0]} " in capsys.readouterr().err
    assert batch(fake, tmp_path / "absent.jsonl", target) == 1
    assert batch(fake, source, tmp_path / "out.csv") == 1
    assert batch(fake, source, source) == 1
    assert not target.exists()


def test_glossary_terms_are_inserted_and_missing_ones_reported(fake: Service, tmp_path: Path) -> None:
    """The fake engine repeats the prompt. So a term in the answer was in the text."""
    terms = tmp_path / "terms.json"
    terms.write_text(json.dumps({"state pool": "Zustandsspeicher", "row": "Zeile"}))
    source = write_jsonl(tmp_path / "in.jsonl", ["The State Pool keeps it", "a plain word", "a row"])
    flags = ("--task", "translate", "--target-lang", "de", "--source-lang", "en", "--glossary", str(terms))
    command = ["batch", str(source), "-o", str(tmp_path / "out.jsonl"), "--url", fake.url, *flags]
    assert main(command) == 0
    found = [line["translation"] for line in read_jsonl(tmp_path / "out.jsonl")]
    assert "Zustandsspeicher" in found[0] and "Zeile" in found[2] and "plain word" in found[1]


def test_a_dry_run_counts_and_writes_nothing(fake: Service, tmp_path: Path, capsys: Any) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [*({"text": f"n{i}"} for i in range(200)), 5])
    assert batch(fake, source, tmp_path / "out.jsonl", "--dry-run") == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["lines"], figures["unreadable"]) == (201, 1)
    assert figures["prompt_tokens"] >= 400 and figures["seconds"] > 0
    assert not (tmp_path / "out.jsonl").exists()


def test_progress_with_a_limit_ends_at_the_whole() -> None:
    records = Selection(iter([Record(index, index + 1) for index in range(100)]), limit=10, shard=(1, 2))
    assert records.fraction(0.02) == 0.02 and records.fraction(None) == 0.0
    assert len(list(records)) == 5 and records.fraction(0.1) == 1.0
    everything = Selection(iter([]), limit=0, shard=(1, 1))
    assert everything.fraction(0.3) == 0.3 and everything.fraction(None) is None
