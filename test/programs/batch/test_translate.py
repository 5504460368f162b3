"""`app.py translate`: files in, the same files in another language out."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from app import main
from programs.backends.backend import Reply
from programs.batch.lines import LineWorker
from programs.batch.options import build_translate_parser
from programs.batch.translate import DocumentJob, Result, TranslateOptions, review
from routes.translation.batch_translate import TranslateBody
from rwkv_batch.translation.documents.document import DocumentOptions
from rwkv_batch.translation.documents.formats import read_document
from test.programs.batch.runs import batch, read_jsonl, started, write_jsonl
from test.serving import ROOT, Service, wait_for

pytestmark = pytest.mark.slow

SRT = "1\n00:00:01,000 --> 00:00:02,000\nHello\n\n2\n00:00:03,000 --> 00:00:04,500\n{}\n\n"


def translate(service: Service, source: Path, *flags: str) -> int:
    """Run the command in this process; returns the exit code."""
    return main(["translate", str(source), "-t", "de", "-s", "en", "--url", service.url, "--progress", "plain", *flags])


def test_a_file_keeps_its_form_and_encoding(fake: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.md"
    source.write_bytes("# 标题\n\n```\ncode\n```\n".encode("gbk"))
    flags = ["-s", "zh", "--url", fake.url, "-o", str(tmp_path / "b.md")]
    assert main(["translate", str(source), "-t", "Englsh", *flags]) == 0
    said = capsys.readouterr().err
    assert "warning: --target-lang: unknown language 'Englsh'" in said and "the nearest known name is English" in said
    assert "1 texts, encoding gb18030" in said
    content = (tmp_path / "b.md").read_bytes()
    assert content.startswith(b"# ") and content.endswith(b"\n\n```\ncode\n```\n") and content.decode("gbk")


def test_the_output_has_the_inputs_name_and_the_language(fake: Service, tmp_path: Path) -> None:
    source = tmp_path / "film.srt"
    source.write_text(SRT.format("Bye"))
    assert translate(fake, source) == 0
    text = (tmp_path / "film.de.srt").read_text()
    assert text.startswith("1\n00:00:01,000 --> 00:00:02,000\n") and "\n2\n00:00:03,000 --> 00:00:04,500\n" in text
    assert main(["batch", str(source), "-o", str(tmp_path / "b.srt"), "--target-lang", "de", "--url", fake.url]) == 0
    assert (tmp_path / "b.srt").read_text().count("-->") == 2


def test_texts_that_fail_stay_and_are_named(fake: Service, tmp_path: Path) -> None:
    source = tmp_path / "film.srt"
    source.write_text(SRT.format("Bye"))
    assert translate(fake, source, "--retry", "0", "-s", "fail@1 x") == 3  # the prompt begins with the language
    failed = read_jsonl(tmp_path / "film.de.srt.errors.jsonl")
    assert {one["input"]["text"] for one in failed} == {"Hello", "Bye"} and "broken" in failed[0]["error"]
    assert (tmp_path / "film.de.srt").read_text() == SRT.format("Bye")


class Termless:
    """A Backend whose translations lack the glossary's terms."""

    async def open(self) -> int:
        return 2

    async def model(self) -> str:
        return "termless"

    async def close(self) -> None:
        """Do nothing."""

    async def request(self, path: str, body: dict[str, Any]) -> Reply:
        message = "text_list[0]: the translation lacks the term cat = Kater"
        return Reply(200, {"translations": [{"text": "Katze"}], "warnings": [{"message": message}]})


def test_a_text_without_its_term_is_translated_and_may_be_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.txt"
    source.write_text("A cat\nA cat\n")
    job = DocumentJob(TranslateOptions(input=str(source), target_lang="de", progress="plain"))
    assert asyncio.run(job.run(Termless())) == 0
    assert (tmp_path / "a.de.txt").read_text() == "Katze\nKatze\n"
    shown = capsys.readouterr().err
    assert "a.txt: 2 texts, 1 of them different\ntexts   1; 0 failed\ntime  " in shown and " texts/s\n" in shown
    assert "2 of 2 translations may be wrong" in shown and "stay as they were" not in shown
    batch_worker = LineWorker(Termless(), job.task, 0, fails_missing_terms=True)
    outcome = asyncio.run(batch_worker.outcome(next(job.records())))
    assert outcome.answer is not None and outcome.problem.endswith("cat = Kater")


@pytest.mark.parametrize(
    ("name", "content", "flags", "message"),
    [
        ("a.csv", b"id,body\n1,x\n", ("--column", "text"), "there is no column 'text'; name one of 'id', 'body'"),
        ("a.csv", b"id,body\n1,x\n", (), "no column is given; name one of 'id', 'body'"),
        ("a.pdf", b"%PDF-1.7", (), "convert it to docx or html"),
        ("a.docx", b"%PDF-1.7", (), "is a pdf file, which is not translated"),
        ("a.rtf", b"{}", (), "is a rtf file, which is not translated: save it as docx"),
        ("a.tex", b"\\section{A", (), "is not LaTeX that can be read"),
        ("a.foo", b"x", (), "the name must end in .txt"),
        ("a.json", b"{", (), "is not JSON"),
        ("a.txt", b"\xff", ("--encoding", "klingon"), "is not klingon"),
        ("a.po", b'msgid "a"\nmsgstr ""\n', ("--bilingual",), "po has no place for two languages"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    tmp_path: Path, name: str, content: bytes, flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    nothing = ("-t", "de", "--url", "http://127.0.0.1:9")
    assert main(["translate", str(tmp_path / name), *nothing, *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_review_has_scores_and_marks_the_least_certain(fake: Service, tmp_path: Path) -> None:
    lines = [f"line {number} is here" for number in range(14)]
    document = read_document("\n".join(lines).encode(), "a.txt", DocumentOptions(target="de"))
    results = [Result(one.upper(), ["repeats itself"] * (at == 13), -0.1, -at / 10) for at, one in enumerate(lines)]
    table = list(csv.DictReader(io.StringIO(review(document, [*results[:12], None, results[13]]).decode("utf-8-sig"))))
    assert [one["source"] for one in table if not one["review"]] == lines[:9], "a third of thirteen, and warnings"
    assert (table[3]["score"], table[3]["confidence"], table[12]["confidence"]) == ("-0.1", "-0.3", "")
    assert table[12]["warnings"] == "was not translated" and table[12]["review"] == "yes"
    plural = b'msgid "a book"\nmsgid_plural "books"\nmsgstr[0] ""\n'
    forms = read_document(plural, "a.po", DocumentOptions(target="zh"))
    assert review(forms, [Result("书", [])] * 2).count(b"books") == 1, "Chinese has one form"
    source, found = tmp_path / "a.txt", tmp_path / "review.csv"
    source.write_text("One line.\nTwo lines.\n")
    assert translate(fake, source) == 0
    assert translate(fake, source, "--review", str(found)) == 0, "scores are asked for without --fresh"
    rows = list(csv.DictReader(io.StringIO(found.read_text("utf-8-sig"))))
    assert [float(one["score"]) for one in rows] == [0.0, 0.0] and rows[1]["source"] == "Two lines."


def test_every_text_has_the_style(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("One line.\n")
    flags = ["--instruction", "Be short.", "--formality", "more"]
    given, _ = build_translate_parser().parse([str(source), "-t", "de", *flags])
    (record,) = DocumentJob(TranslateOptions(**vars(given))).records()
    body = TranslateBody.model_validate(record.fields["body"])
    assert (body.instruction, body.formality) == ("Be short.", "more")


def test_a_default_style_is_in_the_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not in the progress file, so a changed one kept the old translations."""
    source = tmp_path / "a.txt"
    source.write_text("One line.\n")
    bodies: list[Any] = []

    async def run(job: DocumentJob, _backend: Any) -> int:
        bodies.extend(record.fields["body"] for record in job.records())
        return 0

    monkeypatch.setattr(DocumentJob, "run", run)
    monkeypatch.setattr("programs.batch.translate.make_backend", lambda *_: None)
    flags = ["--translation-style", "de=Use Sie.;fr=Use vous."]
    assert main(["translate", str(source), "-t", "de-AT", *flags]) == 0
    assert main(["translate", str(source), "-t", "de", "--formality", "less", *flags]) == 0
    assert [body["instruction"] for body in bodies] == ["Use Sie.", ""]


def test_other_files_are_not_overwritten(fake: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.txt"
    source.write_text("Hello you\n")
    (tmp_path / "a.de.txt").write_text("mine")
    assert translate(fake, source) == 1 and (tmp_path / "a.de.txt").read_text() == "mine"
    assert "--fresh" in capsys.readouterr().err
    assert translate(fake, source, "-o", str(source)) == 1
    assert translate(fake, source, "--fresh") == 0 and "Hello" in (tmp_path / "a.de.txt").read_text()
    (tmp_path / "mine.csv").write_text("mine")
    for review_file in ("a.txt", "a.de.txt", "a.de.txt.progress", "a.de.txt.errors.jsonl", "mine.csv"):
        files = {path: path.read_bytes() for path in tmp_path.iterdir()}
        assert translate(fake, source, "--review", str(tmp_path / review_file)) == 1, review_file
        assert review_file in capsys.readouterr().err
        assert {path: path.read_bytes() for path in files} == files
    os.mkfifo(pipe := tmp_path / "pipe")
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as table:
        assert translate(fake, source, "--review", str(pipe)) == 0, "like /dev/stdout"
        assert table.read().startswith(b"\xef\xbb\xbfsource,") and pipe.is_fifo()


def test_a_stopped_run_keeps_each_finished_text_and_a_changed_file_asks_for_its_new_texts(
    fake: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "a.txt", tmp_path / "a.de.txt"
    source.write_text("".join(f"line {i} of the text\n" for i in range(300)))
    command = [sys.executable, str(ROOT / "app.py"), "translate", str(source), "-t", "de", "-s", "en"]
    flags = ["--url", fake.url, "--max-in-flight", "2", "--progress", "json"]
    process = subprocess.Popen([*command, *flags], cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for(lambda: process.poll() is not None or stored(target, "answers") > 0, 120, "finished texts")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and not target.exists()
    kept = stored(target, "answers")
    assert 0 < kept < 300
    source.write_text(source.read_text() + "one more line of text\n")
    assert translate(fake, source, "--limit", "250") == 0
    assert stored(target, "answers") == max(kept, 250)
    assert translate(fake, source) == 0
    assert stored(target, "answers") == 301 and len(target.read_text().splitlines()) == 301


def stored(target: Path, table: str) -> int:
    """Return the number of rows of a sidecar's table."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{target}.progress?mode=ro", uri=True)) as database:
            return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    except sqlite3.Error:
        return 0


def test_lines_that_wait_for_an_earlier_one_are_not_asked_twice(
    fake: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line does not end until another request releases it. All others are in the sidecar."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "held"}, *({"text": f"n{i}"} for i in range(40))])
    target = tmp_path / "out.jsonl"
    flags = ("--max-in-flight", "4", "--progress", "json", "--retry", "0")
    process = started(fake, source, target, *flags)
    wait_for(lambda: process.poll() is not None or stored(target, "waiting") == 40, 120, "finished texts")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130 and target.read_bytes() == b""

    done = threading.Event()

    def release() -> None:
        while not done.wait(0.2):
            fake.post("/v1/chat/completions", {"contents": ["release"], "max_tokens": 1})

    thread = threading.Thread(target=release)
    thread.start()
    try:
        assert batch(fake, source, target, *flags) == 3
    finally:
        done.set()
        thread.join()
    assert json.loads(capsys.readouterr().err.splitlines()[-2])["resumed"] == 40
    assert [line["text"] for line in read_jsonl(target)] == [f"n{i}" for i in range(40)]
    assert stored(target, "waiting") == 0
