"""Parsers from the text of a flag or variable to its value. They raise SettingsError.

A strategy is a text of the `rwkv` package, like "cuda fp16 *10 -> cpu fp32".
"""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import logging
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from routes.api_keys import KeysError, load_keys
from rwkv_batch.config import DTYPES as WEIGHT_TYPES
from rwkv_batch.config import STATE_NAME
from state_pool.addresses import SCHEMES, parse_checkpoint_address, parse_server_address

logger = logging.getLogger(__name__)
Value = TypeVar("Value", int, float)
_HOST = r"[\w-]+(?:\.[\w-]+)*"
_HOST_NAME = re.compile(rf"\*|(?:\*\.)?{_HOST}|[0-9a-f:]+", re.ASCII)
"""Also an IPv6 address, without brackets."""
_HTTP_URL = re.compile(rf"https?://(?:{_HOST}|\[[0-9a-f:]+\])(?::\d+)?(?:/[\w./-]*)?", re.ASCII)
_ORIGIN = re.compile(rf"\*|[a-z][a-z0-9+.-]*://(?:{_HOST}|\[[0-9a-f:]+\])(?::\d+)?", re.ASCII)


class SettingsError(Exception):
    """A flag or variable is invalid. The message is one line."""


def file_error(error: OSError) -> str:
    """Return an error's file, its reason and a remedy, in one line."""
    if error.filename is None or error.strerror is None:
        return str(error)
    remedy = _REMEDIES.get(error.errno or 0, "check the file and its disk")
    return f"{os.fsdecode(error.filename)} cannot be read or written ({error.strerror}); {remedy}"


_REMEDIES = {
    errno.ENOENT: "check the name",
    errno.ENOTDIR: "check the name",
    errno.EISDIR: "name a file, not a folder",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EROFS: "use another disk",
    errno.ENOSPC: "free space on its disk",
    errno.EDQUOT: "free space on its disk",
}


def integer(lowest: int, highest: int) -> Callable[[str], int]:
    """Returns a parser of integers from `lowest` to `highest`. It raises SettingsError."""
    return _bounded(int, "a whole number", lowest, highest)


def decimal(lowest: float, highest: float) -> Callable[[str], float]:
    """Returns a parser of numbers from `lowest` to `highest`. It raises SettingsError."""
    return _bounded(float, "a number", lowest, highest)


def _bounded(read: Callable[[str], Value], kind: str, lowest: Value, highest: Value) -> Callable[[str], Value]:
    def parse(text: str) -> Value:
        try:
            value = read(text)
        except ValueError:
            raise SettingsError(f"must be {kind}, got {text!r}") from None
        if not lowest <= value <= highest:
            raise SettingsError(f"must be {lowest:.15g}..{highest:.15g}, got {text}")
        return value

    return parse


def one_of(*names: str) -> Callable[[str], str]:
    """Returns a parser that accepts these names. It raises SettingsError."""

    def parse(text: str) -> str:
        if text not in names:
            raise SettingsError(f"must be one of {', '.join(names)}, got {text!r}")
        return text

    return parse


def _names(
    is_valid: Callable[[str], object], what: str, form: Callable[[str], str] = str
) -> Callable[[str], tuple[str, ...]]:
    """Returns a parser of names with commas between them. It raises SettingsError, which says `what` they must be."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(form(name.strip()) for name in text.split(",") if name.strip())
        for name in names:
            if not is_valid(name):
                raise SettingsError(f"must list {what}, got {name!r}")
        return names

    return parse


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def weight_type(text: str) -> str:
    """Parses --dtype. A former name is accepted for one release. Raises SettingsError."""
    if text == "w8a8":
        logger.warning("--dtype w8a8 is called int8; write --dtype int8")
        return "int8"
    return one_of(*WEIGHT_TYPES)(text)


BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def boolean(text: str) -> bool:
    """Parses words such as "true", "off" and "1". Raises SettingsError."""
    if text.lower() not in BOOLEANS:
        raise SettingsError(f"must be one of {', '.join(BOOLEANS)}, got {text!r}")
    return BOOLEANS[text.lower()]


def host(text: str) -> str:
    """Resolves a host name to an IP address. Robyn accepts addresses only. Raises SettingsError."""
    try:
        return str(socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        raise SettingsError(f"must be an address of this machine, got {text!r}, which has no DNS entry") from None


def cluster(text: str) -> str:
    """Accepts `HOST:PORT`, "auto" or "". Raises SettingsError."""
    host, _, port = text.rpartition(":")
    if text and text != "auto" and not (host and port.isdecimal() and not set(text) & set("|/ ")):
        raise SettingsError(f"must be auto or HOST:PORT of a Ray cluster's head, got {text!r}")
    return text


def service_name(text: str) -> str:
    """Accepts a name of letters, digits, ".", "_" and "-". Raises SettingsError."""
    if not STATE_NAME.fullmatch(text):
        raise SettingsError(f"must consist of letters, digits, '.', '_' and '-', got {text!r}")
    return text


def ip(text: str) -> str:
    """Accepts an IP address. Raises SettingsError."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise SettingsError(f"must be an IP address, got {text!r}") from None


def device_groups(text: str) -> tuple[tuple[str, ...], ...]:
    """Parses `0,1;2,3`, the devices per engine. Raises SettingsError."""
    return tuple(devices(group) for group in text.split(";"))


def devices(text: str) -> tuple[str, ...]:
    """Parses `[0,1]`, `0,1` or `cuda:0,cpu`. A bare number is a CUDA device. Raises SettingsError."""
    names = [name.strip() for name in text.strip().removeprefix("[").removesuffix("]").split(",")]
    for name in names:
        kind, _, decimal = name.partition(":")
        known = kind in ("auto", "cpu", "cuda") and (not decimal or decimal.isdecimal())
        if not (name.isdecimal() or known):
            raise SettingsError(f"must list devices like [0,1] or cuda:0,cpu, got {text!r}")
    return tuple(f"cuda:{name}" if name.isdecimal() else name for name in names)


def tune_device(text: str) -> str:
    """Accepts auto, none, cpu, cuda and `cuda:N`. Raises SettingsError."""
    if not re.fullmatch(r"auto|none|cpu|cuda(?::\d{1,2})?", text, re.ASCII):
        raise SettingsError(f"must be auto, none, cpu or a GPU like cuda:0, got {text!r}")
    return text


def database(text: str) -> str:
    """Accepts a PostgreSQL address or a file path. Raises SettingsError.

    A directory is refused here, because SQLite reports it with an unclear error.
    """
    if text.startswith(SCHEMES):
        return _accepted(text, parse_server_address)
    if text and Path(text).is_dir():
        raise SettingsError(f"must be a file, got the directory {text}; name a file in it, e.g. {text}/sessions.db")
    return text


def _accepted(text: str, check: Callable[[str], object], before: str = "") -> str:
    """Returns a text that `check` accepts. Raises SettingsError with its reason after `before`."""
    try:
        check(text)
    except (ValueError, KeysError) as error:
        raise SettingsError(f"{before}{error}") from None
    return text


def checkpoint_store(text: str) -> str:
    """Accepts the address of a checkpoint store, or "". Raises SettingsError."""
    return text and _accepted(text, parse_checkpoint_address)


def keys_file(text: str) -> str:
    """Returns the absolute path of a valid keys file. Raises SettingsError."""
    return str(Path(_accepted(text, load_keys)).absolute())


def folder(text: str) -> str:
    """Returns the absolute path of a folder. Raises SettingsError."""
    if not Path(text).is_dir():
        raise SettingsError(f"must be an existing folder, got {text}")
    return str(Path(text).absolute())


def files(text: str) -> tuple[str, ...]:
    """Splits `a.pth,b.pth`."""
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


def named_files(text: str) -> tuple[str, ...]:
    """Splits `poet=states/poet.pth,clerk=clerk.pth`. Names are unique. Raises SettingsError."""
    entries = files(text)
    names = [entry.partition("=")[0] for entry in entries]
    for entry, name in zip(entries, names, strict=True):
        if not STATE_NAME.fullmatch(name) or not entry.partition("=")[2]:
            raise SettingsError(f"must be NAME=FILE with a name of letters, digits, '.', '_' and '-', got {entry!r}")
        if names.count(name) > 1:
            raise SettingsError(f"uses the name {name!r} twice; use a different name for each file")
    return entries


def language_styles(text: str) -> tuple[str, ...]:
    """Splits `de=Use the formal Sie.; fr=Use vous.`. Languages are unique. Raises SettingsError."""
    from rwkv_batch.translation.languages import is_known_language, language_name  # loads NumPy
    from rwkv_batch.translation.prompts import MAX_STYLE_CHARACTERS

    entries = tuple(entry.strip() for entry in text.split(";") if entry.strip())
    names = list[str]()
    for entry in entries:
        language, _, style = entry.partition("=")
        names.append(language_name(language.strip()))
        if not is_known_language(language.strip()) or not 0 < len(style.strip()) <= MAX_STYLE_CHARACTERS:
            limit = f"; begins the next language; at most {MAX_STYLE_CHARACTERS} characters each"
            raise SettingsError(f"must be LANGUAGE=INSTRUCTION like de=Use Sie. ({limit}), got {entry[:80]!r}")
        if names.count(names[-1]) > 1:
            raise SettingsError(f"has two instructions for {names[-1]}; give one for each language")
    return entries


networks = _names(_is_network, "addresses or networks like 10.0.0.0/8,::1")
origins = _names(
    _ORIGIN.fullmatch,
    "origins like https://a.example,http://localhost:3000, or *",
    lambda name: name.lower().rstrip("/"),
)
host_names = _names(_HOST_NAME.fullmatch, "host names without ports, like api.example,*.example, or *", str.lower)


def otlp_endpoint(text: str) -> str:
    """Returns the URL of a collector. Raises SettingsError, also if the exporter is not installed."""
    if text and not _HTTP_URL.fullmatch(text):
        raise SettingsError(f"must be a collector's URL like http://localhost:4318, got {text!r}")
    if text and not all(map(_is_installed, ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"))):
        raise SettingsError("needs: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http")
    return text


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def layer_counts(text: str) -> tuple[float, ...]:
    """Parses `9,8,8,7` or `8.5,8.5,8,7`, also in brackets. Raises SettingsError."""
    count = decimal(1, 1000)

    def parse_part(part: str) -> float:
        if not part.removesuffix(".5").isdecimal():
            raise SettingsError(f"must be whole numbers or halves of layers, like 9,8,8,7 or 8.5,8,8.5,7, got {part!r}")
        return count(part)

    return tuple(parse_part(part.strip()) for part in text.strip().removeprefix("[").removesuffix("]").split(","))


def resident_counts(text: str) -> tuple[int | None, ...]:
    """Parses `20`, or `20,all` for several devices. Raises SettingsError."""
    parse_part = integer(0, 1000)
    return tuple(None if part.strip() == "all" else parse_part(part.strip()) for part in text.split(","))


def strategy(text: str) -> str:
    """Accepts a valid strategy and returns it unchanged. Raises SettingsError."""
    return _accepted(text, parse_strategy, "is not a valid strategy: ")


PART = re.compile(
    r"(?P<device>cuda(?::\d+)?|cpu)\s+(?P<dtype>[a-z0-9]+)(?:\s*\*\s*(?P<count>\d+)(?P<plus>\+)?)?$", re.ASCII
)
DTYPES = {
    **{name: name for name in ("fp32", "bf16", "fp16", "fp8", "int8", "int4")},
    **{
        f"{name}{suffix}": small
        for name in ("fp32", "bf16", "fp16")
        for suffix, small in (("i8", "int8"), ("i4", "int4"))
    },
}
MAX_LAYERS = 1000
DEFAULT_DTYPES = {"cuda": "fp16", "cpu": "fp32"}
"""The meaning of --dtype auto per device."""


class StrategyError(ValueError):
    """A strategy is invalid. The message names the part and the remedy."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """Values of --pp-devices, --pp-layers, --pp-resident and --dtype."""

    devices: tuple[str, ...]
    layers: tuple[int, ...]
    """per device; 0: the rest; empty: split automatically"""
    dtype: str
    resident: tuple[int | None, ...] = ()
    """per device, layers that stay on it while others are streamed; None: all; empty: all on all devices"""


@dataclass(frozen=True, slots=True)
class _Part:
    device: str
    dtype: str
    count: int | None
    streams: bool
    """`*count+`: the part takes the rest of the layers, and `count` of them stay on the device"""


def parse_strategy(text: str) -> Strategy:
    """`device dtype [*layers] -> ...`. The last part without a count, or a part with `+`, takes the rest.

    Raises StrategyError.
    """
    parts = [_parse_part(part.strip()) for part in text.split("->")]
    devices = tuple(part.device for part in parts)
    if len(parts) > 1 and None in [part.count for part in parts[:-1]]:
        raise StrategyError(
            f'in {text!r} every part but the last needs a number of layers, like "cuda fp16 *10 -> cpu fp32"'
        )
    counts = [0 if part.streams else part.count or 0 for part in parts]
    if counts.count(0) > 1:
        raise StrategyError(f"in {text!r} more than one part takes the rest of the layers; give the others a number")
    layers = tuple(counts) if len(parts) > 1 or counts[0] else ()
    streamed = any(part.streams for part in parts)
    resident = tuple(part.count if part.streams else None for part in parts) if streamed else ()
    return Strategy(devices, layers, _common_dtype(text, parts), resident)


def _parse_part(part: str) -> _Part:
    found = PART.match(part)
    if found is None:
        raise StrategyError(f'{part!r} is not `device dtype *layers` with cuda, cuda:N or cpu, like "cuda:0 fp16 *10"')
    if found["dtype"] not in DTYPES:
        raise StrategyError(f"{part!r} has the type {found['dtype']!r}; use one of {', '.join(DTYPES)}")
    streams = found["plus"] is not None
    if found["count"] and (len(found["count"]) > 4 or int(found["count"]) > MAX_LAYERS):
        raise StrategyError(f"{part[:80]!r} gives {found['device']} more than {MAX_LAYERS} layers; give fewer")
    count = int(found["count"]) if found["count"] else None
    if count == 0 and not streams:
        raise StrategyError(f"{part!r} gives {found['device']} no layers; leave the part out")
    return _Part(found["device"], DTYPES[found["dtype"]], count, streams)


def _common_dtype(text: str, parts: list[_Part]) -> str:
    dtypes = {part.dtype for part in parts}
    if len(dtypes) == 1:
        return dtypes.pop()
    if all(part.dtype == DEFAULT_DTYPES[part.device.partition(":")[0]] for part in parts):
        return "auto"
    raise StrategyError(
        f"{text!r} mixes types: use one for all parts, or fp16 on cuda with fp32 on cpu; see --dtype and --pp-layers"
    )
