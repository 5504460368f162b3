"""Translates a book paragraph by paragraph with `app.py batch`.

    python examples/translate_book.py BOOK.txt BOOK.de.txt --target-lang de [--url http://127.0.0.1:8000]

The same command continues a stopped run. A paragraph without a translation stays unchanged.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

APP = Path(__file__).resolve().parent.parent / "app.py"


def main() -> int:
    """Return the exit code of `app.py batch`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("book", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--target-lang", required=True)
    given, rest = parser.parse_known_args()
    paragraphs = re.split(r"\n\s*\n", given.book.read_text(encoding="utf-8").strip())
    lines, answers = given.output.with_suffix(".in.jsonl"), given.output.with_suffix(".jsonl")
    content = "".join(json.dumps({"n": n, "text": text}) + "\n" for n, text in enumerate(paragraphs))
    lines.write_text(content, encoding="utf-8")
    command = [sys.executable, str(APP), "batch", str(lines), "-o", str(answers), "--target-lang", given.target_lang]
    code = subprocess.run([*command, "--dedupe", *rest], check=False).returncode
    translated = dict(enumerate(paragraphs))
    for line in answers.read_text(encoding="utf-8").splitlines() if answers.exists() else ():
        answer = json.loads(line)
        translated[answer["n"]] = answer["translation"]
    given.output.write_text("\n\n".join(translated.values()) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
