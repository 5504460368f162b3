"""Which engines the cluster's head lists. A thread of its own asks it, so that nobody else waits while it is away."""

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
"""A head that has said nothing for so long is away: whatever asked it would wait, for a minute by Ray's defaults."""


class EngineDirectory:
    """See above. What it has is the head's last word."""

    def __init__(self, ray: Any) -> None:
        """Asks once before it returns. Raises RayError."""
        self._ray = ray
        self.actors: dict[str, Any] = {}
        """of all that are listed; None: to be looked up again"""
        self.loading: frozenset[str] = frozenset()
        """those whose place is looked at; the roster says which"""
        self.unplaceable: frozenset[str] = frozenset()
        """those among them for which no node has room"""
        self._answered = 0.0
        self.poll()
        threading.Thread(target=self._poll_loop, name="names", daemon=True).start()

    def _poll_loop(self) -> None:
        while True:
            time.sleep(_POLL_INTERVAL_S)
            try:
                self.poll()
            except (OSError, self._ray.exceptions.RayError) as error:
                logger.warning("the cluster's head does not answer (%r); engines that are known go on", error)
            except Exception:  # whatever else Ray raises: without this thread no engine is seen to come or leave
                logger.exception("the cluster's engines cannot be listed; those that are known go on")

    @property
    def is_current(self) -> bool:
        """Whether the head has answered of late."""
        return time.monotonic() - self._answered < _CURRENT_S

    def poll(self) -> None:
        """Ask the head. Raises RayError."""
        names = [name for name in self._ray.util.list_named_actors() if name.startswith(ENGINE)]
        known = self.actors
        self.actors = {name: known.get(name) or self._look_up(name) for name in names}
        self.unplaceable = frozenset(name for name in self.loading if not has_room(name))
        self._answered = time.monotonic()

    def actor(self, name: str) -> Any:
        """The engine's actor, None if there is none; asks the head if it is not known. Raises RayError."""
        return self.actors.get(name) or self._look_up(name)

    def forget(self, name: str) -> None:
        """Its actor has died: another one may have that name by now."""
        actors = self.actors  # the head's next word may take its place meanwhile
        if name in actors:
            actors[name] = None

    def _look_up(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name)
        except ValueError:  # it has just left
            return None
