"""Settings of an HTTP worker. programs/settings/ creates them from flags and environment."""

from __future__ import annotations

from typing import Any

import msgspec

PROXY_KEY_HEADER = "x-rwkv-front"
"""Header with the secret key of our own nginx."""


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Address, passwords and limits of an HTTP worker; `programs/settings/flags.py` has the flags' meanings."""

    host: str = "127.0.0.1"
    """An IP address."""
    port: int = 8000
    password: str = ""
    admin_password: str = ""
    keys_file: str = ""
    """File of API keys and limits; see routes/api_keys.py."""
    cors_origin: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_mb: float = 32.0
    max_state_mb: float = 128.0
    max_contents: int = 4096
    max_prompt_tokens: int = 262_144
    max_request_tokens: int = 1_048_576
    """Tokens of all prompts of a request. The engine receives them in one message, which delays other requests."""
    max_tokens_limit: int = 1_048_576
    max_streams: int = 480
    """Concurrent answers per HTTP worker. Each blocks one of the 512 threads in Robyn's pool."""
    max_streams_per_client: int = 0
    trusted_proxies: tuple[str, ...] = ()
    proxy_key: str = ""
    """Secret of our own nginx. "": there is none."""
    engine_wait_s: float = 10.0
    resubmit: int = 2
    shares_sessions: bool = False
    """Whether every engine of the model can continue every session."""
    stall_timeout_s: float = 30.0
    default_timeout_s: float = 0.0
    max_timeout_s: float = 0.0
    generation_config: str = "auto"
    defaults: dict[str, Any] = {}
    """The decode parameters in `generation_config`: `DecodeDefaults` as a dict."""
    access_log: bool = True
    otlp_endpoint: str = ""
    translation_prompt: str = "auto"
    """A `PromptForm`. auto: that of the model file's name; see `prompt_form`."""
    translation_style: tuple[str, ...] = ()
    translate_cache: int = 4096
    """Translations cached per HTTP worker. 0: none."""
    share_prefix_cache: bool = False
    strict_fields: bool = False
    strict_model: bool = False
    files_dir: str = "auto"
    files_max_gb: float = 10.0
    tune_device: str = "auto"
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
