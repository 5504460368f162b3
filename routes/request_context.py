"""One request under way: what log lines and errors call it, who asks, and what it has cost so far.

It is found by `current_request()` wherever the request is worked on: in its handler, on threads that the handler starts, and
on the thread that writes its answer.
"""

from __future__ import annotations

import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field

from rwkv_batch.request import ClientLimits, Job, JobEvents, Priority

REQUEST_ID = "X-Request-Id"
_VALID_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


@dataclass(slots=True)
class RequestContext:
    """One request and its answer."""

    request_id: str = ""
    method: str = ""
    route: str = ""
    """Its path as the table of routes has it."""
    client: str = ""
    """The API key's name, else the address."""
    limits: ClientLimits | None = None
    """Of the API key."""
    owner: str = ""
    """The API key's name, whose files and batches the request may see; "": it has none, and sees all."""
    priority: Priority | None = None
    """Of all its jobs; None: they say."""
    is_stream: bool = False
    started: float = field(default_factory=time.monotonic)
    rows: int = 0
    prompt_tokens: int = 0
    """Handed to the engine; rows that share a prompt read it once."""
    completion_tokens: int = 0
    queue_s: float | None = None
    """The longest wait of an ended row for a seat."""
    first_byte_s: float = 0.0
    """From the request's arrival to the first byte of the answer's text; 0 before it."""
    failure: str = ""
    """Kind of error of the job, which a stream tells under status 200."""

    def submit(self, job: Job) -> None:
        """Count what is asked of the engine."""
        self.rows += job.num_rows
        self.prompt_tokens += sum(row.num_prompt_tokens for row in job.rows)

    def observe(self, events: JobEvents) -> None:
        """Count what a step has brought."""
        if events.error is not None:
            self.failure = events.error.kind
        for delta in events.deltas:
            self.completion_tokens += delta.num_tokens
            if delta.finish is not None:
                self.queue_s = max(self.queue_s or 0.0, delta.finish.queue_s)
                if delta.finish.error is not None:
                    self.failure = delta.finish.error.kind

    def mark_first_byte(self) -> None:
        """The first byte of the answer's text is there."""
        if not self.first_byte_s:
            self.first_byte_s = time.monotonic() - self.started


_NONE = RequestContext()
_current: ContextVar[RequestContext] = ContextVar("exchange", default=_NONE)


def current_request() -> RequestContext:
    """The exchange that this task or thread works on; one without a name where there is none."""
    return _current.get()


def set_current_request(request_context: RequestContext) -> None:
    """From now on this task or thread works on `request_context`."""
    _current.set(request_context)


def request_id(given: str | None) -> str:
    """The client's own id of a request if it is a plain word of at most 128 characters, else a new one."""
    return given if given is not None and _VALID_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
