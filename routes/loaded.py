"""What users load beside a model and requests name: the routes that list it, load it and forget it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from routes.request.bodies import Body, Fields
from routes.route import Handler, Route
from rwkv_batch.errors import ErrorKind

_AWAY = (ErrorKind.ENGINE_LOST, ErrorKind.DRAINING)


class NameQuery(Fields):
    """Which one is meant."""

    name: str = Field(min_length=1, description="Its name.")


@dataclass(frozen=True, slots=True)
class Kind:
    """What is loaded, and who answers for it."""

    path: str
    called: str
    """In the summaries: "tuned state"."""
    body: type[Body]
    entry: type[BaseModel]
    listing: type[BaseModel]
    not_found: ErrorKind
    example: dict[str, Any]
    takes_form: bool = False


def routes_of(kind: Kind, listed: Handler, added: Handler, removed: Handler) -> tuple[Route, ...]:
    """GET and POST on its path, DELETE on `path/{name}`; the last two are administrators'."""
    return (
        Route(
            "GET",
            kind.path,
            listed,
            None,
            f"Every {kind.called} that requests may name.",
            answer=kind.listing,
            errors=_AWAY,
            waits_for_engine=True,
        ),
        Route(
            "POST",
            kind.path,
            added,
            kind.body,
            f"Load one more {kind.called}.",
            answer=kind.entry,
            errors=(ErrorKind.NAME_TAKEN, ErrorKind.OVERLOADED, *_AWAY),
            example=kind.example,
            takes_form=kind.takes_form,
            is_admin=True,
            waits_for_engine=True,
        ),
        Route(
            "DELETE",
            f"{kind.path}/{{name}}",
            removed,
            None,
            f"Forget that {kind.called}.",
            query=NameQuery,
            answer=kind.entry,
            errors=(kind.not_found, *_AWAY),
            example={"name": kind.example["name"]},
            is_admin=True,
            waits_for_engine=True,
        ),
    )
