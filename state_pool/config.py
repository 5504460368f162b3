"""Sizes and promises of the state pool, as flags give them."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from state_pool.database_address import SCHEMES, parse_server_address


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the three tiers and of the prefix cache."""

    l1_sessions: int = 16
    """Parked sessions kept in slots of the device's arena, beside the running rows."""
    l2_sessions: int = 32
    """Parked sessions kept in host memory."""
    state_db: str = "rwkv_sessions.db"
    """SQLite file of the third tier, or postgresql://… of a database that engines of several machines share;
    "" = none: sessions live in memory only."""
    durability: str = "log"
    """"log": a turn's token ids are committed before it is acknowledged; "turn": the whole state is;
    "lazy": write-behind."""
    synchronous: str = "NORMAL"
    """SQLite's synchronous: NORMAL survives the process, FULL the power."""
    session_ttl: float = 30 * 86400.0
    """Sessions not used for so long are deleted; 0: never."""
    state_db_max_gb: float = 0.0
    """Most the database may hold; 0: unlimited."""
    state_db_full: str = "evict"
    """At the limit: "evict" the oldest session, or "refuse" new ones."""
    checkpoint_tokens: int = 2048
    """Log length at which a session's state is written again."""
    prefix_cache_slots: int = 8
    """Cached prompt prefixes kept in slots; 0: no prefix cache."""
    prefix_cache_l2: int = 64
    """Cached prefixes kept in host memory."""
    state_slots: int = 16
    """Tuned states kept in slots; host memory has all."""
    max_states: int = 256
    """Tuned states loaded at once."""
    max_adapters: int = 64
    """Adapters loaded at once for rows to name."""
    retain_tokens: int = 0
    """Tokens of history kept in the log behind the last checkpoint, in whole turns; 0: what a replay needs; -1: all,
    so that a session can be rebuilt for another model or after damage."""
    checkpoint_idle_s: float = 30.0
    """A parked session whose state on disk is older than its log is checkpointed after so long without a turn."""
    transfer_states: int = 4
    """States on their way to disk or host at once; each holds a host buffer."""
    engine: str = ""
    """Name of this engine among those that share the database; "": it has the database for itself."""
    service: str = ""
    """What the engines that may share an SQLite file have in common; others are refused while one of them lives."""
    checkpoint_store: str = ""
    """file:///FOLDER or s3://BUCKET/PREFIX?endpoint=URL: where stored states are kept; "": in the database."""
    checkpoint_store_min_mb: float = 1.0
    """States smaller than this are kept in the database all the same."""
    prefix_seen_mb: int = 16
    """Recent prompts remembered (4 bytes a token), to notice a prefix that is met again."""

    @property
    def on_server(self) -> bool:
        """Whether the database is a server's and no file."""
        return self.state_db.startswith(SCHEMES)

    @property
    def database_display_name(self) -> str:
        """What the database is called in messages, nothing secret; "": there is none. Raises ValueError."""
        return parse_server_address(self.state_db).display_name if self.on_server else self.state_db

    @property
    def files_stem(self) -> str:
        """What files beside the database are named after; "": there is none. A server's are where the engine runs,
        those of each of its schemas apart."""
        if not self.on_server:
            return self.state_db
        schema = self.state_db.partition("#")[2]
        return f"rwkv_sessions-{quote(schema, safe='')}" if schema else "rwkv_sessions"
