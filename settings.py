"""Every setting of the service in one table: command-line flag, environment variable, default, meaning.

A flag `--max-running` is also read from `RWKV_MAX_RUNNING`; the command line wins. The defaults are those of
HttpConfig, EngineConfig and PoolConfig, which is where the values end up.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from routes.api_keys import KeysError, load_keys
from routes.config import HttpConfig
from rwkv_batch import __version__
from rwkv_batch.config import ALL_BATCH_ROWS, STATE_NAME, WHOLE_STEPS, EngineConfig
from rwkv_batch.strategy import StrategyError, parse_strategy
from state_pool.checkpoint_address import parse_checkpoint_address
from state_pool.config import PoolConfig
from state_pool.database_address import SCHEMES, parse_server_address

Section = type[HttpConfig] | type[EngineConfig] | type[PoolConfig]


DTYPES = ("auto", "fp32", "bf16", "fp16", "fp8", "int8", "int4")


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What concerns the supervisor alone."""

    http_workers: int = 0
    """0: by the number of CPUs."""
    replicas: int = 0
    """Engines of the service's own model, which share the database; 0: one that has it for itself."""
    replica_devices: tuple[tuple[str, ...], ...] = ()
    """The devices of each, where they are named."""
    cluster: str = ""
    """Address of the Ray cluster whose nodes have the engines, "auto": of the one that this machine belongs to."""
    cluster_service: str = "rwkv-batch"
    """What machines have in common that serve with the same engines."""
    cluster_node: str = ""
    """IP address of this machine's Ray node, where it has several."""
    front: str = "auto"
    """"nginx" | "none" | "auto": nginx where it is installed and the host is not loopback."""
    max_connections_per_client: int = 0
    """0: as many as the HTTP workers write answers to one client."""
    max_models: int = 4
    """Loaded while serving, beside the service's own."""
    model_idle_s: float = 0.0
    """0: a model that is not used stays."""
    log_format: str = "text"
    log_level: str = "info"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration."""

    service: ServiceConfig
    http: HttpConfig
    engine: EngineConfig


class SettingsError(Exception):
    """A flag or variable cannot be used; the message is one line."""


def _whole(lowest: int, highest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise SettingsError(f"must be a whole number, got {text!r}") from None
        if not lowest <= value <= highest:
            raise SettingsError(f"must be {lowest}..{highest}, got {value}")
        return value

    return parse


def _number(lowest: float, highest: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise SettingsError(f"must be a number, got {text!r}") from None
        if not lowest <= value <= highest:
            raise SettingsError(f"must be {lowest:g}..{highest:g}, got {text}")
        return value

    return parse


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise SettingsError(f"must be one of {', '.join(names)}, got {text!r}")
        return text

    return parse


def _yes_or_no(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise SettingsError(f"must be one of {', '.join(words)}, got {text!r}")
    return words[text.lower()]


def _host(text: str) -> str:
    """An IP literal: Robyn accepts nothing else."""
    try:
        return str(socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        raise SettingsError(f"must be an address of this machine, got {text!r}, which cannot be resolved") from None


def _cluster(text: str) -> str:
    host, _, port = text.rpartition(":")
    if text and text != "auto" and not (host and port.isdecimal() and not set(text) & set("|/ ")):
        raise SettingsError(f"must be auto or HOST:PORT of a Ray cluster's head, got {text!r}")
    return text


def _service_name(text: str) -> str:
    if not STATE_NAME.fullmatch(text):
        raise SettingsError(f"must be of letters, digits, '.', '_' and '-', got {text!r}")
    return text


def _ip(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise SettingsError(f"must be an IP address, got {text!r}") from None


def _device_groups(text: str) -> tuple[tuple[str, ...], ...]:
    """`0,1;2,3`: the devices of each engine."""
    return tuple(_devices(group) for group in text.split(";"))


def _devices(text: str) -> tuple[str, ...]:
    """`[0,1]`, `0,1` and `cuda:0,cpu` alike; a bare number is a CUDA device."""
    names = [name.strip() for name in text.strip().removeprefix("[").removesuffix("]").split(",")]
    for name in names:
        kind, _, number = name.partition(":")
        known = kind in ("auto", "cpu", "cuda") and (not number or number.isdecimal())
        if not (name.isdecimal() or known):
            raise SettingsError(f"must list devices like [0,1] or cuda:0,cpu, got {text!r}")
    return tuple(f"cuda:{name}" if name.isdecimal() else name for name in names)


def _database(text: str) -> str:
    """A server's address, or a file: SQLite would make its lock beside a directory of that name, and then fail."""
    if text.startswith(SCHEMES):
        try:
            parse_server_address(text)
        except ValueError as error:
            raise SettingsError(str(error)) from None
    elif text and Path(text).is_dir():
        raise SettingsError(f"must be a file, but {text} is a directory; give a file in it, like {text}/sessions.db")
    return text


def _checkpoint_store(text: str) -> str:
    if text:
        try:
            parse_checkpoint_address(text)
        except ValueError as error:
            raise SettingsError(str(error)) from None
    return text


def _keys_file(text: str) -> str:
    """The absolute path of a file of keys that can be used."""
    try:
        load_keys(text)
    except KeysError as error:
        raise SettingsError(str(error)) from None
    return str(Path(text).absolute())


def _folder(text: str) -> str:
    """The absolute path of a folder."""
    if not Path(text).is_dir():
        raise SettingsError(f"must be a folder, and {text} is none")
    return str(Path(text).absolute())


def _files(text: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


def _named_files(text: str) -> tuple[str, ...]:
    """`poet=states/poet.pth,clerk=clerk.pth`: names, once each, of files."""
    entries = _files(text)
    names = [entry.partition("=")[0] for entry in entries]
    for entry, name in zip(entries, names, strict=True):
        if not STATE_NAME.fullmatch(name) or not entry.partition("=")[2]:
            raise SettingsError(f"must be NAME=FILE, the name of letters, digits, '.', '_' and '-', got {entry!r}")
        if names.count(name) > 1:
            raise SettingsError(f"names {name!r} twice; give each a name of its own")
    return entries


def _networks(text: str) -> tuple[str, ...]:
    """`10.0.0.0/8, ::1`: addresses and networks of proxies."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        try:
            ipaddress.ip_network(name)
        except ValueError:
            raise SettingsError(f"must list addresses or networks like 10.0.0.0/8,::1, got {name!r}") from None
    return names


def _layer_counts(text: str) -> tuple[float, ...]:
    """`9,8,8,7` or `8.5,8.5,8,7`, also in brackets."""
    whole = _whole(1, 1000)

    def one(part: str) -> float:
        if not part.removesuffix(".5").isdecimal():
            raise SettingsError(f"must be whole numbers or halves of layers, like 9,8,8,7 or 8.5,8,8.5,7, got {part!r}")
        return whole(part.removesuffix(".5")) + 0.5 if part.endswith(".5") else whole(part)

    return tuple(one(part.strip()) for part in text.strip().removeprefix("[").removesuffix("]").split(","))


def _resident_counts(text: str) -> tuple[int | None, ...]:
    """`20`, or for several devices `20,all`."""
    one = _whole(0, 1000)
    return tuple(None if part.strip() == "all" else one(part.strip()) for part in text.split(","))


def _strategy(text: str) -> str:
    try:
        parse_strategy(text)
    except StrategyError as error:
        raise SettingsError(f"cannot be followed: {error}") from None
    return text


def _samplers(text: str) -> tuple[str, ...]:
    one = _one_of(*_default(EngineConfig, "samplers"))
    return tuple(one(name.strip()) for name in text.split(","))


class Flag(msgspec.Struct, frozen=True):
    """One setting: its field in a config struct, how its text is read, what it means."""

    field: str
    parse: Callable[[str], Any]
    help: str
    name: str = ""
    """Where the flag is not called like the field."""
    repeats: bool = False
    """May be given several times; a list with commas is the same."""

    @property
    def option(self) -> str:
        """The command-line flag."""
        return "--" + (self.name or self.field).replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "RWKV_" + (self.name or self.field).upper()


_COUNT = _whole(0, 1_000_000)
_COUNT_1 = _whole(1, 1_000_000)
_POSITIVE = _whole(1, 2**31 - 1)
_SECONDS = _number(0, 1e9)

FLAGS: dict[Section | type[ServiceConfig], tuple[Flag, ...]] = {
    ServiceConfig: (
        Flag("http_workers", _whole(0, 128), "HTTP worker processes; 0: 2, from 8 CPUs on 4, from 32 on 8"),
        Flag(
            "replicas",
            _whole(0, 64),
            "engines that serve the model, a process each, on a GPU each; more may be added; 0: one, and none is added",
        ),
        Flag(
            "cluster",
            _cluster,
            "Ray cluster whose nodes have the engines, HOST:PORT of its head or auto: that of this machine's node; "
            "--replicas engines are placed in it unless they are there",
        ),
        Flag("cluster_service", _service_name, "machines of the cluster that give the same name share their engines"),
        Flag("cluster_node", _ip, "IP address of this machine's Ray node, where it has several"),
        Flag(
            "front",
            _one_of("auto", "nginx", "none"),
            "what clients talk to: nginx, which the service starts, or the HTTP workers themselves (none); "
            "auto: nginx where it is installed and the host is not loopback",
        ),
        Flag(
            "max_connections_per_client",
            _COUNT,
            "requests of one address that nginx passes on at a time; 0: as many as HTTP workers answer",
        ),
        Flag("max_models", _whole(0, 64), "models that may be loaded while serving, beside the service's own"),
        Flag("model_idle_s", _SECONDS, "seconds after which such a model leaves if nobody uses it; 0: never"),
        Flag("log_format", _one_of("text", "json"), "text, or one JSON object per line"),
        Flag("log_level", _one_of("debug", "info", "warning", "error"), "least severity that is logged"),
    ),
    HttpConfig: (
        Flag("host", _host, "address to listen on; 0.0.0.0 for every interface"),
        Flag("port", _whole(1, 65535), "port to listen on"),
        Flag(
            "password",
            str,
            "wanted from every client, as a Bearer token percent-encoded if it is not ASCII; visible in the "
            "process list, so better --password-file",
        ),
        Flag(
            "admin_password",
            str,
            "wanted from who changes what is served (models, engines, states, adapters); without it the password does; "
            "API keys never do; with neither every client may",
        ),
        Flag("keys_file", _keys_file, "API keys with a name and limits each, in TOML; read again at SIGHUP"),
        Flag("cors_origin", str, "Access-Control-Allow-Origin of every answer"),
        Flag("max_body_mb", _number(0.001, 1024), "largest request body in MiB"),
        Flag("max_state_mb", _number(0.001, 1000), "largest session file for /state/import in MiB"),
        Flag("max_contents", _whole(1, 1_000_000), "most prompts in one request"),
        Flag("max_prompt_tokens", _POSITIVE, "most tokens of one prompt"),
        Flag("max_request_tokens", _POSITIVE, "most tokens of all prompts of one request"),
        Flag("max_tokens_limit", _POSITIVE, "most that max_tokens may ask for"),
        Flag(
            "max_streams",
            _whole(1, 500),
            "answers that one HTTP worker writes at a time; Robyn has 512 threads for them",
        ),
        Flag(
            "max_streams_per_client",
            _whole(0, 500),
            "the same for one client, by address (IPv6: /64 network); 0: seven eighths of --max-streams",
        ),
        Flag("trusted_proxies", _networks, "addresses or networks whose X-Forwarded-For is believed, like 10.0.0.0/8"),
        Flag("engine_wait_s", _number(0, 3600), "seconds that work waits for an engine that loads or is restarted"),
        Flag("resubmit", _whole(0, 16), "engines that a request may lose and still go on with another; 0: none"),
        Flag("stall_timeout_s", _number(0.1, 1e6), "seconds after which a client that reads nothing is cut off"),
        Flag("default_timeout_s", _number(0, 86400), "timeout_s of requests that give none; 0: no limit"),
        Flag(
            "max_timeout_s",
            _number(0, 86400),
            "most that a request's timeout_s may be, also what it is where none is given; 0: a day, and none",
        ),
        Flag("access_log", _yes_or_no, "log a line for every request"),
        Flag("files_dir", str, "folder of files and batches; auto: beside --state-db, if there is one; none: none"),
        Flag("files_max_gb", _number(0.001, 1e6), "most that all files of batches may hold, in GiB"),
        Flag("translate_cache", _COUNT, "translations that each HTTP worker remembers; 0: none"),
    ),
    EngineConfig: (
        Flag(
            "model_path",
            str,
            "weights: .pth, .safetensors, a folder of Hugging Face's; without it the demo model is served",
        ),
        Flag("model_name", str, "name under which the model is listed"),
        Flag("dtype", _one_of(*DTYPES), "weights; auto: fp16 on CUDA, fp32 on a CPU; fp8, int8, int4: small ones"),
        Flag(
            "states",
            _named_files,
            "a tuned state, NAME=FILE (.pth, .safetensors), that requests may name; may be given several times",
            name="state",
            repeats=True,
        ),
        Flag(
            "adapters",
            _files,
            "an adapter merged into the weights, FILE or FILE:scale (LoRA, DoRA, PiSSA, Bone, DiSHA, MiSS, whole "
            "tensors, folders of PEFT's); may be given several times",
            name="adapter",
            repeats=True,
        ),
        Flag(
            "served_adapters",
            _named_files,
            "a LoRA that requests may name, each row its own, NAME=FILE or NAME=FILE:scale; may be given several times",
            name="adapter_serve",
            repeats=True,
        ),
        Flag("models_dir", _folder, "folder of the files that requests may load: models, tuned states, adapters"),
        Flag(
            "devices",
            _device_groups,
            "one pipeline stage each: [0,1,2,3], 0,1 or cuda:0,cpu; of several engines, divided by semicolons: 0,1;2,3",
            name="pp_devices",
        ),
        Flag(
            "layers",
            _layer_counts,
            "layers of each device, like 9,8,8,7, or 8.5,8,8.5,7 with layers cut in half (on a CPU such a stage is "
            "several times slower); without it they are dealt",
            name="pp_layers",
        ),
        Flag(
            "resident",
            _resident_counts,
            "of each device, layers that stay on it, the rest of its share being copied in for every step, or all",
            name="pp_resident",
        ),
        Flag(
            "strategy",
            _strategy,
            "--pp-devices, --pp-layers, --pp-resident and --dtype as the rwkv package writes them: "
            "cuda fp16 *10 -> cpu fp32, cuda fp16 *20+",
        ),
        Flag(
            "micro_batches",
            _whole(0, 64),
            "groups of rows that are on the stages at once; 0: one for each GPU of --pp-devices",
            name="pp_micro_batches",
        ),
        Flag("kernels", _one_of("auto", "cuda", "cpu", "naive"), "kernels; auto: the fastest that run here"),
        Flag("samplers", _samplers, "samplers in order of preference"),
        Flag(
            "wkv_state",
            _one_of("auto", "fp32", "fp16", "int8"),
            "storage of the WKV state; auto: fp16 on CUDA, fp32 on a CPU; int8: half of fp16, less exact",
        ),
        Flag("max_running", _COUNT, "rows that decode at once; 0: by memory"),
        Flag("max_waiting_rows", _POSITIVE, "rows that may wait; more are refused with 429"),
        Flag(
            "max_waiting_rows_per_client",
            _COUNT,
            "the same for one client (API key or address); 0: three quarters of --max-waiting-rows",
        ),
        Flag("prefill_tokens_per_step", _COUNT, "prompt tokens that are read in a step; 0: by device"),
        Flag("prefill_tokens_beside", _COUNT, "the same while rows decode, whose next tokens wait; 0: by device"),
        Flag(
            "batch_rows_beside",
            _whole(ALL_BATCH_ROWS, 1_000_000),
            "batch rows that decode in a step while interactive requests come, whose first tokens wait for it; "
            f"0: by device, {ALL_BATCH_ROWS}: all",
        ),
        Flag(
            "batch_step_layers",
            _whole(WHOLE_STEPS, 1024),
            "on a single GPU, layers after which a step with batch rows may be left for a first token; "
            f"0: by model, {WHOLE_STEPS}: it never is",
        ),
        Flag("prefill_chunk", _POSITIVE, "most prompt tokens of one row in a step"),
        Flag("gpu_memory_utilization", _number(0.05, 1.0), "part of the GPU memory that may be used"),
        Flag("warmup", _yes_or_no, "on a GPU, run every kind of step once before serving"),
        Flag("overlap", _yes_or_no, "launch a step before the last one has been read"),
        Flag("overlap_on_cpu", _yes_or_no, "the same on a CPU, where it gains nothing; for tests"),
        Flag("threads", _whole(0, 4096), "compute threads on a CPU; 0: all cores"),
        Flag("step_timeout_s", _SECONDS, "seconds after which a step that hangs restarts the engine; 0: never"),
        Flag("drain_timeout_s", _SECONDS, "seconds that running requests get at shutdown"),
    ),
    PoolConfig: (
        Flag("l1_sessions", _COUNT, "parked sessions kept in slots on the device"),
        Flag("l2_sessions", _COUNT, "parked sessions kept in host memory"),
        Flag("state_db", _database, "SQLite file of the sessions, or postgresql://… of a server; empty: memory only"),
        Flag("durability", _one_of("log", "turn", "lazy"), "what a turn commits before it is acknowledged"),
        Flag(
            "checkpoint_store",
            _checkpoint_store,
            "where stored states are kept beside the database: file:///FOLDER or s3://BUCKET/PREFIX?endpoint=URL, "
            "keys from the environment; empty: in the database",
        ),
        Flag("checkpoint_store_min_mb", _number(0, 1e6), "MiB from which a state is kept there"),
        Flag("synchronous", _one_of("OFF", "NORMAL", "FULL"), "SQLite's synchronous"),
        Flag("session_ttl", _SECONDS, "seconds after which an unused session is deleted; 0: never"),
        Flag("state_db_max_gb", _number(0, 1e6), "most the database may hold, with its checkpoint store; 0: unlimited"),
        Flag("state_db_full", _one_of("evict", "refuse"), "at that limit: evict the oldest, or refuse new ones"),
        Flag("checkpoint_tokens", _POSITIVE, "log length at which a session's state is written again"),
        Flag("prefix_cache_slots", _COUNT, "cached prompt prefixes kept in slots; 0: no prefix cache"),
        Flag("prefix_cache_l2", _COUNT, "cached prefixes kept in host memory"),
        Flag("prefix_seen_mb", _COUNT, "MiB of recent prompts remembered, to notice a prefix that is met again"),
        Flag("state_slots", _COUNT_1, "tuned states kept in slots; host memory has all"),
        Flag("max_states", _COUNT, "most tuned states loaded"),
        Flag("max_adapters", _whole(1, 1024), "most adapters loaded for requests to name"),
        Flag("retain_tokens", _whole(-1, 2**31 - 1), "tokens of history kept behind a checkpoint; -1: all"),
        Flag("checkpoint_idle_s", _SECONDS, "seconds without a turn after which a parked session is checkpointed"),
        Flag("transfer_states", _whole(1, 1024), "states on their way to disk or host at once"),
    ),
}


PASSWORD_FILE = ("--password-file", "RWKV_PASSWORD_FILE")
"""Names a file instead of a value: no field of a config."""
SETTINGS_PAGE = Path(__file__).resolve().parent / "docs" / "settings.md"
HEADINGS: dict[Section | type[ServiceConfig], str] = {
    ServiceConfig: "The service and its processes",
    HttpConfig: "HTTP",
    EngineConfig: "Model and engine",
    PoolConfig: "Sessions and cached prefixes",
}


def program(command: str = "") -> str:
    """How this program, or one of its commands, was called: what messages tell its user to type."""
    name = Path(sys.argv[0]).name
    return f"{name if name == 'rwkv-batch' else 'python app.py'} {command}".rstrip()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; see {program()} --help")


class _Repeated(argparse.Action):
    """A flag given several times is a list with commas."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


def _default(section: Any, field: str) -> Any:
    value = next(item.default for item in msgspec.structs.fields(section) if item.name == field)
    return "" if value is msgspec.NODEFAULT else value


def _shown_default(section: Any, flag: Flag) -> str:
    default = _default(section, flag.field)
    return ",".join(default) if isinstance(default, tuple) else str(default)


def build_parser() -> argparse.ArgumentParser:
    """The command line. Values stay text (None: not given), so that one place reads flag and environment."""
    parser = _Parser(
        prog=program(),
        allow_abbrev=False,
        description="RWKV-7 batch inference server. Other commands: batch, chat, bench, each with its own --help.",
    )
    parser.add_argument("--version", action="version", version=f"rwkv-batch {__version__}")
    for section, flags in FLAGS.items():
        for flag in flags:
            text = f"{flag.help} (default: {_shown_default(section, flag)}; {flag.variable})".replace("%", "%%")
            action = _Repeated if flag.repeats else "store"
            parser.add_argument(flag.option, dest=flag.variable, metavar="X", help=text, action=action)
    parser.add_argument(
        PASSWORD_FILE[0], dest=PASSWORD_FILE[1], metavar="X", help="file whose first line is the password"
    )
    return parser


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Settings of a command line and an environment. Raises SettingsError with one clear line."""
    given = vars(build_parser().parse_args(list(arguments)))
    source = {**environment, **{name: text for name, text in given.items() if text is not None}}
    values = {section: _section_values(flags, given, source) for section, flags in FLAGS.items()}
    if not values[HttpConfig].get("password") and (path := source.get(PASSWORD_FILE[1])):
        values[HttpConfig]["password"] = _first_line(path)
    _apply_devices(values[EngineConfig], values[ServiceConfig])
    _apply_strategy(values[EngineConfig])
    engine = EngineConfig(**{"model_path": "", **values[EngineConfig]}, pool=PoolConfig(**values[PoolConfig]))
    _refuse_file_in_cluster(values[ServiceConfig].get("cluster", ""), engine.pool)
    shared: dict[str, Any] = {name: getattr(engine, name) for name in ("drain_timeout_s", "model_name", "models_dir")}
    service = ServiceConfig(**values[ServiceConfig])
    if service.http_workers == 0:
        service = msgspec.structs.replace(service, http_workers=default_http_workers(os.cpu_count() or 1))
    return Settings(service=service, http=HttpConfig(**values[HttpConfig], **shared), engine=engine)


def _apply_devices(engine: dict[str, Any], service: dict[str, Any]) -> None:
    """`--pp-devices` as the devices of the first engine, and of each if there are several."""
    groups: tuple[tuple[str, ...], ...] = engine.pop("devices", ())
    if not groups:
        return
    engine["devices"] = groups[0]
    if len(groups) > 1:
        if service.setdefault("replicas", len(groups)) != len(groups):
            raise SettingsError(f"--pp-devices names {len(groups)} engines, --replicas {service['replicas']}")
        service["replica_devices"] = groups


def _refuse_file_in_cluster(cluster: str, pool: PoolConfig) -> None:
    """Engines on several machines cannot write one file."""
    if cluster and pool.state_db and pool.files_stem == pool.state_db:
        raise SettingsError(
            f"--cluster has engines on several machines, which cannot share the file {pool.state_db}; "
            "give --state-db postgresql://USER:PASSWORD@HOST/NAME, or --state-db '' to keep sessions in memory alone"
        )


def _apply_strategy(engine: dict[str, Any]) -> None:
    """`--strategy` as the settings it stands for. SettingsError where one of these is given too."""
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
    """HTTP worker processes for a machine of so many CPUs."""
    return 8 if cpus >= 32 else 4 if cpus >= 8 else 2


def _section_values(flags: Sequence[Flag], given: Mapping[str, Any], source: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for flag in flags:
        text = source.get(flag.variable)
        if text is None or (text == "" and flag.parse not in (str, _database)):
            continue
        try:
            values[flag.field] = flag.parse(text)
        except SettingsError as error:
            origin = flag.option if given[flag.variable] is not None else flag.variable
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


def markdown() -> str:
    """docs/settings.md: every flag with its variable, default and meaning."""
    parts = [
        "# Settings\n\nMade by `python -m settings` from the table that the command line is read with. Each flag is "
        "also an environment variable; the command line wins. Lists are separated by commas.\n"
    ]
    for section, flags in FLAGS.items():
        rows = ["| flag | variable | default | meaning |", "|---|---|---|---|"]
        for flag in flags:
            default = _shown_default(section, flag)
            cells = (f"`{flag.option}`", f"`{flag.variable}`", f"`{default}`" if default else "", flag.help)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        if section is HttpConfig:
            rows.append(f"| `{PASSWORD_FILE[0]}` | `{PASSWORD_FILE[1]}` | | file whose first line is the password |")
        parts.append(f"## {HEADINGS[section]}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    SETTINGS_PAGE.write_text(markdown(), encoding="utf-8")
