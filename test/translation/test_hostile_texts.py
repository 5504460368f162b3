# ruff: noqa: E501 - files as they are
"""Hostile text files, at least ten of each format: refused by name, or read without harm within limits."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import pytest

from native.sandbox import Sandbox, Sandboxes, limit_memory, limit_next_cpu, receive, send
from rwkv_batch.translation.documents import document
from rwkv_batch.translation.documents.document import DocumentError
from rwkv_batch.translation.documents.sandbox import MEMORY_BYTES
from test.conftest import IS_LONG, rest_slow
from test.translation.documents import archive, read

CPU_S = 30 if IS_LONG else 6
"""For one file: half of a document's limit, and less for the shorter files."""
DEEP, MANY = (10**6, 10**5) if IS_LONG else (2 * 10**5, 10**5)
LAUGHS = "<!DOCTYPE a [" + "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 10)) + "]><a>&l9;</a>"
XXE = '<!DOCTYPE a [<!ENTITY e SYSTEM "file:///etc/passwd">]><a>&e;</a>'
CUE = "00:01.000 --> 00:02.000\n"
EVERY_FORMAT: list[bytes] = [
    archive({"a": b"0" * (4 << 20)}), LAUGHS.encode(), XXE.encode(), b"\xff\xfeA", b"\0" * 1000, random.Random(1).randbytes(1000),
    b"a" * MANY, b"\n" * MANY, "a\u202eb\u2028\ufeff\x1b[2J".encode() * 100, b"%PDF-1.7", b"\xff\xfe\0\xd8" * 1000,
]  # fmt: skip
FILES: dict[str, list[bytes]] = {
    "md": [b">" * DEEP, b"[" * MANY, b"*" * DEEP, b"- " * 10_000, b"![a](" * 10_000, b"*a " * MANY, b"`" * MANY, b"<b>" * 100_001, b"a\n\n" * 20_000],
    "tex": [b"{" * DEEP, rb"\input{/etc/passwd}", rb"\def\a{\a\a}\a", b"$" * 10_000, rb"\begin{a}" * 5000, b"\\" * 20_000],
    "txt": [b"a\n" * MANY, b"<" * DEEP, b"{a,plural," * 100_000, b"a\r" * 5000, b"`" * DEEP],
    "vtt": [b"WEBVTT", b"WEBVTT\n\n99:99 --> x\na", b"-->" * DEEP, b"WEBVTT\n\n" + b"NOTE\n" * 200_000, (CUE + "a\n\n").encode() * 20_000,
            f"{CUE}{'<i>' * DEEP}".encode(), b"9" * DEEP + b" --> 1\na"],
    "ass": [b"Dialogue: " + b"," * DEEP, b"[Events]\nFormat: " + b"," * DEEP, b"Dialogue: 0,x,y,,,,,,,{" + b"\\N" * DEEP, b"[Events]" * DEEP,
            b"Dialogue: 0,9:9,,,,,,,,a\n" * 20_000],
    "arb": [b"[" * DEEP, b'{"a":' * DEEP, b'{"a":"' + b"{a, plural, other {" * 100_000, b'{"@@locale": [], "a": "\\ud800 b"}', b'{"@a": {"placeholders": 1}, "a": 2}',
            b'{"a": ' + b"9" * DEEP + b"}"],
    "properties": [b"\\" * DEEP, b"a=" + b"\\u12" * 100_000, b"a\\\n" * DEEP, b"a = \\ud800 b", b"a=b c\n" * 20_000, b":=" * DEEP],
    "strings": [b'"' * DEEP, b"/*" * DEEP, b'"a" = "b";' * 20_000, b'"a" = "' + b"\\" * DEEP, b'"a" = "\\Ud800 b";', b"{" * DEEP],
    "html": [b"<a title='" * MANY, b"<code>" * DEEP, b"<" * DEEP, b"{a,plural," * MANY, b"&#x110000;&a;" * 1000],
    "srt": [b"1\n99:99:99,9 --> -1\na", (CUE + "a\n\n").encode() * 20_000, b"-->\n" * MANY, b"a --> b\n" + b"a\n" * MANY],
    "csv": [b'"' * DEEP, b"text\n" + b"," * 20_000, b"text\n=cmd|' /C calc'!A0\n", b'text\n"' + b"a" * DEEP],
}  # fmt: skip
OUTCOMES = {"refused", "has no text", "stays"}


@pytest.fixture(scope="module")
def children() -> Iterator[Sandboxes]:
    made = Sandboxes(lambda: Sandbox(__name__))
    yield made
    made.close()


@pytest.mark.parametrize("ending", rest_slow(FILES))
def test_hostile_files_harm_nobody(children: Sandboxes, ending: str) -> None:
    files = [*EVERY_FORMAT, *FILES[ending]]
    assert len(files) >= 10
    for number, data in enumerate(files):
        try:
            answer = children.call((ending, data))
        except EOFError:
            answer = f"took more than {CPU_S} s or {MEMORY_BYTES >> 30} GiB"
        assert answer in OUTCOMES, f"file {number}, {data[:30]!r}: {answer}"


def serve() -> None:
    """Read and write files within the limits of documents."""
    limit_memory(MEMORY_BYTES)
    document.MAX_UNITS = 10_000
    while True:
        ending, data = receive(sys.stdin.buffer)
        limit_next_cpu(CPU_S)
        send(sys.stdout.buffer, _outcome(ending, data))


def _outcome(ending: str, data: bytes) -> str:
    try:
        found = read(data, f"a.{ending}")
    except DocumentError as error:
        return "refused" if len(str(error)) > 20 else f"refused by {error}"
    except Exception as error:  # it is the test's answer
        return repr(error)[:300]
    count = len(found.units)
    written = found.write([None] * count)
    if b"root:" in written:
        return "has the content of another file"
    return "has no text" if not count else "stays" if written == data else f"changed: {written[:100]!r}"
