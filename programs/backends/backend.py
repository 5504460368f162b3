"""What a run asks its questions of."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

UNREACHABLE = 0
"""Status of a service that nobody could be reached at."""


class Reply(NamedTuple):
    """A route's answer."""

    status: int
    """As over HTTP; AWAY where there is none."""
    value: Any
    """The body's JSON value; of what is none, its text."""
    retry_after_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def reason(self) -> str:
        """Why it is no good answer."""
        error = self.value.get("error") if isinstance(self.value, dict) else self.value
        if isinstance(error, dict):
            error = error.get("message")
        return str(error or f"status {self.status}")[:2000]


class Backend(Protocol):
    """An engine in this process, or a service somewhere."""

    async def model(self) -> str:
        """Which model answers. Raises RunError if nobody says."""

    async def open(self) -> int:
        """Make ready; returns how many questions at once keep it at work. Raises RunError."""

    async def request(self, path: str, body: dict[str, Any]) -> Reply:
        """The answer to a POST."""

    async def close(self) -> None:
        """Let go of it."""
