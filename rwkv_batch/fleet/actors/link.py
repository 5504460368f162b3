"""The link to an engine that is an actor: its events come by one streaming call, what is sent goes by calls of a tick.

One call with messages is under way at a time; what is sent meanwhile goes together with the next. Where nothing is
sent an empty one says that this process is there. That the engine is lost is noticed by its silence (`rwkv_batch.fleet.member`)
long before Ray says so.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from typing import Any

from rwkv_batch.errors import StartupError
from rwkv_batch.fleet.actors.address import EngineAddress
from rwkv_batch.fleet.actors.driver import join
from rwkv_batch.ipc.buffered_link import BufferedLink
from rwkv_batch.ipc.client import Connect, WorkerLink
from rwkv_batch.ipc.wire import HEARTBEAT_S, ToEngine, ToWorker, to_worker_decoder

logger = logging.getLogger(__name__)

RETRY_S = 0.5
_POLL_INTERVAL_S = 0.25
"""How soon the end of a link is noticed on which nothing comes."""


class ActorLink(BufferedLink[ToWorker, ToEngine]):
    """A `Link` to an engine's actor. Its own thread sends; `receive` fetches what comes."""

    def __init__(self, ray: Any, actor: Any) -> None:
        super().__init__(to_worker_decoder)
        self._ray = ray
        self._actor = actor
        self._peer = uuid.uuid4().hex
        self._events = actor.events.remote(self._peer)
        self._sends = threading.Thread(target=self._push, name="engine-client-send", daemon=True)

    def next_piece(self) -> bytes | None:
        """See CarriedLink."""
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
                if not self._sends.ident:  # not before the actor knows of this link
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
            logger.debug("an engine's actor takes no messages: %r", error)
        except Exception:  # whatever else Ray raises: the link is made anew
            logger.exception("an engine's actor cannot be told")
        finally:
            self.close()


def actor_connector(address: EngineAddress) -> Connect:
    """Links to the engine of that name."""
    last = 0.0

    def connect() -> WorkerLink | None:
        nonlocal last
        time.sleep(max(0.0, last + RETRY_S - time.monotonic()))  # the cluster's head is asked each time
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
