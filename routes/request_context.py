"""The context of one HTTP request: id, client, limits and usage, and the session ids and caches of its API key.

`current_request()` returns it in the handler, on threads that the handler starts, and on the thread that writes the
answer.
"""

from __future__ import annotations

import re
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from routes.config import HttpConfig
from rwkv_batch.errors import ErrorInfo, ServiceError
from rwkv_batch.request import ClientLimits, Job, JobEvents, Priority
from state_pool.session_key import OWNED, owned_id

REQUEST_ID = "X-Request-Id"
_VALID_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


@dataclass(slots=True)
class RequestContext:
    request_id: str = ""
    method: str = ""
    base_url: str = ""
    """Scheme and host as the client sees them."""
    route: str = ""
    """Path of the route, with its parameters' names."""
    client: str = ""
    """Name of the API key, else the address."""
    limits: ClientLimits | None = None
    """Limits of the API key."""
    key_digest: str = ""
    """SHA-256 of the API key."""
    owner: str = ""
    """Name of the API key. The request sees only this owner's sessions, files and batches; "" sees all."""
    is_admin: bool = False
    """Whether it may see the names, counts and paths of the service."""
    allowed_origin: str = ""
    """Access-Control-Allow-Origin of the answer. "": none."""
    priority: Priority | None = None
    """Priority of all its jobs. None: each job has its own."""
    is_stream: bool = False
    started: float = field(default_factory=time.monotonic)
    rows: int = 0
    prompt_tokens: int = 0
    """Tokens sent to the engine. Rows with a shared prompt count it once."""
    completion_tokens: int = 0
    queue_s: float | None = None
    """Longest time that a finished row waited for its request slot."""
    submitted_s: float = 0.0
    """Time from the request's arrival to its submission to an engine."""
    prefill_s: float = 0.0
    """Longest time from a finished row's request slot to the step that sampled its first token."""
    is_from_openai_sdk: bool = False
    """Whether a client library of OpenAI's kind sent it."""
    traceparent: str = ""
    """W3C's header, with --otlp-endpoint."""
    first_byte_s: float = 0.0
    """Time from the request's arrival to the answer's first byte. 0 before it."""
    error_kind: str = ""
    """Kind of the job's error. A stream may fail under status 200."""
    refusal: ErrorInfo | None = None
    """The error that refused the request."""
    tuned_model: str = ""
    """Name `ft:...` of the model that it names."""
    warnings: list[dict[str, str]] = field(default_factory=list)
    """For the answer: {"field", "message"}."""
    ignored: list[str] = field(default_factory=list)
    """Fields of the request that change nothing."""

    def check_rows(self, rows: int, states: int = 1) -> None:
        """Check a request's rows against the key's limit. A mixture counts once per state. Raises ServiceError."""
        error = None if self.limits is None else self.limits.rows_error(self.client, rows, states)
        if error is not None:
            raise ServiceError.from_info(error)

    def count_job(self, job: Job) -> None:
        """Count a job's rows and prompt tokens."""
        self.rows += job.num_rows
        self.submitted_s = time.monotonic() - self.started
        self.prompt_tokens += sum(row.num_prompt_tokens for row in job.rows)

    def observe(self, events: JobEvents) -> None:
        """Count a step's output."""
        if events.error is not None:
            self.error_kind = events.error.kind
        for delta in events.deltas:
            self.completion_tokens += delta.num_tokens
            if delta.finish is not None:
                self.queue_s = max(self.queue_s or 0.0, delta.finish.queue_s)
                self.prefill_s = max(self.prefill_s, delta.finish.prefill_s)
                if delta.finish.error is not None:
                    self.error_kind = delta.finish.error.kind

    def mark_first_byte(self) -> None:
        """Record the time of the answer's first byte."""
        if not self.first_byte_s:
            self.first_byte_s = time.monotonic() - self.started


_NONE = RequestContext()
_current: ContextVar[RequestContext] = ContextVar("request_context", default=_NONE)


def current_request() -> RequestContext:
    """Return the request of this task or thread, or an empty one."""
    return _current.get()


def set_current_request(request_context: RequestContext) -> None:
    _current.set(request_context)


def warn(field: str, message: str, *, is_ignored: bool = True) -> None:
    """Add a warning to the request's answer. Without a request it is dropped.

    is_ignored: whether the field changes nothing
    """
    if current_request() is not _NONE:
        current_request().warnings.append({"field": field, "message": message})
        if is_ignored:
            current_request().ignored.append(field)


def request_id(given: str | None) -> str:
    """Return the client's request id if valid, else a new one."""
    return given if given is not None and _VALID_REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def own_id(session_id: str) -> str:
    """Return the stored id of the client's own session."""
    return owned_id(current_request().owner, session_id)


def reachable_ids(session_id: str) -> tuple[str, ...]:
    """Return the stored ids that the client may mean, in order: its own session, then a shared one."""
    own = own_id(session_id)
    return (own,) if own == session_id or session_id.startswith(OWNED) else (own, session_id)


def cache_tenant(config: HttpConfig) -> str:
    """Return the key whose cached data the request may use.

    The data are prefixes, grammars and translations. "" means the shared ones.
    """
    return "" if config.share_prefix_cache else current_request().owner
