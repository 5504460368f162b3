"""`python -m routes.reference` writes docs/api.md from the routes."""

from __future__ import annotations

from pathlib import Path

from routes.docs.openapi import openapi_document
from routes.docs.reference import markdown
from routes.table import ROUTES

API_PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"


def main() -> None:
    API_PAGE.parent.mkdir(exist_ok=True)
    API_PAGE.write_text(markdown(openapi_document(ROUTES)), encoding="utf-8")


if __name__ == "__main__":
    main()
