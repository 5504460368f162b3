"""Sizes and guarantees of the state pool, as flags set them."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from state_pool.addresses import SCHEMES, parse_server_address

DEFAULT_SESSION_TTL_S = 30 * 86400.0
_PROMPT_HISTORY_BYTES = 256 << 10
"""Memory for recent prompts, per cached prefix."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    l1_sessions: int = 16
    """Idle sessions kept in GPU slots, besides the running rows."""
    l2_sessions: int = 32
    state_db: str = "rwkv_sessions.db"
    """SQLite file, or postgresql://... for a database shared by engines of several machines. "": sessions in memory
    only.
    """
    durability: str = "log"
    """Committed before a turn is acknowledged: "log" its token ids, "turn" the whole state, "lazy" nothing."""
    synchronous: str = "NORMAL"
    """SQLite's synchronous. Commits survive a killed process with NORMAL, a power loss with FULL."""
    session_ttl: float | None = None
    """Seconds after which an unused session is deleted; 0: never. None: `DEFAULT_SESSION_TTL_S`, or never in a
    database whose sessions were stored before there was an expiry.
    """
    migrate_backup: bool = True
    """Keep a copy of an SQLite file before a newer version changes its schema, if the disk has room."""
    state_db_max_gb: float = 0.0
    """0: unlimited"""
    state_db_full: str = "evict"
    """At the limit: "evict" deletes the oldest session, "refuse" rejects new ones."""
    checkpoint_tokens: int = 2048
    """Log length at which a session's state is stored again."""
    prefix_cache_slots: int = 8
    """0: no prefix cache"""
    prefix_cache_l2: int = 64
    state_slots: int = 16
    """Host memory has all tuned states."""
    max_states: int = 256
    max_adapters: int = 64
    retain_tokens: int = 0
    """Logged tokens kept before the last checkpoint, in whole turns.

    0 keeps only the tokens that a replay needs. -1 keeps all: a session can then be rebuilt for another model or after
    damage.
    """
    checkpoint_idle_s: float = 30.0
    """Idle time after which an outdated checkpoint of a session is renewed."""
    transfer_states: int = 4
    """Each copy holds a host buffer."""
    engine: str = ""
    """Name of this engine among those that share the database. "": it is not shared."""
    model_file: str = ""
    """Name of the weights' file, which messages to users of another model give. "": unknown."""
    service: str = ""
    """Common name of the engines that may share an SQLite file. Others are refused while one of them runs."""
    checkpoint_store: str = ""
    """Where states are stored: file:///FOLDER or s3://BUCKET/PREFIX?endpoint=URL. "": in the database."""
    checkpoint_store_min_mb: float = 1.0
    """Smaller states stay in the database."""
    prefix_seen_mb: int = 16
    """Most memory for recent prompts (4 bytes per token), to find shared prefixes."""

    @property
    def prompt_history_bytes(self) -> int:
        """Return the memory for recent prompts. A small prefix cache remembers few."""
        prefixes = self.prefix_cache_slots + self.prefix_cache_l2
        return min(self.prefix_seen_mb << 20, prefixes * _PROMPT_HISTORY_BYTES)

    @property
    def on_server(self) -> bool:
        return self.state_db.startswith(SCHEMES)

    @property
    def database_display_name(self) -> str:
        """Return the database's name without secrets; "": none. Raises ValueError for a malformed address."""
        return parse_server_address(self.state_db).display_name if self.on_server else self.state_db

    @property
    def files_stem(self) -> str:
        """Path prefix of the files that belong to the database; "": there is no database.

        For a server, the files are in the engine's working directory, one set per schema.
        """
        if not self.on_server:
            return self.state_db
        schema = self.state_db.partition("#")[2]
        return f"rwkv_sessions-{quote(schema, safe='')}" if schema else "rwkv_sessions"
