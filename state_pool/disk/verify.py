"""Loads a stored session and verifies every row. Any thread, on its own connection."""

from __future__ import annotations

import json
from collections.abc import Mapping

from state_pool.disk.operations import ObjectLocation, StoredObject, StoredParts
from state_pool.disk.state_store import Connection
from state_pool.disk.statements import StateRow, model_name
from state_pool.errors import SessionCorrupted, SessionUnusable
from state_pool.layout import (
    CHUNKS_PER_STATE,
    LAYOUT_VERSION,
    SAME_LAYOUT_HINT,
    Layout,
    checksum,
    chunk_checksum,
    has_same_layers,
    join_parts,
    layout_text,
    part_sizes,
    unpack_tokens,
)
from state_pool.origins import is_same_model

_SESSION = "SELECT parent, turn, fingerprint FROM sessions WHERE id = ?"


class Loader:
    """Loads sessions for one model. Without a fingerprint, it only verifies them."""

    def __init__(
        self, connection: Connection, layout: Layout, fingerprint: str | None, vocab: int | None = None
    ) -> None:
        self._connection = connection
        self._layout = layout
        self._fingerprint = fingerprint
        self._vocab = vocab

    def read(
        self, row: int, unusable_states: Mapping[int, SessionUnusable] | None = None
    ) -> tuple[StoredParts | ObjectLocation | None, list[int]]:
        """Load a session: its state, the state's location or None for the zero state, and the token ids after it.

        Call within a transaction, so that all rows are from one snapshot. `unusable_states`: numbers of states that
        could not be fetched or used, and why.

        Raises SessionUnusable (another model's state without the whole history) or SessionCorrupted.
        """
        replay: list[int] = []
        stored: StoredParts | ObjectLocation | None = None
        fingerprint = None
        session: int | None = row
        while session is not None:
            found = self._connection.execute(_SESSION, (session,)).fetchone()
            if found is None:
                raise SessionCorrupted("a dialogue that this session continues is missing from the database")
            parent, turn, fingerprint = found
            stored, base, unavailable_reason = self._state(session, unusable_states or {})
            replay = self._log(session, base, int(turn), unavailable_reason) + replay
            if stored is not None:
                break
            session = parent
        self._check_vocabulary(replay, str(fingerprint))
        return stored, replay

    def _check_vocabulary(self, replay: list[int], fingerprint: str) -> None:
        """Raise if the vocabulary lacks a token id. It would fail the step for all rows in the batch."""
        if self._vocab is None or max(replay, default=0) < self._vocab:
            return
        fault = f"its log has the token id {max(replay)}, the model's vocabulary ends before {self._vocab}"
        if not is_same_model(fingerprint, self._fingerprint or ""):
            name = model_name(self._connection, fingerprint)
            raise SessionUnusable(f"the session belongs to another model, {name} ({fault}); start that, or delete it")
        raise SessionCorrupted(fault)

    def _state(
        self, session: int, unusable_states: Mapping[int, SessionUnusable]
    ) -> tuple[StoredParts | ObjectLocation | None, int, SessionUnusable | None]:
        """Return (state, its turn, None). If the stored state cannot be used, returns (None, 0, the reason)."""
        found = self._connection.execute(
            "SELECT id, turn, num_tokens, fingerprint, layout_version, layout, bytes, checksum, "
            "object_key, object_checksum FROM states WHERE session = ?",
            (session,),
        ).fetchone()
        if found is None:
            return None, 0, None
        state, turn, num_tokens, fingerprint, version, layout, num_bytes, digest, key, key_checksum = found
        stored = None if key is None else StoredObject(key, bytes(key_checksum or b""))
        row = StateRow(state, session, turn, num_tokens, fingerprint, layout, num_bytes, stored)
        if version == LAYOUT_VERSION and row.checksum() != digest:
            return None, 0, SessionCorrupted("the stored state's description is damaged")
        if (unavailable_reason := self._mismatch(fingerprint, version, layout)) is not None:
            return None, 0, unavailable_reason
        if int(state) in unusable_states:
            return None, 0, unusable_states[int(state)]
        state_layout = stored_layout(layout)
        if stored is not None:
            return ObjectLocation(int(state), session, stored, state_layout), int(turn), None
        try:
            parts = self._parts(int(state), part_sizes(state_layout))
            return StoredParts(int(state), parts, state_layout), int(turn), None
        except SessionCorrupted as damage:
            return None, 0, damage

    def _mismatch(self, fingerprint: str, version: int, layout: str) -> SessionUnusable | None:
        """Return why a state does not fit this server, or None."""
        if self._fingerprint is None:
            return None if version == LAYOUT_VERSION else SessionUnusable(f"the state has layout version {version}")
        if not is_same_model(fingerprint, self._fingerprint):
            return SessionUnusable(
                f"the session belongs to another model ({model_name(self._connection, fingerprint)}, fingerprint "
                f"{fingerprint}; this one is {self._fingerprint}) and its token history is not complete; start that "
                "model, or delete the session"
            )
        is_known_version = version == LAYOUT_VERSION
        if not is_known_version or not has_same_layers(stored_layout(layout), self._layout):
            remedy = SAME_LAYOUT_HINT if is_known_version else "start the version that stored it"
            return SessionUnusable(
                f"the session was stored with the state layout {layout} (version {version}), this server uses "
                f"{layout_text(self._layout)} (version {LAYOUT_VERSION}) and its token history is not complete; "
                f"{remedy}, or delete the session"
            )
        return None

    def _parts(self, state: int, sizes: dict[str, int]) -> dict[str, bytes]:
        chunks: list[bytes] = []
        low = state * CHUNKS_PER_STATE
        rows = self._connection.execute(
            "SELECT id, checksum, data FROM state_chunks WHERE id >= ? AND id < ? ORDER BY id",
            (low, low + CHUNKS_PER_STATE),
        )
        for chunk_id, digest, data in rows:
            if chunk_checksum(data, chunk_id) != digest or chunk_id != low + len(chunks):
                raise SessionCorrupted(f"chunk {chunk_id - low} of the stored state is damaged")
            chunks.append(data)
        try:
            return join_parts(chunks, sizes)
        except ValueError as error:
            raise SessionCorrupted(f"the stored state is incomplete ({error})") from None

    def _log(self, session: int, after: int, last: int, unavailable_reason: SessionUnusable | None) -> list[int]:
        """Return the tokens of turns after+1..last. Raises `unavailable_reason` or SessionCorrupted for a gap."""
        tokens: list[int] = []
        expected = after
        rows = self._connection.execute(
            "SELECT turn, tokens, checksum FROM turns WHERE session = ? AND turn > ? ORDER BY turn", (session, after)
        )
        for turn, data, digest in rows:
            expected += 1
            if turn != expected or checksum(data, session, turn) != digest:
                raise unavailable_reason or SessionCorrupted(f"turn {expected} of the session's log is damaged")
            tokens += unpack_tokens(data)
        if expected != last:
            raise unavailable_reason or SessionCorrupted(
                f"turn {expected + 1} of {last} is missing from the session's log"
            )
        return tokens


def stored_layout(text: str) -> Layout:
    return {name: (dtype, tuple(shape)) for name, dtype, shape in json.loads(text)}
