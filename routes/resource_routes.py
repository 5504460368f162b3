"""What users load beside a model and requests name: the routes that list it, load it and forget it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from routes.request.bodies import Body, Fields
from routes.route import Handler, Route
from rwkv_batch.errors import ErrorKind

_ENGINE_ERRORS = (ErrorKind.ENGINE_LOST, ErrorKind.DRAINING)


class NameQuery(Fields):
    """Which one is meant."""

    name: str = Field(min_length=1, description="Its name.")


@dataclass(frozen=True, slots=True)
class ResourceType:
    """What is loaded, and who answers for it."""

    path: str
    title: str
    """In the summaries: "tuned state"."""
    body: type[Body]
    entry: type[BaseModel]
    listing: type[BaseModel]
    not_found: ErrorKind
    example: dict[str, Any]
    takes_form: bool = False


def make_routes(
    resource: ResourceType, list_handler: Handler, add_handler: Handler, remove_handler: Handler
) -> tuple[Route, ...]:
    """GET and POST on its path, DELETE on `path/{name}`; the last two are administrators'."""
    return (
        Route(
            "GET",
            resource.path,
            list_handler,
            None,
            f"Every {resource.title} that requests may name.",
            answer=resource.listing,
            errors=_ENGINE_ERRORS,
            waits_for_engine=True,
        ),
        Route(
            "POST",
            resource.path,
            add_handler,
            resource.body,
            f"Load one more {resource.title}.",
            answer=resource.entry,
            errors=(ErrorKind.NAME_TAKEN, ErrorKind.OVERLOADED, *_ENGINE_ERRORS),
            example=resource.example,
            takes_form=resource.takes_form,
            is_admin=True,
            waits_for_engine=True,
        ),
        Route(
            "DELETE",
            f"{resource.path}/{{name}}",
            remove_handler,
            None,
            f"Forget that {resource.title}.",
            query=NameQuery,
            answer=resource.entry,
            errors=(resource.not_found, *_ENGINE_ERRORS),
            example={"name": resource.example["name"]},
            is_admin=True,
            waits_for_engine=True,
        ),
    )
