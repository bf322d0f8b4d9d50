"""The web app: pages and API over one directory, behind the guard."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette

from ergmeter.views.serve import api, pages
from ergmeter.views.serve.app_state import Desk
from ergmeter.views.serve.guard import Access, Guard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response

    from ergmeter.views.serve.folder import Folder
    from ergmeter.views.serve.pool import Pool


def web_app(folder: Folder, access: Access | None = None, *, pool: Pool | None = None) -> Guard:
    """The app, ready to be served."""
    desk = Desk(folder, pool) if pool else Desk(folder)

    @asynccontextmanager
    async def life(_app: Starlette) -> AsyncIterator[None]:
        desk.start()
        yield
        desk.stop()

    app = Starlette(
        routes=[*api.routes(desk), *pages.routes()],
        lifespan=life,
        exception_handlers={404: _not_found, 500: _failed},
    )
    app.state.desk = desk
    return Guard(app, access or Access())


async def _not_found(request: Request, _error: Exception) -> Response:
    return pages.without(request, 404, "There is nothing at this address")


async def _failed(request: Request, _error: Exception) -> Response:
    # What went wrong stands in the terminal; a page from elsewhere learns nothing from it.
    return pages.without(request, 500, "erg serve failed at this; its terminal says how")
