"""The link to an engine that is a Ray actor. Events arrive by one streaming call, messages leave by short calls.

One call with messages is in flight at a time. Messages sent meanwhile go into the next call. If there are none, an
empty call is the heartbeat. The fleet notices a lost engine by its silence (`rwkv_batch.fleet.member`), long before Ray
does.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from typing import Any

from rwkv_batch.errors import StartupError
from rwkv_batch.fleet.actors.driver import join
from rwkv_batch.fleet.actors.plan import EngineAddress
from rwkv_batch.ipc.buffered_link import BufferedLink
from rwkv_batch.ipc.client import Connect, WorkerLink
from rwkv_batch.ipc.wire import HEARTBEAT_S, ToEngine, ToWorker, to_worker_decoder

logger = logging.getLogger(__name__)

RETRY_S = 0.5
_POLL_INTERVAL_S = 0.25
"""Seconds until the end of a silent link is noticed."""


class ActorLink(BufferedLink[ToWorker, ToEngine]):
    """A `Link` to an engine's actor. Its own thread sends; `receive` fetches events."""

    def __init__(self, ray: Any, actor: Any) -> None:
        super().__init__(to_worker_decoder)
        self._ray = ray
        self._actor = actor
        self._peer = uuid.uuid4().hex
        self._events = actor.events.remote(self._peer)
        self._sends = threading.Thread(target=self._push, name="engine-client-send", daemon=True)

    def next_piece(self) -> bytes | None:
        while not self.has_input and not self.is_closed:
            try:
                if not self._ray.wait([self._events], timeout=_POLL_INTERVAL_S)[0]:
                    continue
                pieces = self._ray.get(next(self._events))
            except StopIteration:
                self.close()
            except self._ray.exceptions.RayError as error:
                logger.debug("the events of an engine's actor have ended: %r", error)
                self.close()
            else:
                self.put(pieces)
                if not self._sends.ident:  # the actor must know this link first
                    self._sends.start()
        return super().next_piece()

    def _push(self) -> None:
        sent = 0
        try:
            while (pieces := self.take(HEARTBEAT_S)) is not None:
                if not self._ray.get(self._actor.push.remote(self._peer, pieces, self.read_bytes)):
                    break
                sent += sum(map(len, pieces))
                self.acknowledge(sent)
            self._actor.close_link.remote(self._peer)
        except self._ray.exceptions.RayError as error:
            logger.debug("an engine's actor accepts no messages: %r", error)
        except Exception:  # any other error of Ray: the client reconnects
            logger.exception("cannot send messages to an engine's actor")
        finally:
            self.close()


def actor_connector(address: EngineAddress) -> Connect:
    last = 0.0

    def connect() -> WorkerLink | None:
        nonlocal last
        time.sleep(max(0.0, last + RETRY_S - time.monotonic()))  # each attempt calls the cluster's head
        last = time.monotonic()
        try:
            ray = join(address.cluster)
        except StartupError as error:
            logger.error("%s", error)
            return None
        try:
            return ActorLink(ray, ray.get_actor(address.engine, address.cluster.namespace))
        except (ValueError, ray.exceptions.RayError) as error:
            logger.debug("%s is not in the cluster: %r", address.engine, error)
            return None

    return connect
