"""An HTTP worker's settings. Plain data, made by programs/settings/ from flags and environment."""

from __future__ import annotations

import msgspec


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Address, password and the limits of one request."""

    host: str = "127.0.0.1"
    """An IP literal."""
    port: int = 8000
    password: str = ""
    """"" = none is wanted."""
    admin_password: str = ""
    """Of routes that change what is served; "": the password does."""
    keys_file: str = ""
    """API keys and their limits; see routes/api_keys.py."""
    cors_origin: str = "*"
    max_body_mb: float = 32.0
    max_state_mb: float = 128.0
    """A session file that is brought in."""
    max_contents: int = 4096
    """Prompts in one request."""
    max_prompt_tokens: int = 262_144
    """Tokens of one prompt."""
    max_request_tokens: int = 1_048_576
    """Tokens of all prompts of one request: they reach the engine in one piece, and everybody waits for that."""
    max_tokens_limit: int = 1_048_576
    """Most that `max_tokens` may ask for."""
    max_streams: int = 480
    """Answers one HTTP worker writes at a time; each waits on a thread of Robyn's pool of 512."""
    max_streams_per_client: int = 0
    """The same for one client (see client_identity); 0: seven eighths of `max_streams`."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose X-Forwarded-For is believed."""
    proxy_key: str = ""
    """What our own nginx proves itself with; "" = there is none."""
    engine_wait_s: float = 10.0
    """How long work waits for an engine that is loading or being restarted."""
    resubmit: int = 2
    """Engines that a request may lose and go on with another; 0: it ends with its engine."""
    shares_sessions: bool = False
    """Whether any of the model's engines can go on with any session."""
    stall_timeout_s: float = 30.0
    """A client that reads nothing for so long is cut off."""
    default_timeout_s: float = 0.0
    """Of requests that give no `timeout_s`; 0: none."""
    max_timeout_s: float = 0.0
    """Most that a request's `timeout_s` may be, and what one without gets; 0: a day, and none."""
    access_log: bool = True
    """One line a request."""
    translate_cache: int = 4096
    """Translations each HTTP worker remembers; 0: none."""
    files_dir: str = "auto"
    """Folder of files and batches; auto: beside the sessions' database, if there is one. none: none are kept."""
    files_max_gb: float = 10.0
    """Most that all files may hold."""
    drain_timeout_s: float = 30.0
    model_name: str = "rwkv7"
    models_dir: str = ""
    """Folder that requests may name files in; "": none."""

    @property
    def max_body_bytes(self) -> int:
        """`max_body_mb` in bytes."""
        return int(self.max_body_mb * 1024 * 1024)

    @property
    def max_state_bytes(self) -> int:
        """`max_state_mb` in bytes."""
        return int(self.max_state_mb * 1024 * 1024)
