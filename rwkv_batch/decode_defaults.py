"""Default decode parameters that a tuned state or a loaded model brings. Plain data."""

from __future__ import annotations

from typing import Any

import msgspec


class DecodeDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """By the requests' field names. None: the route's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    alpha_presence: float | None = None
    alpha_frequency: float | None = None
    alpha_decay: float | None = None
    max_tokens: int | None = None
    stop_tokens: tuple[int | str, ...] | None = None
    template: dict[str, str] | None = None
    """words for system, user and assistant, and the start of an answer"""

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are set, as JSON values."""
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return values
