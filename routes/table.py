"""Every route of the service. A new dialect adds its ROUTES here."""

from __future__ import annotations

from routes import system, translate, v1
from routes.route import Route

ROUTES: tuple[Route, ...] = (*v1.ROUTES, *translate.ROUTES, *system.ROUTES)
