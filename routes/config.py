"""Settings of an HTTP worker. programs/settings/ creates them from flags and environment."""

from __future__ import annotations

from typing import Any

import msgspec


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Address, passwords and limits of an HTTP worker."""

    host: str = "127.0.0.1"
    """An IP address."""
    port: int = 8000
    password: str = ""
    """"": no password is required."""
    admin_password: str = ""
    """Required for routes that change the service. "": `password` applies."""
    keys_file: str = ""
    """File of API keys and limits; see routes/api_keys.py."""
    cors_origin: tuple[str, ...] = ()
    """Origins of web pages that may use the service; see routes/serving/browser.py."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names of the service. Empty: checked only on loopback without a secret."""
    max_body_mb: float = 32.0
    max_state_mb: float = 128.0
    """Size of an imported session file."""
    max_contents: int = 4096
    """Prompts per request."""
    max_prompt_tokens: int = 262_144
    """Tokens per prompt."""
    max_request_tokens: int = 1_048_576
    """Tokens of all prompts of a request. The engine receives them in one message, which delays other requests."""
    max_tokens_limit: int = 1_048_576
    """Largest `max_tokens` of a request."""
    max_streams: int = 480
    """Concurrent answers per HTTP worker. Each blocks one of the 512 threads in Robyn's pool."""
    max_streams_per_client: int = 0
    """Concurrent answers per client; see client_identity. 0: seven eighths of `max_streams`."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose X-Forwarded-For header is trusted."""
    proxy_key: str = ""
    """Secret of our own nginx. "": there is none."""
    engine_wait_s: float = 10.0
    """How long a request waits for an engine that is loading or restarting."""
    resubmit: int = 2
    """How often a request may be resubmitted after losing its engine. 0: it fails with the engine."""
    shares_sessions: bool = False
    """Whether every engine of the model can continue every session."""
    stall_timeout_s: float = 30.0
    """A client that reads nothing for this long is disconnected."""
    default_timeout_s: float = 0.0
    """Time limit of requests without `timeout_s`. 0: none."""
    max_timeout_s: float = 0.0
    """Maximum of `timeout_s`, and the limit of requests without it. 0: one day and no limit."""
    generation_config: str = "auto"
    """File of default decode parameters. auto: next to the model; none: no file."""
    defaults: dict[str, Any] = {}
    """Its decode parameters: `DecodeDefaults` as a dict."""
    access_log: bool = True
    """One log line per request."""
    otlp_endpoint: str = ""
    """URL of an OpenTelemetry collector, for a span per request. "": none."""
    translation_prompt: str = "auto"
    """A `PromptForm`. auto: that of the model file's name; see `prompt_form`."""
    translation_style: tuple[str, ...] = ()
    """Style of translations whose request gives none, as "de=Use the formal Sie"."""
    translate_cache: int = 4096
    """Translations cached per HTTP worker. 0: none."""
    share_prefix_cache: bool = False
    """Whether API keys share cached prefixes, grammars and translations."""
    strict_fields: bool = False
    """Whether unknown fields and languages are refused. Else the answer has a warning."""
    strict_model: bool = False
    """Whether unknown names of models are refused. Else the service's model answers, with a warning."""
    files_dir: str = "auto"
    """Folder of files and batches. auto: next to the sessions' database, if there is one. none: no files."""
    files_max_gb: float = 10.0
    """Total size of all files."""
    tune_device: str = "auto"
    """Device of fine-tuning jobs. auto: the first GPU, else the CPU. none: no jobs."""
    drain_timeout_s: float = 30.0
    model_name: str = "rwkv7"
    models_dir: str = ""
    """Folder of files that requests may name. "": none."""
    speculate: str = "off"
    """As `EngineConfig.speculate`."""

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 1024 * 1024)

    @property
    def max_state_bytes(self) -> int:
        return int(self.max_state_mb * 1024 * 1024)
