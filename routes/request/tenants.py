"""What belongs to a request's API key: its session ids and caches.

An API key's session ids are a name space of that key. A key also reaches a session without an owner, if it has none of
that id. Clients without a key use stored ids.
"""

from __future__ import annotations

from routes.config import HttpConfig
from routes.request_context import current_request
from state_pool.session_key import OWNED, owned_id


def own_id(session_id: str) -> str:
    """Return the stored id of the client's own session."""
    return owned_id(current_request().owner, session_id)


def reachable_ids(session_id: str) -> tuple[str, ...]:
    """Return the stored ids that the client may mean, in order: its own session, then a shared one."""
    own = own_id(session_id)
    return (own,) if own == session_id or session_id.startswith(OWNED) else (own, session_id)


def cache_tenant(config: HttpConfig) -> str:
    """Return the key whose cached prefixes, grammars and translations the request may use; "" for shared ones."""
    return "" if config.share_prefix_cache else current_request().owner
