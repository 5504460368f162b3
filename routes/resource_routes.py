"""Routes that list, load and remove one type of resource (tuned states, adapters)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from routes.request.bodies import Body, Fields
from routes.route import Handler, Route
from rwkv_batch.errors import ErrorKind

_ENGINE_ERRORS = (ErrorKind.ENGINE_LOST, ErrorKind.DRAINING)


class NameQuery(Fields):
    """The resource to remove."""

    name: str = Field(min_length=1, description="Name of the resource.")


@dataclass(frozen=True, slots=True)
class ResourceType:
    """A type of resource, with the models of its bodies and answers."""

    path: str
    title: str
    """For summaries: "tuned state"."""
    body: type[Body]
    entry: type[BaseModel]
    listing: type[BaseModel]
    not_found: ErrorKind
    example: dict[str, Any]
    takes_form: bool = False


def make_routes(
    resource: ResourceType, list_handler: Handler, add_handler: Handler, remove_handler: Handler
) -> tuple[Route, ...]:
    """Return the routes: GET and POST on its path, DELETE on `path/{name}`. POST and DELETE need an administrator."""
    return (
        Route(
            "GET",
            resource.path,
            list_handler,
            None,
            f"List every {resource.title}.",
            answer=resource.listing,
            errors=_ENGINE_ERRORS,
            waits_for_engine=True,
        ),
        Route(
            "POST",
            resource.path,
            add_handler,
            resource.body,
            f"Load a {resource.title}.",
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
            f"Remove a {resource.title}.",
            query=NameQuery,
            answer=resource.entry,
            errors=(resource.not_found, *_ENGINE_ERRORS),
            example={"name": resource.example["name"]},
            is_admin=True,
            waits_for_engine=True,
        ),
    )
