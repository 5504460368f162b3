"""Which engines the cluster's head lists. A thread of its own asks it, so that nobody else waits while it is away."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from cluster.actors.placement import has_room

logger = logging.getLogger(__name__)

ENGINE = "engine-"
_LOOK_S = 1.0
_CURRENT_S = 3.0
"""A head that has said nothing for so long is away: whatever asked it would wait, for a minute by Ray's defaults."""


class Names:
    """See above. What it has is the head's last word."""

    def __init__(self, ray: Any) -> None:
        """Asks once before it returns. Raises RayError."""
        self._ray = ray
        self.actors: dict[str, Any] = {}
        """of all that are listed; None: to be looked up again"""
        self.loading: frozenset[str] = frozenset()
        """those whose place is looked at; the roster says which"""
        self.roomless: frozenset[str] = frozenset()
        """those among them for which no node has room"""
        self._answered = 0.0
        self.look()
        threading.Thread(target=self._follow, name="names", daemon=True).start()

    def _follow(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            try:
                self.look()
            except (OSError, self._ray.exceptions.RayError) as error:
                logger.warning("the cluster's head does not answer (%r); engines that are known go on", error)
            except Exception:  # whatever else Ray raises: without this thread no engine is seen to come or leave
                logger.exception("the cluster's engines cannot be listed; those that are known go on")

    @property
    def is_current(self) -> bool:
        """Whether the head has answered of late."""
        return time.monotonic() - self._answered < _CURRENT_S

    def look(self) -> None:
        """Ask the head. Raises RayError."""
        names = [name for name in self._ray.util.list_named_actors() if name.startswith(ENGINE)]
        known = self.actors
        self.actors = {name: known.get(name) or self._looked_up(name) for name in names}
        self.roomless = frozenset(name for name in self.loading if not has_room(name))
        self._answered = time.monotonic()

    def actor(self, name: str) -> Any:
        """The engine's actor, None if there is none; asks the head if it is not known. Raises RayError."""
        return self.actors.get(name) or self._looked_up(name)

    def forget(self, name: str) -> None:
        """Its actor has died: another one may have that name by now."""
        actors = self.actors  # the head's next word may take its place meanwhile
        if name in actors:
            actors[name] = None

    def _looked_up(self, name: str) -> Any:
        try:
            return self._ray.get_actor(name)
        except ValueError:  # it has just left
            return None
