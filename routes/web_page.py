"""`GET /` and `GET /web/…`: the web page's static files, read once at start. They need no password."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

from pydantic import Field

from routes.context import Context
from routes.request.fields import Fields, error_value
from routes.response.http_response import HandlerResponse, HttpResponse
from routes.route import Routes
from rwkv_batch.errors import ErrorKind, ServiceError

ROUTES = Routes(is_public=True)

FILES_KEY = "web_files"
"""Key of the answers with the page's files in `Context.shared`."""
FOLDER = Path(__file__).with_name("web")
INDEX = "index.html"
_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify xml",
    )
)
"""Content-Security-Policy: no other hosts, no inline script, no HTML without DOMPurify.

The policy "xml" is for XML that is parsed and never shown.
"""
_HEADERS = {
    "Cache-Control": "no-cache",  # the client revalidates each time; 304 if the ETag still matches
    "Vary": "Origin, Accept-Encoding",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def read_files(folder: Path = FOLDER) -> dict[str, HttpResponse]:
    """Read all files of the page. Return their answers by path relative to `folder`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in _CONTENT_TYPES:
            content = path.read_bytes()
            headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
            found[path.relative_to(folder).as_posix()] = HttpResponse(
                content, 200, _CONTENT_TYPES[path.suffix], headers, gzip.compress(content, mtime=0)
            )
    return found


class FileQuery(Fields):
    """The file to return."""

    file: str = Field(min_length=1, description="A file of the page.")


@ROUTES.add("GET", "/", "The web page.", content_type="text/html")
async def index(context: Context) -> HandlerResponse:
    """Return the web page: chat, batch, translation and dashboard. The page itself asks for the password."""
    answer: HttpResponse = context.shared[FILES_KEY][INDEX]
    return answer


@ROUTES.add(
    "GET",
    "/web/{file}",
    "The web page's files.",
    content_type="*/*",
    errors=(ErrorKind.NOT_FOUND,),
    example={"file": "app.js"},
)
async def web_file(context: Context, query: FileQuery) -> HandlerResponse:
    """Return a script or style sheet of the web page."""
    files: dict[str, HttpResponse] = context.shared[FILES_KEY]
    name = query.file
    if name not in files:
        raise ServiceError(ErrorKind.NOT_FOUND, f"file: the page has no file {error_value(name)!r}; it begins at /")
    return files[name]
