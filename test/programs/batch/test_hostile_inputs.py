"""Malformed inputs and outputs: the line fails alone or the command prints one error line. Nothing is lost."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from programs.batch.glossary import load_glossary
from programs.batch.inputs import Input
from programs.record import RunError
from rwkv_batch.translation.glossary import Glossary
from test.programs.batch.runs import batch, errors_of, read_jsonl, started, write_jsonl
from test.serving import Service

pytestmark = pytest.mark.slow


def last_error(capsys: Any) -> str:
    message: str = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: "), message
    return message


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [300, 960, 985, 990, 995, 100_000])
def test_nesting_too_deep_to_write_fails_alone(fake: Service, tmp_path: Path, depth: int) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(f'{{"text": "a"}}\n{{"text": "b", "x": {nested(depth)}}}\n{{"text": "c", "x": {nested(150)}}}\n')
    assert batch(fake, source, target) == 3
    assert [line["text"] for line in read_jsonl(target)] == ["a", "c"]
    assert [error["line"] for error in errors_of(target)] == [2]


def test_tables_with_long_lines_nuls_and_other_bytes(fake: Service, tmp_path: Path) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    half = b"x" * (10 << 20)  # two of them are more than a line may have, each is less
    rows = [
        b"id,text",
        b"1,fine",
        half + b"," + half,
        b"2,\xff",
        b"3,a\0b",
        b'4,"open',
        b"still open",
        b'",x',
        b"5,end",
    ]
    source.write_bytes(b"\n".join(rows) + b"\n")
    assert batch(fake, source, target) == 3
    assert [line.split(",")[0] for line in target.read_text().splitlines()] == ["id", "1", "3", "5"]
    reasons = [error["error"] for error in errors_of(target)]
    assert len(reasons) == 3 and "limit" in reasons[0] and "UTF-8" in reasons[1] and "columns" in reasons[2]


@pytest.mark.parametrize("header", [b"id,t\xffxt", b'"' + b"x" * (17 << 20)])
def test_a_tables_header_that_cannot_be_read(fake: Service, tmp_path: Path, capsys: Any, header: bytes) -> None:
    source = tmp_path / "in.csv"
    source.write_bytes(header + b"\n1,a\n")
    assert batch(fake, source, tmp_path / "out.csv") == 1
    assert "first line" in last_error(capsys)


def test_a_decompression_bomb_is_one_long_line(fake: Service, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    with gzip.open(source, "wb", compresslevel=1) as file:
        for _ in range(100):
            file.write(b"\0" * (1 << 20))
        file.write(b'\n{"text": "a"}\n')
    assert batch(fake, source, target) == 3
    assert len(read_jsonl(target)) == 1 and "limit" in errors_of(target)[0]["error"]


def test_a_named_pipe_is_read_once(fake: Service, tmp_path: Path, capsys: Any) -> None:
    pipe, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    lines = [{"text": f"n{i}"} for i in range(600)]

    def write() -> None:
        with pipe.open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert batch(fake, pipe, target) == 0
    writer.join(60)
    assert [line["text"] for line in read_jsonl(target)] == [line["text"] for line in lines]
    again = threading.Thread(target=lambda: pipe.open("w").close(), daemon=True)
    again.start()
    assert batch(fake, pipe, target) == 1 and "cannot be read twice" in last_error(capsys)
    again.join(60)


def test_the_input_is_never_overwritten(fake: Service, tmp_path: Path, capsys: Any) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    before = source.read_bytes()
    other_name = tmp_path / "linked.jsonl"
    other_name.hardlink_to(source)
    assert batch(fake, source, other_name, "--fresh") == 1 and "different files" in last_error(capsys)
    assert batch(fake, source, Path("-"), "--errors", str(source)) == 1 and "different files" in last_error(capsys)
    assert source.read_bytes() == before


def test_outputs_that_are_not_files(fake: Service, tmp_path: Path, capsys: Any) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    null = tmp_path / "null.jsonl"
    null.symlink_to("/dev/null")
    for target in (pipe, null):
        assert batch(fake, source, target) == 1
        reported = capsys.readouterr().err
        assert "not a regular file" in reported and reported.count("\n") == 1, "one line, and nothing is left open"
    for target in (tmp_path / "absent" / "out.jsonl", Path("/proc/out.jsonl")):
        assert batch(fake, source, target) == 1 and "cannot be written" in last_error(capsys)


def test_a_sidecar_that_another_program_holds(
    fake: Service, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = write_jsonl(tmp_path / "in.jsonl", ["a"]), tmp_path / "out.jsonl"
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, **{**named, "timeout": 0.05}))
    holder = connect(f"{target}.progress", isolation_level=None)
    for lock in ("BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"):
        holder.execute(lock)
        assert batch(fake, source, target) == 1
        message = last_error(capsys)
        assert "locked" in message and "--fresh" not in message
        holder.execute("ROLLBACK")
    holder.close()
    assert batch(fake, source, target) == 0


def test_a_sidecar_of_another_version(fake: Service, tmp_path: Path, capsys: Any) -> None:
    source, target = write_jsonl(tmp_path / "in.jsonl", ["a"]), tmp_path / "out.jsonl"
    assert batch(fake, source, target) == 0
    with sqlite3.connect(f"{target}.progress") as database:
        database.execute("UPDATE run SET version = 99")
    assert batch(fake, source, target) == 1 and "another version" in last_error(capsys)
    with sqlite3.connect(f"{target}.progress") as database:
        database.execute("UPDATE run SET version = 1, settings = '[1'")
    assert batch(fake, source, target) == 1 and "--fresh" in last_error(capsys)


@pytest.mark.parametrize(("name", "content"), [("g.json", "[" * 100_000), ("g.csv", '"' + "x" * 200_000)])
def test_an_invalid_glossary(tmp_path: Path, name: str, content: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(RunError, match="--glossary"):
        load_glossary(str(file))


@pytest.mark.parametrize(
    ("term", "text", "translated"),
    [
        ("Straße", "Die Straße, die STRASSE", "Die X, die X"),
        ("İzmir", "in İzmir", "in X"),
        (
            "Istanbul",
            "in İstanbul",
            "in İstanbul",
        ),  # the dot is a letter's part; the pattern finds it, folding does not
        ("stop", "ſtop", "X"),
    ],
)
def test_terms_with_special_case_folding(term: str, text: str, translated: str) -> None:
    glossary = Glossary({term: "X"})
    assert glossary.apply(text) == translated
    assert set(glossary.missing(text, "nothing").values()) == ({"X"} if "X" in translated else set())


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"one more\n")


def cut(path: Path) -> None:
    os.truncate(path, 700)


def edited(path: Path) -> None:
    before = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(700)
        file.write(b"X")
    os.utime(path, ns=(before, before + 1))


@pytest.mark.parametrize("change", [appended, cut, edited])
def test_an_input_changed_during_reading(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """Otherwise, lines would be missing. Or they would belong to a file with another hash."""
    path = tmp_path / "in.txt"
    path.write_text("".join(f"line {number}\n" for number in range(100_000)))
    source = Input(str(path))
    digest, lines = source.digest(), source.lines()
    read = [next(lines) for _ in range(10)]
    change(path)
    with pytest.raises(RunError, match="was changed while it was read"):
        read.extend(lines)
    assert len(read) == 10, "no line of the other file is given out"
    assert digest == hashlib.sha256("".join(f"line {n}\n" for n in range(100_000)).encode()).hexdigest()


def test_an_input_replaced_before_hashing(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("one\n")
    source = Input(str(path))
    (tmp_path / "new.txt").write_text("two\n")
    (tmp_path / "new.txt").replace(path)
    with pytest.raises(RunError, match="was changed while it was read"):
        source.digest()


def test_a_closed_standard_output(fake: Service, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": f"n{i}"} for i in range(300)])
    process = started(fake, source, Path("-"), stdout=-1)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    reported = process.stderr.read().decode()
    assert process.wait(60) == 1
    assert "standard output cannot be written (Broken pipe)" in reported and "Traceback" not in reported
