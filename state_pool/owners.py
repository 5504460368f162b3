"""Owners of sessions: the stored id of a key's session begins with the key's name.

A key's ids are thus a name space of that key, in every tier and in every engine. Ids without an owner are shared.
"""

from __future__ import annotations

import re

OWNED = "owner="
"""Begins every id with an owner: `owner=team-a/anna` is the session `anna` of the key `team-a`."""
_OWNER = re.compile(rf"{OWNED}([A-Za-z0-9._@-]+)/")
_MAX_CHAR = "\U0010ffff"
Condition = tuple[str, tuple[str, ...]]
"""A condition of SQL on the column `session_id`, with its values."""


def owned_id(owner: str, session_id: str) -> str:
    """Return the stored id of an owner's session. Owner "" has no name space."""
    return f"{OWNED}{owner}/{session_id}" if owner else session_id


def owner_of(stored_id: str) -> str:
    """Return the owner's name, "" for a shared session."""
    found = _OWNER.match(stored_id)
    return "" if found is None else found[1]


def without_owner(text: str) -> str:
    """Remove the owner from each id of a text. Owners see their ids as they chose them."""
    return _OWNER.sub("", text)


def is_visible(stored_id: str, owner: str) -> bool:
    """Return whether an owner sees a session: its own, and shared ones. Owner "" sees all."""
    return not owner or not stored_id.startswith(OWNED) or stored_id.startswith(owned_id(owner, ""))


def visible_to(owner: str) -> Condition:
    """Return `is_visible` as a condition of SQL."""
    if not owner:
        return "1 = 1", ()
    shared, own = beginning_with(OWNED), beginning_with(owned_id(owner, ""))
    return f"(NOT ({shared[0]}) OR ({own[0]}))", shared[1] + own[1]


def has_prefix(stored_id: str, prefix: str) -> bool:
    """Return whether a delete by prefix includes a session. A prefix of shared ids includes no owner's session."""
    return stored_id.startswith(prefix) and (prefix.startswith(OWNED) or not stored_id.startswith(OWNED))


def matching_prefix(prefix: str) -> Condition:
    """Return `has_prefix` as a condition of SQL."""
    condition, values = beginning_with(prefix)
    if prefix.startswith(OWNED):
        return condition, values
    owned = beginning_with(OWNED)
    return f"{condition} AND NOT ({owned[0]})", values + owned[1]


def beginning_with(prefix: str) -> Condition:
    """Return the condition that an id begins with a text. An index on the column serves it."""
    return "session_id >= ? AND session_id < ?", (prefix, prefix + _MAX_CHAR)
