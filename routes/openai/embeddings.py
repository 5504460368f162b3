"""`POST /openai/v1/embeddings`: refused with an explanation."""

from __future__ import annotations

from routes.context import Context
from routes.request.bodies import Body
from routes.response.http_response import OPENAI_ERRORS, HandlerResponse
from routes.route import Route
from rwkv_batch.errors import ErrorKind, ServiceError

PATH = "/openai/v1/embeddings"


async def embeddings(context: Context, body: Body) -> HandlerResponse:
    """Not supported: the model is trained to continue text and has no embeddings."""
    raise ServiceError(
        ErrorKind.NOT_FOUND,
        "embeddings are not supported: RWKV-7 language models have no vectors trained to compare texts; use "
        "an embedding model's service",
    )


ROUTES = (
    Route(
        "POST",
        PATH,
        embeddings,
        Body,
        "Not supported.",
        error_format=OPENAI_ERRORS,
        errors=(ErrorKind.NOT_FOUND,),
        example={"model": "rwkv7", "input": "Hello!"},
    ),
)
