"""Web pages: the playground at `/` and the API description at `/docs`; examples.

The pages use only the public API. Their policy allows files of this folder and calls of this service, nothing else.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

FOLDER = Path(__file__).parent
FILES = {
    "/": ("index.html", "text/html"),
    "/docs": ("docs.html", "text/html"),
    "/playground/page.css": ("page.css", "text/css"),
    "/playground/examples.json": ("examples.json", "application/json"),
    **{
        f"/playground/{name}.js": (f"{name}.js", "text/javascript") for name in ("api", "docs", "gif", "page", "pixels")
    },
    **{f"/playground/{name}.svg": (f"{name}.svg", "image/svg+xml") for name in ("trust", "acceptance")},
}
"""File and media type by path. These paths need no API key."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


def _add(path: str, name: str, kind: str) -> None:
    async def answer() -> FileResponse:
        return FileResponse(FOLDER / name, media_type=kind, headers=HEADERS)

    router.add_api_route(path, answer, methods=["GET"])


for _path, _file in FILES.items():
    _add(_path, *_file)
