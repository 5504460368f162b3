"""The interface of a backend that answers requests."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

UNREACHABLE = 0
"""Status of a service that cannot be reached."""


class Reply(NamedTuple):
    """A route's answer."""

    status: int
    """HTTP status, or UNREACHABLE."""
    value: Any
    """The body's JSON value, or its text if it is not JSON."""
    retry_after_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def reason(self) -> str:
        """The error message of a failed answer."""
        error = self.value.get("error") if isinstance(self.value, dict) else self.value
        if isinstance(error, dict):
            error = error.get("message")
        return str(error or f"status {self.status}")[:2000]


class Backend(Protocol):
    """An engine in this process, or a service at a URL."""

    async def model(self) -> str:
        """Returns the model's name. Raises RunError if it is unknown."""

    async def open(self) -> int:
        """Prepares the backend. Returns the number of requests in flight that keep it busy. Raises RunError."""

    async def request(self, path: str, body: dict[str, Any]) -> Reply:
        """Sends a POST and returns the answer."""

    async def close(self) -> None:
        """Releases the backend."""
