"""The readers of users' files with small valid files of each kind.

    python -m test.fuzzing.readers --count 20000 --seed 1 --processes 4     all readers, with their figures

`--count` is per reader. Runs with different seeds share no input, so machines may divide the work by seeds.

A reader may return or raise its own error with a short message. Anything else is a fault: another exception, a number
beyond the file, the limit of memory or of CPU time.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import ANY, patch

from programs.batch.formats import Jsonl
from programs.batch.glossary import load_glossary
from programs.batch.inputs import Input
from programs.record import RunError
from routes.api_keys import KeysError, load_keys
from routes.fine_tuning.data import UnknownFields, check_data
from rwkv_batch.model.adapters.files import read_adapter
from rwkv_batch.model.files.gguf_writer import Entry, Value, write_gguf
from rwkv_batch.model.files.place import BLOCKS
from rwkv_batch.model.gguf_names import names_of_pth
from rwkv_batch.model.tensor_files import FileError, metadata_of, read_tensors
from rwkv_batch.translation.documents.document import DocumentError, DocumentOptions, requests
from rwkv_batch.translation.documents.formats import read_document
from state_pool.layout import Layout
from state_pool.session_file import _CHECKSUMS, InvalidSessionFile, SessionFile, decode
from test.fuzzing.mutate import (
    Mutate,
    mutate_bytes,
    mutate_gguf,
    mutate_json,
    mutate_keys,
    mutate_named,
    mutate_pth,
    mutate_safetensors,
)
from test.hostile_tensors import valid_files
from test.malformed_files import as_format_1
from test.resource_limits import run_bounded

MAX_MESSAGE = 3000
PER_PROCESS = 2000
CPU_S = 60
"""For the inputs of one process."""
STATE: Layout = {"a": ("float32", (2, 2)), "b": ("int8", (4,))}
GLOSSARY = '{"pool": "状态", "Straße": "street"}'.encode()
_DIGEST = b"0" * 64
KEYS = b'[[key]]\nname = "a"\nkey = "secret-of-a"\nrows = 16\n\n[[key]]\nname = "b"\nsha256 = "%s"\n' % _DIGEST


class InvalidDataError(Exception):
    """A tuning's data file has problems."""


@dataclass(frozen=True)
class Reader:
    """A reader, its file's name, its own error and valid files."""

    file: str
    read: Callable[[Path], Any]
    error: type[Exception]
    mutate: Mutate
    corpus: Callable[[Path], list[bytes]]


def _read_tensors(path: Path) -> None:
    for tensor in read_tensors(path).values():
        tensor.float().sum()  # touches each number: one beyond the file ends the process
    metadata_of(path)


def _read_gguf(path: Path) -> None:
    for tensor in names_of_pth(read_tensors(path)).values():
        tensor.float().sum()


def _read_session(path: Path) -> None:
    """Decode the file, then again as if its checksum were valid. An attacker's checksum is valid."""
    data = path.read_bytes()
    with suppress(InvalidSessionFile):
        decode(data)
    valid = {name: lambda file, one=checksum: (one(file), ANY)[1] for name, checksum in _CHECKSUMS.items()}
    with patch.dict(_CHECKSUMS, valid):
        decode(data).check("m", STATE, 65_536)


def _read_adapter(path: Path) -> None:
    adapter = read_adapter(path.with_name("adapter_model.safetensors"))
    for target in adapter.parts:
        adapter.scale_of(target)


def _read_lines(path: Path) -> None:
    lines = Input(str(path))
    try:
        for record in Jsonl("text", "answer").read(lines.lines()):
            assert record.problem or Jsonl("text", "answer").write(record, "answer")
    finally:
        lines.close()


def _read_glossary(path: Path) -> None:
    load_glossary(str(path)).apply("the state pool keeps 状态池 and Straße")


def _read_data(path: Path) -> None:
    """Read a tuning's data file, whose name is its first line. Problems are no errors, but lines."""
    name, _, content = path.read_bytes().partition(b"\n")
    problems, _, _ = check_data(content, name.decode("latin-1"), UnknownFields())
    if problems:
        raise InvalidDataError("\n".join(map(str, problems[:5])))


def _read_document(path: Path) -> None:
    """Read a document, whose name is its first line, and write it with each text doubled."""
    name, _, content = path.read_bytes().partition(b"\n")
    document = read_document(content, name.decode("latin-1"), DocumentOptions(target="de"))
    dict(requests(document, "en", {}))
    document.write([unit.text * 2 for unit in document.units])


def _tensors_as(suffix: str) -> Callable[[Path], list[bytes]]:
    return lambda folder: [path.read_bytes() for path in valid_files(folder) if path.suffix == suffix]


def _ggufs(_: Path) -> list[bytes]:
    """Return GGUF files with few tensors. They hold layer tensors in plain types, and one of each kind of blocks."""

    def entry(name: str, dtype: str, *shape: int) -> Entry:
        return Entry(name, dtype, shape, lambda: [b"\1" * Entry(name, dtype, shape, list).num_bytes])

    plain = [
        entry("token_embd.weight", "float16", 4, 8),
        entry("blk.0.time_mix_lerp_fused.weight", "float32", 6, 1, 1, 8),
        entry("blk.0.time_mix_r_k.weight", "bfloat16", 64),
        entry("blk.0.time_mix_w1.weight", "float32", 2, 8),
    ]
    blocks = [entry(f"blk.1.{kind}", kind, 1, numbers) for kind, (numbers, _) in BLOCKS.items()]
    known: dict[str, Value] = {"general.architecture": "rwkv7", "general.alignment": 32}
    more: dict[str, Value] = {**known, "tokenizer.ggml.tokens": [*"abcd"], "rwkv7.epsilon": 1e-5, "list": [1, 2]}
    made = []
    for metadata, entries in ((known, plain), (more, plain[:1] + blocks), ({**known, "split.count": 2}, blocks[:1])):
        file = BytesIO()
        write_gguf(file, metadata, entries)
        made.append(file.getvalue())
    return made


def _sessions(_: Path) -> list[bytes]:
    whole = SessionFile("m", 5, [1, 2, 3], STATE, {"a": b"\0" * 16, "b": b"1234"})
    tokens = SessionFile("m", 3, [1, 2, 3], {}, {})
    return [whole.encode(), tokens.encode(), as_format_1(whole), as_format_1(tokens)]


def _adapters(folder: Path) -> list[bytes]:
    import torch
    from safetensors.torch import save_file

    pair = {"blocks.0.att.key.lora_A": torch.ones(2, 4), "blocks.0.att.key.lora_B": torch.ones(4, 2)}
    save_file(pair, folder / "adapter_model.safetensors")
    config = {
        "lora_alpha": 4,
        "use_rslora": True,
        "alpha_pattern": {"key": 2, "blocks.[01].*": 3},
        "fan_in_fan_out": False,
    }
    return [json.dumps(config).encode(), b'{"lora_alpha": 2.5, "init_lora_weights": "gaussian"}']


def _lines(_: Path) -> list[bytes]:
    import gzip

    plain = b'{"text": "one", "n": [1, {"a": null}]}\n\n"two"\r\n{"text": "\xc3\xa9\\ud83d\\ude00"}\n'
    return [plain, b"\xef\xbb\xbf" + plain, gzip.compress(plain, mtime=0), plain * 3]


def _data_files(_: Path) -> list[bytes]:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    lines: list[dict[str, Any]] = [
        {"messages": chat, "template": {"user": "U"}},
        {"prompt": ["a", "b"], "completion": ["c", "d"]},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    called = [
        *chat[:2],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "1"},
    ]
    lines.append({"messages": [*called, {**chat[2], "weight": 1}], "tools": tools})
    table = 'en,de\n"one, two",eins\nthree,drei\n'
    entry = '<tu><tuv xml:lang="en"><seg>one</seg></tuv><tuv xml:lang="de"><seg>eins<ph/></seg></tuv></tu>'
    tmx = f'<?xml version="1.0"?><tmx version="1.4"><header srclang="en"/><body>{entry * 2}</body></tmx>'
    return [
        *(f"a.jsonl\n{json.dumps(line)}".encode() for line in lines),
        "a.jsonl\n{}\n".format("\n".join(map(json.dumps, lines))).encode(),
        f"a.csv\n{table}".encode(),
        f"a.tmx\n{tmx}".encode(),
    ]


def _documents(_: Path) -> list[bytes]:
    """Return the documents of the tests of each format."""
    from test.translation import test_documents as tests
    from test.translation.documents import archive, docx, epub

    tested = tests.test_only_the_texts_of_a_file_change, tests.test_translators_xml_gets_translations_and_keeps_the_rest
    cases = [case for test in tested for mark in vars(test)["pytestmark"] for case in mark.args[1]]
    files = [(name, source.encode()) for name, source, _ in cases]
    files += [("a.po", tests.PO.encode()), ("a.xml", tests.ANDROID.encode())]
    files += [("a.docx", docx(tests.RUNS)), ("a.epub", epub(tests.PAGE))]
    files += [("a.xlsx", archive({"xl/sharedStrings.xml": "<sst><si><t>one</t></si><si><r><t>b</t></r></si></sst>"}))]
    return [name.encode() + b"\n" + content for name, content in files]


READERS: dict[str, Reader] = {
    "pth": Reader("m.pth", _read_tensors, FileError, mutate_pth, _tensors_as(".pth")),
    "safetensors": Reader("m.safetensors", _read_tensors, FileError, mutate_safetensors, _tensors_as(".safetensors")),
    "gguf": Reader("m.gguf", _read_gguf, FileError, mutate_gguf, _ggufs),
    "session": Reader("s", _read_session, InvalidSessionFile, mutate_safetensors, _sessions),
    "adapter config": Reader("adapter_config.json", _read_adapter, FileError, mutate_json, _adapters),
    "jsonl": Reader("in.jsonl", _read_lines, RunError, mutate_bytes, _lines),
    "glossary": Reader("g.json", _read_glossary, RunError, mutate_json, lambda _: [GLOSSARY]),
    "data": Reader("data", _read_data, InvalidDataError, mutate_named, _data_files),
    "document": Reader("document", _read_document, DocumentError, mutate_named, _documents),
    "keys": Reader("keys.toml", lambda path: load_keys(str(path)), KeysError, mutate_keys, lambda _: [KEYS]),
}


def fuzz(name: str, folder: str, seed: str, count: int) -> dict[str, Any]:
    """Read `count` changed files. Returns figures, and the first fault with its input."""
    reader, rng = READERS[name], random.Random(f"{name} {seed}")
    path = Path(folder) / reader.file
    corpus = reader.corpus(Path(folder))
    read = refused = 0
    for number in range(count):
        data = rng.choice(corpus)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            data = reader.mutate(rng, data)
        path.write_bytes(data)
        try:
            reader.read(path)
            read += 1
        except reader.error as error:
            refused += 1
            if len(str(error)) <= MAX_MESSAGE:
                continue
            why = f"a message of {len(str(error))} characters"
        except Exception:
            why = traceback.format_exc(limit=-4)
        else:
            continue
        return {"fault": why, "number": number, "input": base64.b64encode(data[:20_000]).decode()}
    return {"read": read, "refused": refused, "cpu_s": time.process_time()}


def run(name: str, seed: int, count: int, processes: int = 1) -> dict[str, Any]:
    """`fuzz` in processes with limits, `processes` at a time. Returns the sums, or the first fault."""
    sizes = [min(PER_PROCESS, count - begin) for begin in range(0, count, PER_PROCESS)]
    total = {"read": 0, "refused": 0, "cpu_s": 0}
    with ThreadPoolExecutor(processes) as pool:
        for found in pool.map(lambda part: _run_part(name, f"{seed} {part[0]}", part[1]), enumerate(sizes)):
            if "fault" in found:
                pool.shutdown(cancel_futures=True)
                return {"reader": name, **found}
            total = {figure: total[figure] + found[figure] for figure in total}
    return {"reader": name, "seed": seed, "count": count, **total, "cpu_s": round(total["cpu_s"], 1)}


def _run_part(name: str, seed: str, size: int) -> dict[str, Any]:
    """Run one process of `fuzz`. If a limit ended it, its last input is the fault."""
    with tempfile.TemporaryDirectory() as folder:
        cost = run_bounded(fuzz, name, folder, seed, size, cpu_s=CPU_S, memory_mib=1024)
        found: dict[str, Any] | None = cost.result
        if found is None:
            last = base64.b64encode((Path(folder) / READERS[name].file).read_bytes()).decode()
            found = {"fault": f"the process ended ({cost.exit_code})", "input": last}
    return {**found, "seed": seed} if "fault" in found else found


def main() -> None:
    """Fuzz all readers and print one line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="inputs per reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    for name in READERS:
        started = time.monotonic()
        found = run(name, args.seed, args.count, args.processes)
        print(json.dumps({**found, "seconds": round(time.monotonic() - started, 1)}), flush=True)


if __name__ == "__main__":
    main()
