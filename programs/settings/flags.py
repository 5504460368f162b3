"""All settings of the service in one table."""

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
    host_names,
    integer,
    ip,
    keys_file,
    language_styles,
    layer_counts,
    named_files,
    networks,
    one_of,
    origins,
    otlp_endpoint,
    resident_counts,
    service_name,
    strategy,
    tune_device,
    weight_type,
)
from routes.config import HttpConfig
from rwkv_batch.config import ACTIVATION_BITS, ALL_BATCH_ROWS, KERNELS, SPECULATE, WKV_STATES, EngineConfig
from rwkv_batch.translation.prompt_forms import PromptForm
from state_pool.config import PoolConfig

Section = type[ServiceConfig] | type[HttpConfig] | type[EngineConfig] | type[PoolConfig]


class Flag(msgspec.Struct, frozen=True):
    """One setting: a field of a config struct, its parser and its help text."""

    field: str
    parse: Callable[[str], Any]
    help: str
    name: str = ""
    """Name of the flag, if it differs from the field's."""
    repeats: bool = False
    """The flag may be repeated, which equals one list with commas."""
    alias: str = ""
    """Older name of the flag, still accepted."""

    @property
    def option(self) -> str:
        return _option(self.name or self.field)

    @property
    def variable(self) -> str:
        return _variable(self.name or self.field)

    @property
    def options(self) -> tuple[str, ...]:
        """The command-line flag and its older name."""
        return (self.option, _option(self.alias)) if self.alias else (self.option,)

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variable and its older name."""
        return (self.variable, _variable(self.alias)) if self.alias else (self.variable,)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return "RWKV_" + name.upper()


def field_default(section: Section, field: str) -> Any:
    """Return the default of a config struct's field; "" if it must be given."""
    value = next(item.default for item in msgspec.structs.fields(section) if item.name == field)
    return "" if value is msgspec.NODEFAULT else value


def default_text(section: Section, flag: Flag) -> str:
    default = field_default(section, flag.field)
    if default is None:
        return ""
    return ",".join(default) if isinstance(default, tuple) else str(default)


def _samplers(text: str) -> tuple[str, ...]:
    one = one_of(*field_default(EngineConfig, "samplers"))
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
    "--prefix-seen-mb": "the pool remembers at most 16 MiB of recent prompts",
    "--transfer-states": "four states are transferred at a time",
}
"""Removed flag -> reason. Giving one logs a warning. The next release refuses it."""

FLAGS: dict[Section, tuple[Flag, ...]] = {
    ServiceConfig: (
        Flag("http_workers", integer(0, 128), "HTTP worker processes; 0: 2, or 4 from 8 CPUs, or 8 from 16 CPUs"),
        Flag(
            "replicas",
            integer(0, 64),
            "engine processes that serve the model, one per GPU; 0: one, and no more can be added",
        ),
        Flag(
            "cluster",
            cluster,
            "Ray cluster that runs --replicas engines: HOST:PORT of its head, or auto for this machine's node",
        ),
        Flag("cluster_service", service_name, "services with the same name share their engines in the cluster"),
        Flag("cluster_node", ip, "IP address of this machine's Ray node, if the machine has several"),
        Flag(
            "front",
            one_of("auto", "nginx", "none"),
            "server that clients reach: nginx (started by this service) or none (the HTTP workers); auto: nginx "
            "if it is installed and the host is not loopback",
        ),
        Flag("max_models", integer(0, 64), "models that clients may load in addition to the service's own"),
        Flag("model_idle_s", _SECONDS, "seconds without a request until a loaded model is unloaded; 0: never"),
        Flag("log_format", one_of("text", "json"), "text, or one JSON object per line"),
        Flag("log_level", one_of("debug", "info", "warning", "error"), "lowest severity that is logged"),
    ),
    HttpConfig: (
        Flag("host", host, "address to listen on; 0.0.0.0: every interface"),
        Flag("port", integer(1, 65535), "port to listen on"),
        Flag(
            "password",
            str,
            "password that every client sends as a Bearer token, percent-encoded if not ASCII; --password-file "
            "hides it from the process list",
        ),
        Flag(
            "admin_password", str, "password for changes to models, engines, states and adapters; default: the password"
        ),
        Flag("keys_file", keys_file, "TOML file of API keys with names and limits; SIGHUP reloads it"),
        Flag("share_prefix_cache", boolean, "keys share cached prompt prefixes, grammars and translations"),
        Flag("strict_fields", boolean, "refuse unknown fields and languages, instead of a warning in the answer"),
        Flag("strict_model", boolean, "refuse unknown names of models, instead of a warning in the answer"),
        Flag(
            "cors_origin",
            origins,
            "origins of web pages that may use the service, like https://a.example, or *; default: every origin if a "
            "password or key is required, else only the own page. Translation is open to every origin",
        ),
        Flag(
            "allowed_hosts",
            host_names,
            "host names of the service, like api.example or *.example; default: every name, on loopback without a "
            "password only names of loopback",
        ),
        Flag("max_body_mb", decimal(0.001, 1024), "largest request body in MiB"),
        Flag("max_state_mb", decimal(0.001, 1000), "largest session file for /state/import in MiB"),
        Flag("max_contents", integer(1, 1_000_000), "maximum prompts per request"),
        Flag("max_prompt_tokens", _POSITIVE, "maximum tokens per prompt"),
        Flag("max_request_tokens", _POSITIVE, "maximum prompt tokens per request"),
        Flag("max_tokens_limit", _POSITIVE, "largest value of max_tokens"),
        Flag("max_streams", integer(1, 500), "answers that one HTTP worker writes at a time"),
        Flag(
            "max_streams_per_client",
            integer(0, 500),
            "answers that one HTTP worker writes to one client (address or IPv6 /64) at a time; 0: seven eighths "
            "of --max-streams",
        ),
        Flag(
            "trusted_proxies",
            networks,
            "addresses or networks whose X-Forwarded-For header is trusted, e.g. 10.0.0.0/8",
        ),
        Flag("engine_wait_s", decimal(0, 3600), "seconds that a request waits for an engine that loads or restarts"),
        Flag("resubmit", integer(0, 16), "lost engines that a request survives by continuing on another one; 0: none"),
        Flag("stall_timeout_s", decimal(0.1, 1e6), "seconds after which a client that reads nothing is disconnected"),
        Flag("default_timeout_s", decimal(0, 86400), "timeout_s of requests that give none; 0: no limit"),
        Flag(
            "max_timeout_s",
            decimal(0, 86400),
            "largest timeout_s, and the default without --default-timeout-s; 0: one day, and no default",
        ),
        Flag(
            "generation_config",
            str,
            "file with the decode parameters of requests that give none, in Hugging Face's format; auto: "
            "generation_config.json next to the model; none: no file",
        ),
        Flag("translation_prompt", one_of("auto", *PromptForm), "form of translation prompts; auto: by file name"),
        Flag("translation_style", language_styles, "instructions for translation, like de=Use Sie.;fr=Use vous."),
        Flag("access_log", boolean, "log one line per request"),
        Flag(
            "otlp_endpoint",
            otlp_endpoint,
            "OpenTelemetry collector for a span per request (OTLP over HTTP), like http://localhost:4318",
        ),
        Flag("files_dir", str, "folder of uploaded files and batches; auto: next to --state-db; none: no files"),
        Flag(
            "tune_device",
            tune_device,
            "device of fine-tuning jobs, cpu or cuda:1; auto: the first GPU, else the CPU; none: no jobs",
        ),
        Flag("files_max_gb", decimal(0.001, 1e6), "maximum size of all files in GiB"),
    ),
    EngineConfig: (
        Flag(
            "model_path",
            str,
            "weights: .pth, .safetensors, .gguf, a Hugging Face folder, hf:OWNER/NAME/FILE of the hub, ollama:NAME of "
            "ollama's store, or an https URL; default: the demo model",
        ),
        Flag("model_name", str, "name of the model in /v1/models"),
        Flag(
            "dtype",
            weight_type,
            "type of the weights; auto: fp16 on CUDA, fp32 on CPUs; int8: fast, inputs too; fp8, int4: quantised",
        ),
        Flag(
            "activation_bits",
            lambda text: int(one_of(*map(str, ACTIVATION_BITS))(text)),
            "bits of the inputs with --dtype int8; 16: more exact, twice the products",
        ),
        Flag("deterministic", boolean, "a text's bits depend on its own tokens only; fp16, int8; on GPUs slower"),
        Flag(
            "states",
            named_files,
            "tuned state that requests may name: NAME=FILE (.pth, .safetensors); repeatable",
            name="state",
            repeats=True,
        ),
        Flag(
            "adapters",
            files,
            "adapter to merge into the weights: FILE or FILE:SCALE (LoRA, DoRA, PiSSA, Bone, DiSHA, MiSS, full "
            "tensors, PEFT folders); repeatable",
            name="adapter",
            repeats=True,
        ),
        Flag(
            "served_adapters",
            named_files,
            "LoRA that requests may name, per row: NAME=FILE or NAME=FILE:SCALE; repeatable",
            name="adapter_serve",
            repeats=True,
        ),
        Flag("models_dir", folder, "folder from which clients may load models, tuned states and adapters"),
        Flag(
            "devices",
            device_groups,
            "pipeline stages, one device per stage: 0,1 or cuda:0,cpu; several engines: 0,1;2,3",
            name="pp_devices",
        ),
        Flag(
            "layers",
            layer_counts,
            "layers per pipeline stage, e.g. 9,8,8,7 or 8.5,8,8.5,7; default: divided evenly",
            name="pp_layers",
        ),
        Flag(
            "resident",
            resident_counts,
            "layers per stage that stay on the device; the others are copied in for each step; default: all",
            name="pp_resident",
        ),
        Flag(
            "strategy",
            strategy,
            "--pp-devices, --pp-layers, --pp-resident and --dtype in the form of the rwkv package, e.g. cuda "
            "fp16 *10 -> cpu fp32",
        ),
        Flag("kernels", one_of(*KERNELS), "compute kernels; auto: the fastest that this machine supports"),
        Flag("samplers", _samplers, "sampler backends in order of preference"),
        Flag(
            "wkv_state",
            one_of(*WKV_STATES),
            "type of the WKV state; auto: fp16 on CUDA, fp32 on CPUs; int8: half the size of fp16, less exact",
        ),
        Flag("speculate", one_of(*SPECULATE), "verify guessed tokens, without changing a text; auto: where it pays"),
        Flag("draft_model", str, "small model for --speculate, of 0.1B to 0.4B: a file or a name, as of --model-path"),
        Flag("max_running", _COUNT, "maximum rows that decode at a time; 0: by memory"),
        Flag("max_waiting_rows", _POSITIVE, "maximum rows in the queue; more get 429"),
        Flag(
            "max_waiting_rows_per_client",
            _COUNT,
            "maximum queued rows per client (API key or address); 0: three quarters of --max-waiting-rows",
        ),
        Flag("prefill_tokens_per_step", _COUNT, "maximum prompt tokens per step; 0: by device"),
        Flag(
            "max_prefill_tokens_with_decode",
            _COUNT,
            "maximum prompt tokens per step while more rows decode than wait for a first token; 0: by device",
            alias="prefill_tokens_beside",
        ),
        Flag(
            "max_batch_rows_with_interactive",
            integer(ALL_BATCH_ROWS, 1_000_000),
            "maximum batch rows that decode in a step while interactive requests arrive; "
            f"0: by device; {ALL_BATCH_ROWS}: all",
            alias="batch_rows_beside",
        ),
        Flag("gpu_memory_utilization", decimal(0.05, 1.0), "share of the GPU memory that the engine may use"),
        Flag("warmup", boolean, "run every kind of step once before serving (GPUs)"),
        Flag("threads", integer(0, 4096), "CPU compute threads; 0: all cores"),
        Flag("step_timeout_s", _SECONDS, "seconds after which a hanging step restarts the engine; 0: never"),
        Flag("drain_timeout_s", _SECONDS, "seconds that running requests get at shutdown"),
    ),
    PoolConfig: (
        Flag("l1_sessions", _COUNT, "idle sessions kept in slots on the device"),
        Flag("l2_sessions", _COUNT, "idle sessions kept in host memory"),
        Flag("state_db", database, "SQLite file of the sessions, or postgresql://...; empty: memory only"),
        Flag(
            "durability",
            one_of("log", "turn", "lazy"),
            "what is committed before a turn is acknowledged: its log, its state too (turn), or nothing (lazy)",
        ),
        Flag(
            "checkpoint_store",
            checkpoint_store,
            "store of the states outside the database: file:///FOLDER or s3://BUCKET/PREFIX?endpoint=URL (keys "
            "from the environment); empty: the database",
        ),
        Flag("synchronous", one_of("OFF", "NORMAL", "FULL"), "SQLite's synchronous pragma; FULL survives a power loss"),
        Flag(
            "session_ttl",
            _SECONDS,
            "seconds without a turn after which a session is deleted; 0: never; not given: 30 days, or never in a "
            "database that an earlier version began",
        ),
        Flag(
            "migrate_backup",
            boolean,
            "keep a copy of the SQLite file as FILE.schema-N before a migration, if the disk has room",
        ),
        Flag(
            "state_db_max_gb",
            decimal(0, 1e6),
            "maximum size of the database and its checkpoint store in GB; 0: unlimited",
        ),
        Flag(
            "state_db_full",
            one_of("evict", "refuse"),
            "at --state-db-max-gb: evict the oldest sessions, or refuse new ones",
        ),
        Flag("checkpoint_tokens", _POSITIVE, "log length in tokens at which a session's state is written again"),
        Flag("prefix_cache_slots", _COUNT, "cached prompt prefixes kept in slots; 0: no prefix cache"),
        Flag("prefix_cache_l2", _COUNT, "cached prompt prefixes kept in host memory"),
        Flag("state_slots", _COUNT_1, "tuned states kept in slots; host memory keeps all of them"),
        Flag("max_states", _COUNT, "maximum loaded tuned states"),
        Flag("max_adapters", integer(1, 1024), "maximum loaded adapters that requests may name"),
        Flag("retain_tokens", integer(-1, 2**31 - 1), "history tokens kept after a checkpoint; -1: all"),
        Flag("checkpoint_idle_s", _SECONDS, "seconds without a turn after which an idle session is checkpointed"),
    ),
}


PASSWORD_FILE = ("--password-file", "RWKV_PASSWORD_FILE")
"""Flag and variable of the file whose first line is the password. No config field."""
HEADINGS: dict[Section, str] = {
    ServiceConfig: "The service and its processes",
    HttpConfig: "HTTP",
    EngineConfig: "Model and engine",
    PoolConfig: "Sessions and cached prefixes",
}
COMMON = {
    "host": "address to listen on",
    "port": "port to listen on",
    "keys_file": "TOML file of API keys with names and limits",
    "model_path": "weights: a file, a Hugging Face folder, hf:OWNER/NAME/FILE, ollama:NAME or an https URL",
    "model_name": "name of the model in /v1/models",
    "dtype": "type of the weights: fp32, bf16, fp16, fp8, int8 or int4",
    "devices": "devices, one per pipeline stage: 0,1 or cuda:0,cpu",
    "max_running": "maximum rows that decode at a time; 0: by memory",
    "gpu_memory_utilization": "share of the GPU memory to use",
    "state_db": "SQLite file of the sessions, or postgresql://...",
}
"""Field -> text in `--help`. `--help-all` shows all flags."""
