"""A killed or disturbed run resumes with the same command: every line once."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from programs.batch.outputs import OutputFile
from programs.batch.sidecar import Sidecar
from test.programs.batch.runs import batch, errors_of, fake_service, read_jsonl, started, write_jsonl
from test.serving import Service

pytestmark = pytest.mark.slow

BAD = {"text": ["no text"]}


def lines_of(count: int) -> list[Any]:
    """Return different lines; some of them fail."""
    return [BAD if i % 50 == 7 else {"id": i, "text": f"n{i}" + " word" * (i % 9)} for i in range(count)]


def terms_in(count: int) -> list[Any]:
    return [{**line, "completion": line["text"] * 3} for line in lines_of(count) if line is not BAD]


def killed(fake: Service, source: Path, target: Path, *flags: str, rng: random.Random) -> bool:
    """Start a run and kill it after its first output; returns whether it was still running."""
    length = target.stat().st_size if target.exists() else 0
    process = started(fake, source, target, *flags)
    max_busy_retries = time.monotonic() + rng.choice([0.3, 60, 60])  # some are killed before they have begun
    while process.poll() is None and time.monotonic() < max_busy_retries:
        if target.exists() and target.stat().st_size != length:
            break
        time.sleep(0.01)
    time.sleep(rng.random() * 0.25)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("order", "suffix"), [("keep", ""), ("done", ".gz")])
def test_after_kills_and_resumes_every_line_is_there_once(
    fake: Service, tmp_path: Path, order: str, suffix: str
) -> None:
    source, target = write_jsonl(tmp_path / "in.jsonl", lines_of(400)), tmp_path / f"out.jsonl{suffix}"
    flags, rng = ("--order", order), random.Random(order)
    kills = [killed(fake, source, target, *flags, "--max-in-flight", "3", rng=rng) for _ in range(3)]
    assert any(kills)
    assert batch(fake, source, target, *flags) == 3
    with gzip.open(target, "rt") if suffix else target.open() as file:
        found = [json.loads(line) for line in file]
    assert sorted(found, key=lambda line: line["id"]) == terms_in(400)
    assert order == "done" or found == terms_in(400)
    assert sorted(error["index"] for error in errors_of(target)) == list(range(7, 400, 50))
    assert batch(fake, source, target, *flags) == 3  # and there is nothing left to do
    with gzip.open(target, "rt") if suffix else target.open() as file:
        assert len(file.readlines()) == len(found)


def stopped_half_way(fake: Service, tmp_path: Path) -> tuple[Path, Path]:
    """Return input and output of a stopped run. It stopped after 40 of 100 lines."""
    source, target = write_jsonl(tmp_path / "in.jsonl", lines_of(100)), tmp_path / "out.jsonl"
    assert batch(fake, source, target, "--limit", "40") == 3
    return source, target


def test_a_stopped_run_keeps_finished_lines(fake: Service, tmp_path: Path) -> None:
    count = 300
    source, target = write_jsonl(tmp_path / "in.jsonl", lines_of(count)), tmp_path / "out.jsonl"
    process = started(fake, source, target, "--max-in-flight", "2")
    while not (target.exists() and target.stat().st_size):
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 130
    assert 0 < len(read_jsonl(target)) < count
    assert read_jsonl(target) == terms_in(300)[: len(read_jsonl(target))]
    assert batch(fake, source, target) == 3
    assert read_jsonl(target) == terms_in(300)


def test_output_lines_missing_in_the_sidecar_run_a_second_time(fake: Service, tmp_path: Path) -> None:
    source, target = stopped_half_way(fake, tmp_path)
    with target.open("ab") as file:
        file.write(b'{"id": 99, "text": "half a li')  # written, and not known to be done
    assert batch(fake, source, target) == 3
    assert read_jsonl(target) == terms_in(100)


def test_a_changed_input_a_cut_output_and_other_settings_are_refused_by_name(
    fake: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = stopped_half_way(fake, tmp_path)
    content, done = source.read_bytes(), target.read_bytes()

    def refused(*flags: str) -> str:
        assert batch(fake, source, target, *flags) == 1
        return capsys.readouterr().err.strip().splitlines()[-1]

    assert "--max-tokens was 3" in refused("--max-tokens", "4")
    assert "--order" in refused("--order", "done")
    assert "--temperature was not given" in refused("--temperature", "0.5")
    assert "--template" in refused("--template", "{text}!")
    source.write_bytes(content[:-10])
    assert "the input has changed" in refused()
    source.write_bytes(content.replace(b"n99", b"m99"))
    assert "the input has changed" in refused()
    source.write_bytes(content)
    target.write_bytes(done[:-1])
    assert "it was changed" in refused()
    target.write_bytes(done)
    assert batch(fake, source, target) == 3
    assert read_jsonl(target) == terms_in(100)


def test_a_foreign_output_is_kept_without_fresh(fake: Service, tmp_path: Path) -> None:
    source, target = write_jsonl(tmp_path / "in.jsonl", lines_of(5)), tmp_path / "out.jsonl"
    target.write_text("precious\n")
    assert batch(fake, source, target) == 1
    assert target.read_text() == "precious\n"
    assert batch(fake, source, target, "--fresh") == 0
    assert read_jsonl(target) == terms_in(5)
    assert batch(fake, source, target, "--fresh", "--max-tokens", "1") == 0
    assert [line["completion"] for line in read_jsonl(target)] == [line["text"] for line in lines_of(5)]


def test_two_runs_on_one_output(fake: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write_jsonl(tmp_path / "in.jsonl", lines_of(5)), tmp_path / "out.jsonl"
    first = OutputFile(target, "")
    assert batch(fake, source, target, "--fresh") == 1
    assert "another run" in capsys.readouterr().err
    first.close()
    assert batch(fake, source, target) == 0


def test_a_full_disk_ends_the_run_and_the_next_one_resumes(fake: Service, tmp_path: Path) -> None:
    """A file size limit stands for a full disk."""
    source, target = write_jsonl(tmp_path / "in.jsonl", lines_of(1000)), tmp_path / "out.jsonl"
    size = sum(len(json.dumps(line)) + 1 for line in terms_in(1000))
    limited = ["prlimit", f"--fsize={size // 2}"]
    if shutil.which("prlimit") is None:
        pytest.skip("prlimit of util-linux is missing")
    process = started(fake, source, target, prefix=limited)
    errors = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 1, errors
    assert "cannot be written" in errors and "are safe" in errors
    assert batch(fake, source, target) == 3
    assert read_jsonl(target) == terms_in(1000)


def test_a_run_can_resume_after_the_service_ended(fake: Service, tmp_path: Path) -> None:
    running = fake_service(tmp_path)
    source, target = write_jsonl(tmp_path / "in.jsonl", lines_of(300)), tmp_path / "out.jsonl"
    process = started(running, source, target, "--max-in-flight", "1", "--retry", "0")
    while not (target.exists() and target.stat().st_size):
        time.sleep(0.01)
    running.close()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and b"give the same command again to resume" in errors
    assert batch(fake, source, target) == 3
    assert read_jsonl(target) == terms_in(300)


def test_the_sidecar_is_behind_the_output_at_every_call(
    fake: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished lines are synced first: an output cut there is complete."""
    source, target = write_jsonl(tmp_path / "in.jsonl", lines_of(100)), tmp_path / "out.jsonl"
    synced: list[int] = []
    append, commit = OutputFile.append, Sidecar.commit

    def appended(self: OutputFile, data: bytes) -> None:
        append(self, data)
        if str(self._path) == str(target):
            synced.append(self.length)

    def committed(self: Sidecar, progress: Any, *more: Any) -> None:
        assert progress.output_bytes == synced[-1] == target.stat().st_size
        commit(self, progress, *more)

    monkeypatch.setattr(OutputFile, "append", appended)
    monkeypatch.setattr(Sidecar, "commit", committed)
    assert batch(fake, source, target, "--max-in-flight", "8") == 3
    assert len(synced) > 1


def test_a_foreign_sidecar_is_rejected(fake: Service, tmp_path: Path) -> None:
    source, target = write_jsonl(tmp_path / "in.jsonl", lines_of(5)), tmp_path / "out.jsonl"
    Path(f"{target}.progress").write_bytes(b"not a database" * 100)
    assert batch(fake, source, target) == 1
    Path(f"{target}.progress").unlink()
    with sqlite3.connect(f"{target}.progress") as other:
        other.execute("CREATE TABLE something (else_ TEXT)")
    assert batch(fake, source, target) == 1
    assert batch(fake, source, target, "--fresh") == 0
