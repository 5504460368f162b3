"""Builds settings from command line, environment and file. This is the order of precedence."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from native.nvcc import torch_cuda
from programs.settings.config import ServiceConfig, Settings
from programs.settings.config_file import CONFIG_FILE, file_values
from programs.settings.flags import COMMON, FLAGS, HEADINGS, PASSWORD_FILE, REMOVED, Flag, default_text
from programs.settings.parser import CommandParser
from programs.settings.values import SettingsError, boolean, database, parse_strategy
from routes.config import HttpConfig
from rwkv_batch.config import EngineConfig
from rwkv_batch.version import COMMIT, __version__
from state_pool.config import PoolConfig

_GPUS = Path("/proc/driver/nvidia/gpus")


def version_text() -> str:
    """One line per part; the first one is the name and the version."""
    from importlib import metadata  # only `--version` needs it

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    parts = {"commit": _commit(), "torch": torch, "CUDA": torch_cuda() or "none", "GPU": gpu_names()}
    return "\n".join([f"rwkv-batch {__version__}", *(f"{name:<7}{value}" for name, value in parts.items())])


def _commit() -> str:
    """The commit of a wheel or clone. "+": the clone has changed files."""
    top = Path(__file__).resolve().parents[2]
    if COMMIT or not (top / ".git").exists():
        return COMMIT or "unknown"
    command = ["git", "-C", str(top), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def gpu_names() -> str:
    """NVIDIA's GPUs as the driver lists them."""
    texts = [file.read_text("utf-8", "replace") for file in sorted(_GPUS.glob("*/information"))]
    models = Counter(found[1].strip() for text in texts if (found := re.search(r"^Model:(.*)$", text, re.MULTILINE)))
    return ", ".join(f"{count} x {model}" if count > 1 else model for model, count in models.items()) or "none"


logger = logging.getLogger("settings")

_OTHER_VARIABLES = (
    *("RWKV_BUILD_DIR", "RWKV_SUPERVISOR", "RWKV_CRASH_AT", "RWKV_LONG_TESTS"),
    *("RWKV_V7_ON", "RWKV_JIT_ON", "RWKV_CUDA_ON"),
)
"""Variables of other parts of the program, and of the package rwkv."""
_FILE_FLAGS = dict.fromkeys(("model_path", "keys_file", "state_db"), "FILE")
_UNSAID = ("", "0", "auto")
"""Defaults that --help leaves out."""


class _Repeated(argparse.Action):
    """Joins the values of a repeated flag with commas."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


class _Version(argparse.Action):
    """Prints the versions and exits. Looks them up only when printing."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        sys.stdout.write(f"{version_text()}\n")
        parser.exit()


def build_parser() -> CommandParser:
    """Return the parser. Values stay text (None: not given); one place reads flag and environment."""
    parser = CommandParser(
        "serve",
        "Starts the service. Each flag is also an environment variable, and a line of the file of --config.",
        "--model-path model.gguf --port 8080\n--host 0.0.0.0 --password-file password.txt --dtype int8",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help="print the versions and exit"
    )
    parser.add_argument(CONFIG_FILE[0], dest=CONFIG_FILE[1], metavar="FILE", help="TOML file of settings")
    parser.add_argument(
        PASSWORD_FILE[0], dest=PASSWORD_FILE[1], metavar="FILE", help="file whose first line is the password"
    )
    for section, flags in FLAGS.items():
        group = parser.add_argument_group(HEADINGS[section])
        for flag in flags:
            default = default_text(section, flag)
            known = f"default: {default}; {flag.variable}" if default else flag.variable
            action = _Repeated if flag.repeats else "store"
            bare: dict[str, Any] = {"nargs": "?", "const": "yes"} if flag.parse is boolean else {}
            added = group.add_argument(
                *flag.options,
                dest=flag.variable,
                metavar=_FILE_FLAGS.get(flag.field, "X"),
                help=_escaped(f"{flag.help} ({known})"),
                action=action,
                **bare,
            )
            if flag.field in COMMON:
                shown = "" if default in _UNSAID else f"; default: {default}"
                parser.short_help[added] = _escaped(COMMON[flag.field] + shown)
            else:
                parser.hide(flag.option)
    for option in REMOVED:
        parser.add_argument(option, dest=_variable(option), help=argparse.SUPPRESS)
    return parser


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _variable(option: str) -> str:
    return "RWKV_" + option.removeprefix("--").replace("-", "_").upper()


def _warn_of_removed(source: Mapping[str, str]) -> None:
    for option, reason in REMOVED.items():
        if _variable(option) in source:
            logger.warning("%s (or %s) has no effect: %s. Remove it.", option, _variable(option), reason)


def _warn_of_unknown(environment: Mapping[str, str]) -> None:
    """Warn of variables that look like settings and are none."""
    known = {variable for flags in FLAGS.values() for flag in flags for variable in flag.variables}
    known |= {PASSWORD_FILE[1], CONFIG_FILE[1], *_OTHER_VARIABLES, *map(_variable, REMOVED)}
    for name in sorted(environment):
        if name.startswith("RWKV_") and name not in known and not name.startswith("RWKV_TEST_"):
            nearest = difflib.get_close_matches(name, sorted(known), 1)
            remedy = f"did you mean {nearest[0]}?" if nearest else "docs/settings.md has all of them"
            logger.warning("the variable %s has no effect, since no setting has this name; %s", name, remedy)


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Return the settings. Raises SettingsError with a one-line message."""
    cli_values = vars(build_parser().parse(arguments)[0])
    source = {**environment, **{name: text for name, text in cli_values.items() if text is not None}}
    origins = {name: name for name in environment}
    if path := source.get(CONFIG_FILE[1]):
        in_file = file_values(path)
        source = {**in_file, **source}
        origins = {
            name: f"{path}: {name.removeprefix('RWKV_').replace('_', '-').lower()}" for name in in_file
        } | origins
    _warn_of_removed(source)
    _warn_of_unknown(environment)
    values = {section: _section_values(flags, cli_values, source, origins) for section, flags in FLAGS.items()}
    if not values[HttpConfig].get("password") and (path := source.get(PASSWORD_FILE[1])):
        values[HttpConfig]["password"] = _first_line(path)
    _apply_devices(values[EngineConfig], values[ServiceConfig])
    _apply_strategy(values[EngineConfig])
    engine = EngineConfig(**{"model_path": "", **values[EngineConfig]}, pool=PoolConfig(**values[PoolConfig]))
    _refuse_file_in_cluster(values[ServiceConfig].get("cluster", ""), engine.pool)
    names = ("drain_timeout_s", "model_name", "models_dir", "speculate")
    shared: dict[str, Any] = {name: getattr(engine, name) for name in names}
    service = ServiceConfig(**values[ServiceConfig])
    if service.http_workers == 0:
        service = msgspec.structs.replace(service, http_workers=default_http_workers(os.cpu_count() or 1))
    return Settings(service=service, http=HttpConfig(**values[HttpConfig], **shared), engine=engine)


def _apply_devices(engine: dict[str, Any], service: dict[str, Any]) -> None:
    """Apply `--pp-devices` to the first engine, and to each of several engines."""
    groups: tuple[tuple[str, ...], ...] = engine.pop("devices", ())
    if not groups:
        return
    engine["devices"] = groups[0]
    if len(groups) > 1:
        if service.setdefault("replicas", len(groups)) != len(groups):
            raise SettingsError(f"--pp-devices names {len(groups)} engines, --replicas {service['replicas']}")
        service["replica_devices"] = groups


def _refuse_file_in_cluster(cluster: str, pool: PoolConfig) -> None:
    """Checks that engines on several machines do not share one file. Raises SettingsError."""
    if cluster and pool.state_db and pool.files_stem == pool.state_db:
        raise SettingsError(
            f"--cluster has engines on several machines, which cannot share the file {pool.state_db}; "
            "give --state-db postgresql://USER:PASSWORD@HOST/NAME, or --state-db '' to keep sessions in memory alone"
        )


def _apply_strategy(engine: dict[str, Any]) -> None:
    """Replace `--strategy` by its settings. Raises SettingsError if one of these is given too."""
    if not engine.get("strategy"):
        return
    for field, option in (
        ("devices", "--pp-devices"),
        ("layers", "--pp-layers"),
        ("resident", "--pp-resident"),
        ("dtype", "--dtype"),
    ):
        if field in engine:
            raise SettingsError(f"--strategy says what {option} says: give one of them")
    strategy = parse_strategy(engine["strategy"])
    engine |= {"devices": strategy.devices, "layers": strategy.layers, "dtype": strategy.dtype}
    engine["resident"] = strategy.resident


def default_http_workers(cpus: int) -> int:
    """Return the number of HTTP worker processes for this number of CPUs."""
    return 8 if cpus >= 16 else 4 if cpus >= 8 else 2


def _section_values(
    flags: Sequence[Flag], cli_values: Mapping[str, Any], source: Mapping[str, str], origins: Mapping[str, str]
) -> dict[str, Any]:
    """Return field -> value. Errors name the flag, or where the variable's text comes from."""
    values = {}
    for flag in flags:
        name = next((name for name in flag.variables if name in source), "")
        text = source.get(name)
        if text is None or (text == "" and flag.parse not in (str, database)):
            continue
        try:
            values[flag.field] = flag.parse(text)
        except SettingsError as error:
            origin = flag.option if cli_values[flag.variable] is not None else origins.get(name, name)
            raise SettingsError(f"{origin} {error}") from None
    return values


def _first_line(path: str) -> str:
    try:
        password = Path(path).read_text(encoding="utf-8").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--password-file {path} cannot be read: {error}") from None
    if not password:
        raise SettingsError(f"--password-file {path} has no password in its first line")
    return password
