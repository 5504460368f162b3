"""Lists the cluster's engines. Its own thread polls the head, so that no other thread blocks on it."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from rwkv_batch.fleet.actors.placement import has_room

logger = logging.getLogger(__name__)

ENGINE = "engine-"
_POLL_INTERVAL_S = 1.0
_CURRENT_S = 3.0
"""Seconds without an answer after which the head counts as unreachable. Calls would block for a minute."""


class EngineDirectory:
    """As of the head's last answer."""

    def __init__(self, ray: Any) -> None:
        """Polls once before it returns. Raises RayError."""
        self._ray = ray
        self.actors: dict[str, Any] = {}
        """by name; None: to be looked up again"""
        self.loading: frozenset[str] = frozenset()
        """engines whose placement is checked; set by the roster"""
        self.unplaceable: frozenset[str] = frozenset()
        """engines among them for which no node has room"""
        self._answered = 0.0
        self.poll()
        threading.Thread(target=self._poll_loop, name="names", daemon=True).start()

    def _poll_loop(self) -> None:
        while True:
            time.sleep(_POLL_INTERVAL_S)
            try:
                self.poll()
            except (OSError, self._ray.exceptions.RayError) as error:
                logger.warning("the cluster's head does not answer (%r); known engines continue", error)
            except Exception:  # any other error of Ray: without this thread the list is never updated
                logger.exception("the cluster's engines cannot be listed; known engines continue")

    @property
    def is_current(self) -> bool:
        """Whether the head has answered lately."""
        return time.monotonic() - self._answered < _CURRENT_S

    def poll(self) -> None:
        """Raises RayError."""
        names = [name for name in self._ray.util.list_named_actors() if name.startswith(ENGINE)]
        known = self.actors
        self.actors = {name: known.get(name) or self._look_up(name) for name in names}
        self.unplaceable = frozenset(name for name in self.loading if not has_room(name))
        self._answered = time.monotonic()

    def actor(self, name: str) -> Any:
        """None: there is none. Looks it up if unknown. Raises RayError."""
        return self.actors.get(name) or self._look_up(name)

    def forget(self, name: str) -> None:
        """Look the name up again: its actor has died, and another may have the name."""
        actors = self.actors  # one reference: `poll` may replace the dict
        if name in actors:
            actors[name] = None

    def _look_up(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name)
        except ValueError:  # it has just left
            return None
