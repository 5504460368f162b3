"""A route's handler and what its failures become: one place for requests over HTTP and for those that come in files."""

from __future__ import annotations

import logging
from collections.abc import Awaitable

from routes.context import Context
from routes.exchange import current
from routes.request.bodies import GenerationBody, validate
from routes.request.decode_defaults import with_defaults
from routes.request.gating import with_gating
from routes.request.generate_requests import off_loop
from routes.request.model_names import asked_state
from routes.response.event_stream import ask
from routes.response.reply import Answer, Reply, Stream, error_answer
from routes.route import Route
from rwkv_batch.calls import ListStates, StateInfo
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError

logger = logging.getLogger(__name__)

_INTERNAL = ErrorInfo(kind=ErrorKind.INTERNAL, message="internal error; the server's log says more")
_STREAM = ErrorInfo(
    kind=ErrorKind.INVALID_FIELD,
    message="stream: must be false where the answer goes into a file",
    field="stream",
    given=True,
)


async def settled(route: Route, reply: Awaitable[Reply]) -> Reply:
    """What the handler replies; a failure is an answer in the route's form."""
    try:
        return await reply
    except ServiceError as error:
        current().failure = error.info.kind
        return error_answer(error.info, route.error_form)
    except Exception:  # a fault of ours is a 500 in the route's form, and the worker goes on
        logger.exception("%s %s failed", route.method, route.path)
        current().failure = _INTERNAL.kind
        return error_answer(_INTERNAL, route.error_form)


async def model_context(context: Context, route: Route, data: object) -> Context:
    """The context of the model that a request names. Raises ServiceError, also while it is being loaded."""
    if not isinstance(data, dict) or route.is_about_models:
        return context
    return await context.of_model_soon(data.get("model"))


async def completed(context: Context, asked: object) -> object:
    """What the handler gets: with the decode parameters of its tuned state and model where it leaves them out.

    Raises ServiceError.
    """
    if not isinstance(asked, GenerationBody):
        return asked
    name = "" if asked.states else asked_state(asked, context.config)
    states = await ask(context, ListStates()) if name else []
    state = next((info for info in states if info.name == name), StateInfo(name=""))
    if asked.mrss_gatingweight:
        asked = with_gating(asked, state.mixture)
    return with_defaults(asked, state.defaults, context.defaults)


async def whole_answer(context: Context, route: Route, data: object, characters: int = 0) -> Answer:
    """The route's answer to a body of about so many characters that came without HTTP; never a stream.

    `context.whole_within_s` must be None. The task's exchange says who asks (`exchange.work_on`).
    """
    reply = await settled(route, _handled(context, route, data, characters))
    if isinstance(reply, Stream):
        reply.chunks.close()
        return error_answer(_STREAM, route.error_form)
    return reply


async def _handled(context: Context, route: Route, data: object, characters: int) -> Reply:
    assert route.body is not None
    if isinstance(data, dict) and data.get("stream") is True:
        raise ServiceError.from_info(_STREAM)
    context = await model_context(context, route, data)
    body = await off_loop(characters, validate, route.body, data)
    return await route.handle(context, await completed(context, body))
