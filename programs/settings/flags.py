"""Every setting of the service in one table: its field, how its text is read, what it means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from programs.settings.config import ServiceConfig
from programs.settings.values import (
    boolean,
    checkpoint_store,
    cluster,
    database,
    decimal,
    device_groups,
    files,
    folder,
    host,
    integer,
    ip,
    keys_file,
    layer_counts,
    named_files,
    networks,
    one_of,
    resident_counts,
    service_name,
    strategy,
)
from routes.config import HttpConfig
from rwkv_batch.config import ALL_BATCH_ROWS, DTYPES, KERNELS, WKV_STATES, EngineConfig
from state_pool.config import PoolConfig

Section = type[ServiceConfig] | type[HttpConfig] | type[EngineConfig] | type[PoolConfig]


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


def _field_default(section: Section, field: str) -> Any:
    value = next(item.default for item in msgspec.structs.fields(section) if item.name == field)
    return "" if value is msgspec.NODEFAULT else value


def default_text(section: Section, flag: Flag) -> str:
    """As it would be written behind the flag."""
    default = _field_default(section, flag.field)
    return ",".join(default) if isinstance(default, tuple) else str(default)


def _samplers(text: str) -> tuple[str, ...]:
    one = one_of(*_field_default(EngineConfig, "samplers"))
    return tuple(one(name.strip()) for name in text.split(","))


_COUNT = integer(0, 1_000_000)
_COUNT_1 = integer(1, 1_000_000)
_POSITIVE = integer(1, 2**31 - 1)
_SECONDS = decimal(0, 1e9)

REMOVED = {
    "--max-connections-per-client": "--max-streams-per-client bounds one client",
    "--translate-cache": "each HTTP worker remembers 4,096 translations",
    "--pp-micro-batches": "the engine runs one micro-batch per device",
    "--batch-step-layers": "the engine chooses the layers of a piece by model size",
    "--prefill-chunk": "a step reads at most 512 prompt tokens of a row",
    "--overlap": "steps overlap on GPUs",
    "--overlap-on-cpu": "steps overlap on GPUs alone",
    "--checkpoint-store-min-mb": "states from 1 MiB on go to the checkpoint store",
    "--prefix-seen-mb": "the pool remembers 16 MiB of recent prompts",
    "--transfer-states": "four states are transferred at a time",
}
"""Removed flag -> what holds without it. A start that gives one logs a warning; the next release refuses it."""

FLAGS: dict[Section, tuple[Flag, ...]] = {
    ServiceConfig: (
        Flag("http_workers", integer(0, 128), "HTTP worker processes; 0: 2, from 8 CPUs on 4, from 32 on 8"),
        Flag(
            "replicas",
            integer(0, 64),
            "engines that serve the model, a process each, on a GPU each; more may be added; 0: one, and none is added",
        ),
        Flag(
            "cluster",
            cluster,
            "Ray cluster whose nodes have the engines, HOST:PORT of its head or auto: that of this machine's node; "
            "--replicas engines are placed in it unless they are there",
        ),
        Flag("cluster_service", service_name, "machines of the cluster that give the same name share their engines"),
        Flag("cluster_node", ip, "IP address of this machine's Ray node, where it has several"),
        Flag(
            "front",
            one_of("auto", "nginx", "none"),
            "what clients talk to: nginx, which the service starts, or the HTTP workers themselves (none); "
            "auto: nginx where it is installed and the host is not loopback",
        ),
        Flag("max_models", integer(0, 64), "models that may be loaded while serving, beside the service's own"),
        Flag("model_idle_s", _SECONDS, "seconds after which such a model leaves if nobody uses it; 0: never"),
        Flag("log_format", one_of("text", "json"), "text, or one JSON object per line"),
        Flag("log_level", one_of("debug", "info", "warning", "error"), "least severity that is logged"),
    ),
    HttpConfig: (
        Flag("host", host, "address to listen on; 0.0.0.0 for every interface"),
        Flag("port", integer(1, 65535), "port to listen on"),
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
        Flag("keys_file", keys_file, "API keys with a name and limits each, in TOML; read again at SIGHUP"),
        Flag("cors_origin", str, "Access-Control-Allow-Origin of every answer"),
        Flag("max_body_mb", decimal(0.001, 1024), "largest request body in MiB"),
        Flag("max_state_mb", decimal(0.001, 1000), "largest session file for /state/import in MiB"),
        Flag("max_contents", integer(1, 1_000_000), "most prompts in one request"),
        Flag("max_prompt_tokens", _POSITIVE, "most tokens of one prompt"),
        Flag("max_request_tokens", _POSITIVE, "most tokens of all prompts of one request"),
        Flag("max_tokens_limit", _POSITIVE, "most that max_tokens may ask for"),
        Flag(
            "max_streams",
            integer(1, 500),
            "answers that one HTTP worker writes at a time; Robyn has 512 threads for them",
        ),
        Flag(
            "max_streams_per_client",
            integer(0, 500),
            "the same for one client, by address (IPv6: /64 network); 0: seven eighths of --max-streams",
        ),
        Flag("trusted_proxies", networks, "addresses or networks whose X-Forwarded-For is believed, like 10.0.0.0/8"),
        Flag("engine_wait_s", decimal(0, 3600), "seconds that work waits for an engine that loads or is restarted"),
        Flag("resubmit", integer(0, 16), "engines that a request may lose and still go on with another; 0: none"),
        Flag("stall_timeout_s", decimal(0.1, 1e6), "seconds after which a client that reads nothing is cut off"),
        Flag("default_timeout_s", decimal(0, 86400), "timeout_s of requests that give none; 0: no limit"),
        Flag(
            "max_timeout_s",
            decimal(0, 86400),
            "most that a request's timeout_s may be, also what it is where none is given; 0: a day, and none",
        ),
        Flag("access_log", boolean, "log a line for every request"),
        Flag("files_dir", str, "folder of files and batches; auto: beside --state-db, if there is one; none: none"),
        Flag("files_max_gb", decimal(0.001, 1e6), "most that all files of batches may hold, in GiB"),
    ),
    EngineConfig: (
        Flag(
            "model_path",
            str,
            "weights: .pth, .safetensors, a folder of Hugging Face's; without it the demo model is served",
        ),
        Flag("model_name", str, "name under which the model is listed"),
        Flag("dtype", one_of(*DTYPES), "weights; auto: fp16 on CUDA, fp32 on a CPU; fp8, int8, int4: small ones"),
        Flag(
            "states",
            named_files,
            "a tuned state, NAME=FILE (.pth, .safetensors), that requests may name; may be given several times",
            name="state",
            repeats=True,
        ),
        Flag(
            "adapters",
            files,
            "an adapter merged into the weights, FILE or FILE:scale (LoRA, DoRA, PiSSA, Bone, DiSHA, MiSS, whole "
            "tensors, folders of PEFT's); may be given several times",
            name="adapter",
            repeats=True,
        ),
        Flag(
            "served_adapters",
            named_files,
            "a LoRA that requests may name, each row its own, NAME=FILE or NAME=FILE:scale; may be given several times",
            name="adapter_serve",
            repeats=True,
        ),
        Flag("models_dir", folder, "folder of the files that requests may load: models, tuned states, adapters"),
        Flag(
            "devices",
            device_groups,
            "one pipeline stage each: [0,1,2,3], 0,1 or cuda:0,cpu; of several engines, divided by semicolons: 0,1;2,3",
            name="pp_devices",
        ),
        Flag(
            "layers",
            layer_counts,
            "layers of each device, like 9,8,8,7, or 8.5,8,8.5,7 with layers cut in half (on a CPU such a stage is "
            "several times slower); without it they are dealt",
            name="pp_layers",
        ),
        Flag(
            "resident",
            resident_counts,
            "of each device, layers that stay on it, the rest of its share being copied in for every step, or all",
            name="pp_resident",
        ),
        Flag(
            "strategy",
            strategy,
            "--pp-devices, --pp-layers, --pp-resident and --dtype as the rwkv package writes them: "
            "cuda fp16 *10 -> cpu fp32, cuda fp16 *20+",
        ),
        Flag("kernels", one_of(*KERNELS), "kernels; auto: the fastest that run here"),
        Flag("samplers", _samplers, "samplers in order of preference"),
        Flag(
            "wkv_state",
            one_of(*WKV_STATES),
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
            integer(ALL_BATCH_ROWS, 1_000_000),
            "batch rows that decode in a step while interactive requests come, whose first tokens wait for it; "
            f"0: by device, {ALL_BATCH_ROWS}: all",
        ),
        Flag("gpu_memory_utilization", decimal(0.05, 1.0), "part of the GPU memory that may be used"),
        Flag("warmup", boolean, "on a GPU, run every kind of step once before serving"),
        Flag("threads", integer(0, 4096), "compute threads on a CPU; 0: all cores"),
        Flag("step_timeout_s", _SECONDS, "seconds after which a step that hangs restarts the engine; 0: never"),
        Flag("drain_timeout_s", _SECONDS, "seconds that running requests get at shutdown"),
    ),
    PoolConfig: (
        Flag("l1_sessions", _COUNT, "parked sessions kept in slots on the device"),
        Flag("l2_sessions", _COUNT, "parked sessions kept in host memory"),
        Flag("state_db", database, "SQLite file of the sessions, or postgresql://… of a server; empty: memory only"),
        Flag("durability", one_of("log", "turn", "lazy"), "what a turn commits before it is acknowledged"),
        Flag(
            "checkpoint_store",
            checkpoint_store,
            "where stored states are kept beside the database: file:///FOLDER or s3://BUCKET/PREFIX?endpoint=URL, "
            "keys from the environment; empty: in the database",
        ),
        Flag("synchronous", one_of("OFF", "NORMAL", "FULL"), "SQLite's synchronous"),
        Flag("session_ttl", _SECONDS, "seconds after which an unused session is deleted; 0: never"),
        Flag("state_db_max_gb", decimal(0, 1e6), "most the database may hold, with its checkpoint store; 0: unlimited"),
        Flag("state_db_full", one_of("evict", "refuse"), "at that limit: evict the oldest, or refuse new ones"),
        Flag("checkpoint_tokens", _POSITIVE, "log length at which a session's state is written again"),
        Flag("prefix_cache_slots", _COUNT, "cached prompt prefixes kept in slots; 0: no prefix cache"),
        Flag("prefix_cache_l2", _COUNT, "cached prefixes kept in host memory"),
        Flag("state_slots", _COUNT_1, "tuned states kept in slots; host memory has all"),
        Flag("max_states", _COUNT, "most tuned states loaded"),
        Flag("max_adapters", integer(1, 1024), "most adapters loaded for requests to name"),
        Flag("retain_tokens", integer(-1, 2**31 - 1), "tokens of history kept behind a checkpoint; -1: all"),
        Flag("checkpoint_idle_s", _SECONDS, "seconds without a turn after which a parked session is checkpointed"),
    ),
}


PASSWORD_FILE = ("--password-file", "RWKV_PASSWORD_FILE")
"""Names a file instead of a value: no field of a config."""
HEADINGS: dict[Section, str] = {
    ServiceConfig: "The service and its processes",
    HttpConfig: "HTTP",
    EngineConfig: "Model and engine",
    PoolConfig: "Sessions and cached prefixes",
}
