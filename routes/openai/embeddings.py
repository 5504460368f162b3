"""`POST /openai/v1/embeddings`: refused by name, so that a client learns why instead of guessing at the path."""

from __future__ import annotations

from routes.context import Context
from routes.openai.errors import OPENAI_ERRORS
from routes.request.bodies import Body
from routes.response.http_response import HandlerResponse
from routes.route import Route
from rwkv_batch.errors import ErrorKind, ServiceError

PATH = "/openai/v1/embeddings"


async def embeddings(context: Context, body: Body) -> HandlerResponse:
    """Not served: the model was trained to continue text, and nothing in it was trained to compare texts."""
    raise ServiceError(
        ErrorKind.NOT_FOUND,
        "embeddings are not served: an RWKV-7 language model has no vectors that were trained to compare texts; "
        "use an embedding model's service",
    )


ROUTES = (
    Route(
        "POST",
        PATH,
        embeddings,
        Body,
        "Not served; refused by name.",
        error_format=OPENAI_ERRORS,
        errors=(ErrorKind.NOT_FOUND,),
        example={"model": "rwkv7", "input": "Hello!"},
    ),
)
