"""The text of a flag or variable -> its value, or a SettingsError that says what it must be."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from routes.api_keys import KeysError, load_keys
from rwkv_batch.config import STATE_NAME
from rwkv_batch.strategy import StrategyError, parse_strategy
from state_pool.checkpoint_address import parse_checkpoint_address
from state_pool.database_address import SCHEMES, parse_server_address

Value = TypeVar("Value", int, float)


class SettingsError(Exception):
    """A flag or variable cannot be used; the message is one line."""


def integer(lowest: int, highest: int) -> Callable[[str], int]:
    """A parser of whole numbers from `lowest` to `highest`; it raises SettingsError."""
    return _bounded(int, "a whole number", lowest, highest)


def decimal(lowest: float, highest: float) -> Callable[[str], float]:
    """A parser of numbers from `lowest` to `highest`; it raises SettingsError."""
    return _bounded(float, "a number", lowest, highest)


def _bounded(read: Callable[[str], Value], what: str, lowest: Value, highest: Value) -> Callable[[str], Value]:
    def parse(text: str) -> Value:
        try:
            value = read(text)
        except ValueError:
            raise SettingsError(f"must be {what}, got {text!r}") from None
        if not lowest <= value <= highest:
            raise SettingsError(f"must be {lowest:.15g}..{highest:.15g}, got {text}")
        return value

    return parse


def one_of(*names: str) -> Callable[[str], str]:
    """A parser of these names; it raises SettingsError."""

    def parse(text: str) -> str:
        if text not in names:
            raise SettingsError(f"must be one of {', '.join(names)}, got {text!r}")
        return text

    return parse


def boolean(text: str) -> bool:
    """Words such as "true", "off" and "1". Raises SettingsError."""
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise SettingsError(f"must be one of {', '.join(words)}, got {text!r}")
    return words[text.lower()]


def host(text: str) -> str:
    """An IP address, looked up if it is a name: Robyn takes nothing else. Raises SettingsError."""
    try:
        return str(socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        raise SettingsError(f"must be an address of this machine, got {text!r}, which cannot be resolved") from None


def cluster(text: str) -> str:
    """`HOST:PORT`, "auto" or "". Raises SettingsError."""
    host, _, port = text.rpartition(":")
    if text and text != "auto" and not (host and port.isdecimal() and not set(text) & set("|/ ")):
        raise SettingsError(f"must be auto or HOST:PORT of a Ray cluster's head, got {text!r}")
    return text


def service_name(text: str) -> str:
    """A name as tuned states have it. Raises SettingsError."""
    if not STATE_NAME.fullmatch(text):
        raise SettingsError(f"must be of letters, digits, '.', '_' and '-', got {text!r}")
    return text


def ip(text: str) -> str:
    """An IP address. Raises SettingsError."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise SettingsError(f"must be an IP address, got {text!r}") from None


def device_groups(text: str) -> tuple[tuple[str, ...], ...]:
    """`0,1;2,3`: the devices of each engine. Raises SettingsError."""
    return tuple(devices(group) for group in text.split(";"))


def devices(text: str) -> tuple[str, ...]:
    """`[0,1]`, `0,1` and `cuda:0,cpu` alike; a bare number is a CUDA device. Raises SettingsError."""
    names = [name.strip() for name in text.strip().removeprefix("[").removesuffix("]").split(",")]
    for name in names:
        kind, _, decimal = name.partition(":")
        known = kind in ("auto", "cpu", "cuda") and (not decimal or decimal.isdecimal())
        if not (name.isdecimal() or known):
            raise SettingsError(f"must list devices like [0,1] or cuda:0,cpu, got {text!r}")
    return tuple(f"cuda:{name}" if name.isdecimal() else name for name in names)


def database(text: str) -> str:
    """A server's address, or a file: SQLite would make its lock beside a directory of that name, and then fail.

    Raises SettingsError.
    """
    if text.startswith(SCHEMES):
        try:
            parse_server_address(text)
        except ValueError as error:
            raise SettingsError(str(error)) from None
    elif text and Path(text).is_dir():
        raise SettingsError(f"must be a file, but {text} is a directory; give a file in it, like {text}/sessions.db")
    return text


def checkpoint_store(text: str) -> str:
    """An address of one, or "". Raises SettingsError."""
    if text:
        try:
            parse_checkpoint_address(text)
        except ValueError as error:
            raise SettingsError(str(error)) from None
    return text


def keys_file(text: str) -> str:
    """The absolute path of a file of keys that can be used. Raises SettingsError."""
    try:
        load_keys(text)
    except KeysError as error:
        raise SettingsError(str(error)) from None
    return str(Path(text).absolute())


def folder(text: str) -> str:
    """The absolute path of a folder. Raises SettingsError."""
    if not Path(text).is_dir():
        raise SettingsError(f"must be a folder, and {text} is none")
    return str(Path(text).absolute())


def files(text: str) -> tuple[str, ...]:
    """`a.pth,b.pth`."""
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


def named_files(text: str) -> tuple[str, ...]:
    """`poet=states/poet.pth,clerk=clerk.pth`: names, once each, of files. Raises SettingsError."""
    entries = files(text)
    names = [entry.partition("=")[0] for entry in entries]
    for entry, name in zip(entries, names, strict=True):
        if not STATE_NAME.fullmatch(name) or not entry.partition("=")[2]:
            raise SettingsError(f"must be NAME=FILE, the name of letters, digits, '.', '_' and '-', got {entry!r}")
        if names.count(name) > 1:
            raise SettingsError(f"names {name!r} twice; give each a name of its own")
    return entries


def networks(text: str) -> tuple[str, ...]:
    """`10.0.0.0/8, ::1`: addresses and networks of proxies. Raises SettingsError."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        try:
            ipaddress.ip_network(name)
        except ValueError:
            raise SettingsError(f"must list addresses or networks like 10.0.0.0/8,::1, got {name!r}") from None
    return names


def layer_counts(text: str) -> tuple[float, ...]:
    """`9,8,8,7` or `8.5,8.5,8,7`, also in brackets. Raises SettingsError."""
    count = decimal(1, 1000)

    def parse_part(part: str) -> float:
        if not part.removesuffix(".5").isdecimal():
            raise SettingsError(f"must be whole numbers or halves of layers, like 9,8,8,7 or 8.5,8,8.5,7, got {part!r}")
        return count(part)

    return tuple(parse_part(part.strip()) for part in text.strip().removeprefix("[").removesuffix("]").split(","))


def resident_counts(text: str) -> tuple[int | None, ...]:
    """`20`, or for several devices `20,all`. Raises SettingsError."""
    parse_part = integer(0, 1000)
    return tuple(None if part.strip() == "all" else parse_part(part.strip()) for part in text.split(","))


def strategy(text: str) -> str:
    """A strategy that can be followed, as it is. Raises SettingsError."""
    try:
        parse_strategy(text)
    except StrategyError as error:
        raise SettingsError(f"cannot be followed: {error}") from None
    return text
