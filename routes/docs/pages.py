"""`GET /docs`: the reference as one page that needs no network."""

from __future__ import annotations

from routes.context import Context
from routes.docs.reference import page
from routes.response.reply import Answer, Reply
from routes.route import Route
from routes.system import OPENAPI

HTML = "text/html; charset=utf-8"


async def docs(context: Context, query: dict[str, str]) -> Reply:
    """Every route with its fields, limits, errors and a curl line."""
    return Answer(page(context.shared[OPENAPI]).encode(), content_type=HTML)


ROUTES = (Route("GET", "/docs", docs, None, "This reference as a web page.", is_public=True, content_type="text/html"),)
