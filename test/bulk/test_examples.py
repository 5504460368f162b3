"""The programs in examples/ run as they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from test.serving import ROOT, Service


def example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_book_is_translated_paragraph_by_paragraph(service: Service, tmp_path: Path) -> None:
    book, output = tmp_path / "book.txt", tmp_path / "book.de.txt"
    book.write_text("One.\nStill one.\n\n\nTwo.\n \nOne.\nStill one.\n")
    flags = ("--source-lang", "en", "--target-lang", "de", "--url", service.url)
    ran = example("translate_book.py", str(book), str(output), *flags)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "book.de.jsonl").read_text().count("translation") == 3
    again = example("translate_book.py", str(book), str(output), *flags)
    assert again.returncode == 0, again.stderr


def test_dialogues_at_once(service: Service) -> None:
    ran = example("dialogues.py", "--url", service.url, "--dialogues", "8", "--max-tokens", "3")
    assert ran.returncode == 0 and ran.stdout.startswith("8 dialogues of 3 turns: "), ran.stderr
