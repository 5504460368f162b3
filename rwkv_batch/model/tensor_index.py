"""Finds the tensors in `.pth`, `.safetensors` and GGUF files.

Runs in a sandbox process without torch. A .pth file is a zip archive with a pickle. An interpreter here follows only
what torch.save writes for a dict of tensors. It imports nothing and allocates nothing that the file does not contain.
"""

from __future__ import annotations

import codecs
import math
import pickletools
import struct
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from native.safetensors import ITEM_BYTES
from native.sandbox import limit_memory, limit_next_cpu, receive, send
from rwkv_batch.model.files.gguf import MAGIC, read_gguf
from rwkv_batch.model.files.place import (
    BLOCKS,
    CPU_S,
    MAX_HEADER_BYTES,
    MAX_NAME,
    MAX_TENSORS,
    MEMORY_BYTES,
    PTH,
    SAFETENSORS,
    NotWeights,
    Place,
    TensorIndex,
)
from rwkv_batch.model.files.safetensors_header import read_safetensors

MAX_SIZE_FACTOR = 4
"""Largest size of the tensors relative to the file: some are stored once under two names."""
_MAX_DIMENSIONS = 8
_MAX_SIZE = 1 << 48
_STORAGES = {
    "torch DoubleStorage": "float64",
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch LongStorage": "int64",
    "torch IntStorage": "int32",
    "torch ShortStorage": "int16",
    "torch CharStorage": "int8",
    "torch ByteStorage": "uint8",
    "torch BoolStorage": "bool",
}
_ORDERED_DICT = "collections OrderedDict"
_REBUILD_TENSOR = "torch._utils _rebuild_tensor_v2"
_REBUILD_PARAMETERS = ("torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state")
"""The second is of a parameter with attributes, which are dropped."""
_NAMES = {*_STORAGES, _ORDERED_DICT, _REBUILD_TENSOR, *_REBUILD_PARAMETERS}
_LFS = b"version https://git-lfs"
"""The first bytes of what a clone without git-lfs has in place of a large file."""
_LOCAL_HEADER = struct.Struct("<26xHH")
"""The end of a zip member's local header: lengths of its name and of its extra field."""


def serve() -> None:
    """Answer each path from standard input with a TensorIndex.

    For a refused file, the answer is the text of the refusal.
    """
    limit_memory(MEMORY_BYTES)
    with suppress(EOFError):
        while True:
            path = receive(sys.stdin.buffer)
            limit_next_cpu(CPU_S)
            send(sys.stdout.buffer, find_or_refuse(path))


def find_or_refuse(path: Path) -> TensorIndex | str:
    """Return the index of a file's tensors [...], or a refusal. The refusal continues "FILE ..."."""
    try:
        return find_tensors(path)
    except NotWeights as error:
        return f"is not {error}"
    except MemoryError:
        return f"takes more than {MEMORY_BYTES >> 30} GiB to read; save a dict of tensors"
    except Exception as error:  # noqa: BLE001 - a damaged file makes zipfile raise almost anything
        reason = str(error).splitlines()[0][:MAX_NAME] if str(error) else type(error).__name__
        return f"is damaged or not a weight file ({reason}); download it again"


def find_tensors(path: Path) -> TensorIndex:
    """Return the index of a file's tensors [...]. Raises NotWeights; for a damaged file almost anything."""
    size = path.stat().st_size
    with path.open("rb") as file:
        index = _reader(path.suffix, file)(file, size)
    if len(index.places) > MAX_TENSORS:
        raise ValueError(f"it has {len(index.places)} tensors, at most {MAX_TENSORS} are allowed")
    for place in index.places:
        _check_place(place, size)
    if (held := sum(map(_held_bytes, index.places))) > MAX_SIZE_FACTOR * size:
        raise NotWeights(f"a weight file (its tensors would take {held} bytes); save dense, complete tensors")
    return index


def _reader(suffix: str, file: IO[bytes]) -> Callable[[IO[bytes], int], TensorIndex]:
    """Return the reader of a file's format. Raises NotWeights.

    The file's first bytes and its name determine the format.
    """
    start = file.read(len(_LFS))
    file.seek(0)
    if start.startswith(MAGIC):
        return read_gguf
    if start == _LFS:
        raise NotWeights("the weights but a git-lfs pointer to them; run git lfs pull in its folder, or download it")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise NotWeights("a weight file but a web page; download the file itself, on a hub by its download link")
    if _is_text(start):
        raise NotWeights(
            f"a weight file but a text, like a server's error ({start.decode('utf-8', 'replace')!r}); "
            "download the file itself"
        )
    if suffix in SAFETENSORS or (suffix != PTH and not zipfile.is_zipfile(file)):
        return read_safetensors
    return _read_pth


def _is_text(start: bytes) -> bool:
    """Return whether a file begins as a text. No format of weights does."""
    try:
        text, _ = codecs.utf_8_decode(start, "strict", False)  # the last character may be cut
    except UnicodeDecodeError:
        return False
    return len(start) >= 8 and "".join(text.lstrip("\ufeff").split()).isprintable()


def _held_bytes(place: Place) -> int:
    """Return the bytes of a tensor in memory; blocks stay as they are."""
    return place.num_bytes if place.dtype in BLOCKS else math.prod(place.shape) * ITEM_BYTES[place.dtype]


def _check_place(place: Place, file_size: int) -> None:
    """Check a tensor's place. Raises ValueError for a tensor whose numbers are not all within its bytes."""
    if len(place.name) > MAX_NAME:
        raise ValueError(f"a tensor's name has {len(place.name)} characters, at most {MAX_NAME} are allowed")
    sizes = (*place.shape, *place.strides, place.begin, place.num_bytes)
    if len(place.shape) > _MAX_DIMENSIONS or len(place.strides) != len(place.shape) or max(sizes) > _MAX_SIZE:
        raise ValueError(f"tensor {place.name!r} has impossible sizes")
    last = sum((size - 1) * stride for size, stride in zip(place.shape, place.strides, strict=True))
    needed = 0 if 0 in place.shape else (last + 1) * ITEM_BYTES.get(place.dtype, 0)
    if min(sizes) < 0 or needed > place.num_bytes or place.begin + place.num_bytes > file_size:
        raise ValueError(f"tensor {place.name!r} of {needed} bytes is not within the file")


# .pth ----------------------------------------------------------------------------------------------------------


class _Name(NamedTuple):
    """A class or function of the pickle, never imported."""

    name: str


class _Storage(NamedTuple):
    dtype: str
    begin: int
    num_bytes: int


class _Stored(NamedTuple):
    """A tensor before it has a name."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _read_pth(file: IO[bytes], size: int) -> TensorIndex:
    if not zipfile.is_zipfile(file):
        missing = _missing_bytes(file, size)
        lack = (
            f"truncated: at least {missing} bytes are missing" if missing > 0 else "truncated, or saved by torch < 1.6"
        )
        raise NotWeights(f"a zip-format .pth ({lack}); download it again")
    with zipfile.ZipFile(file) as archive:
        members = {member.filename: member for member in archive.infolist()}
        pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"it has {len(pickles)} files data.pkl, expected one")
        root = pickles[0].removesuffix("data.pkl")
        if (order := members.get(f"{root}byteorder")) is not None and _read_member(file, order, 16) != b"little":
            raise NotWeights("little-endian; save it on a little-endian machine")
        code = _read_member(file, members[pickles[0]], MAX_HEADER_BYTES)

    def storage(key: str, _: int) -> tuple[int, int]:
        return _member_bytes(file, members[f"{root}data/{key}"])

    found = _Interpreter(storage).run(code)
    if not isinstance(found, dict) or not all(isinstance(value, _Stored) for value in found.values()):
        raise NotWeights("a dict of tensors; give the weights themselves, not a checkpoint")
    return TensorIndex([_place(name, stored) for name, stored in found.items()], {})


def _missing_bytes(file: IO[bytes], size: int) -> int:
    """Return how many bytes a cut archive lacks at least.

    The number follows from the pickle at its begin; 0: unknown.
    """
    file.seek(0)
    start = file.read(MAX_HEADER_BYTES)
    sizes: dict[str, int] = {}

    def storage(key: str, num_bytes: int) -> tuple[int, int]:
        sizes[key] = num_bytes
        return 0, num_bytes

    with suppress(Exception):  # any bytes
        begin = _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack_from(start))
        if start.startswith(b"PK\3\4") and b"/data.pkl" in start[:begin]:
            _Interpreter(storage).run(start[begin:])
            needed: int = begin + sum(sizes.values())
            return max(0, needed - size)
    return 0


def _place(name: str, stored: _Stored) -> Place:
    dtype, begin, num_bytes = stored.storage
    skipped = stored.offset * ITEM_BYTES[dtype]
    return Place(name, dtype, begin + skipped, num_bytes - skipped, stored.shape, stored.strides)


def _member_bytes(file: IO[bytes], member: zipfile.ZipInfo) -> tuple[int, int]:
    """Return begin and length of a member. Raises ValueError for a compressed member."""
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 or member.compress_size != member.file_size:
        raise ValueError(f"{member.filename[:MAX_NAME]!r} is compressed or encrypted; save it with torch.save")
    file.seek(member.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if not header.startswith(b"PK\3\4"):
        raise ValueError(f"{member.filename[:MAX_NAME]!r} is not where the archive says")
    return member.header_offset + len(header) + sum(_LOCAL_HEADER.unpack(header)), member.file_size


def _read_member(file: IO[bytes], member: zipfile.ZipInfo, limit: int) -> bytes:
    begin, length = _member_bytes(file, member)
    if length > limit:
        raise ValueError(f"{member.filename[:MAX_NAME]!r} has {length} bytes, at most {limit} are allowed")
    file.seek(begin)
    return file.read(length)


@dataclass(slots=True)
class _Interpreter:
    """Runs the pickle of a dict of tensors. Values are text, numbers, tuples, lists, dicts and the classes above."""

    find_storage: Callable[[str, int], tuple[int, int]]
    """(key, expected length) -> begin and length in the file"""
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self, code: bytes) -> Any:
        """Return the pickle's value. Raises NotWeights for anything that torch.save does not write."""
        for opcode, argument, _ in pickletools.genops(code):
            if opcode.name == "STOP":
                return self.stack.pop()
            action = _ACTIONS.get(opcode.name)
            if action is None:
                raise NotWeights(f"a weight file (its pickle has {opcode.name}); save a dict of tensors")
            action(self, argument)
        raise ValueError("its pickle has no end")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def memoize(self, number: int | None) -> None:
        self.memo[len(self.memo) if number is None else number] = self.stack[-1]

    def extend(self, items: list[Any]) -> None:
        _expect(self.stack[-1], list).extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = _expect(self.stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise NotWeights("a dict of tensors by name; give the weights themselves, not a checkpoint")
            target[key] = value

    def reduce(self) -> None:
        function, arguments = self.pop(2)
        self.push(_rebuild(_expect(function, _Name).name, _expect(arguments, tuple)))

    def build(self) -> None:
        """Drop the attributes of an OrderedDict: state_dict() notes its modules' versions."""
        self.pop(1)
        _expect(self.stack[-1], dict)

    def pop(self, number: int) -> list[Any]:
        at = len(self.stack) - number
        if at < 0:
            raise ValueError("its pickle takes more values than it has")
        values = self.stack[at:]
        del self.stack[at:]
        return values

    def pop_to_mark(self) -> list[Any]:
        return self.pop(len(self.stack) - self.marks.pop())

    def push_storage(self) -> None:
        kind, name, key, _, numel = _expect(self.stack.pop(), tuple)
        dtype = _STORAGES[_expect(name, _Name).name]
        expected = _expect(numel, int) * ITEM_BYTES[dtype]
        begin, num_bytes = self.find_storage(_expect(key, str), expected)
        if kind != "storage" or num_bytes != expected:
            raise ValueError(f"storage {key[:MAX_NAME]!r} has {num_bytes} bytes, its tensors expect another size")
        self.push(_Storage(dtype, begin, num_bytes))


_Action = Callable[[_Interpreter, Any], None]
_ACTIONS: dict[str, _Action] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda run, argument: None),
    **dict.fromkeys(
        ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _Interpreter.push
    ),
    "NONE": lambda run, _: run.push(None),
    "NEWTRUE": lambda run, _: run.push(True),
    "NEWFALSE": lambda run, _: run.push(False),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Interpreter.memoize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda run, number: run.push(run.memo[number])),
    "MARK": lambda run, _: run.marks.append(len(run.stack)),
    "EMPTY_TUPLE": lambda run, _: run.push(()),
    "TUPLE1": lambda run, _: run.push(tuple(run.pop(1))),
    "TUPLE2": lambda run, _: run.push(tuple(run.pop(2))),
    "TUPLE3": lambda run, _: run.push(tuple(run.pop(3))),
    "TUPLE": lambda run, _: run.push(tuple(run.pop_to_mark())),
    "EMPTY_LIST": lambda run, _: run.push([]),
    "APPEND": lambda run, _: run.extend(run.pop(1)),
    "APPENDS": lambda run, _: run.extend(run.pop_to_mark()),
    "EMPTY_DICT": lambda run, _: run.push({}),
    "SETITEM": lambda run, _: run.set_items(run.pop(2)),
    "SETITEMS": lambda run, _: run.set_items(run.pop_to_mark()),
    "GLOBAL": lambda run, name: run.push(_known_name(name)),
    "STACK_GLOBAL": lambda run, _: run.push(_known_name(" ".join(_expect(part, str) for part in run.pop(2)))),
    "BINPERSID": lambda run, _: run.push_storage(),
    "REDUCE": lambda run, _: run.reduce(),
    "BUILD": lambda run, _: run.build(),
}
"""All that torch.save writes for a dict of tensors, in any protocol."""


def _rebuild(name: str, arguments: tuple[Any, ...]) -> Any:
    """Return what a call of torch makes. Raises ValueError."""
    if name == _ORDERED_DICT and not arguments:
        return {}
    if name in _REBUILD_PARAMETERS:
        return _expect(arguments[0], _Stored)
    if name == _REBUILD_TENSOR:
        storage, offset, shape, strides = arguments[:4]
        return _Stored(_expect(storage, _Storage), _whole((offset,))[0], _whole(shape), _whole(strides))
    raise ValueError(f"its pickle calls {name}")


def _known_name(name: str) -> _Name:
    if name not in _NAMES:
        raise NotWeights(
            f"a weight file (its pickle uses {name[:MAX_NAME].replace(' ', '.')!r}); save dense, complete tensors"
        )
    return _Name(name)


def _whole(sizes: Any) -> tuple[int, ...]:
    found = tuple(int(_expect(size, int)) for size in _expect(sizes, tuple))
    if min(found, default=0) < 0:
        raise ValueError("its pickle has a negative size")
    return found


def _expect(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"its pickle has {type(value).__name__} in place of {kind.__name__}")  # noqa: TRY004
    return value
