"""`GET /docs`: the API reference as one page, without network access."""

from __future__ import annotations

from routes.context import Context
from routes.docs.reference import page
from routes.response.http_response import HandlerResponse, HttpResponse
from routes.route import Route
from routes.system import OPENAPI_KEY

HTML = "text/html; charset=utf-8"


async def docs(context: Context, query: dict[str, str]) -> HandlerResponse:
    """Return every route with its fields, limits, errors and a curl command."""
    return HttpResponse(page(context.shared[OPENAPI_KEY]).encode(), content_type=HTML)


ROUTES = (Route("GET", "/docs", docs, None, "This reference as a web page.", is_public=True, content_type="text/html"),)
