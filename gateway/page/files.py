"""The built page over HTTP: `/`, and what it names under `/assets/`.

static/ ─ read once ─▶ index.html  no-store: the next look names the assets of the gateway that runs then
                    └▶ assets/     a year, immutable: each name holds the digest of its content

These paths need no key, because they hold no secret: the page asks for the key, or gets it from the fragment of its
address, which a browser sends to no server.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Response

from contracts.errors import NotFound

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
ASSETS = "assets"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
        # The browser itself refuses text as markup or as a script, by whichever way it would come in.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
GUARDS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
FOR_EVER = "public, max-age=31536000, immutable"
METHODS = ["GET", "HEAD"]


@dataclass(frozen=True, kw_only=True)
class PageFile:
    content: bytes
    media_type: str

    def answer(self, cache: str) -> Response:
        """Starlette leaves the body of an answer to HEAD out, and keeps its length."""
        return Response(self.content, media_type=self.media_type, headers={**GUARDS, "Cache-Control": cache})


def read_page(folder: Path = STATIC) -> dict[str, PageFile]:
    """Returns the page's files by their path in the folder; none where the page was not built."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix in MEDIA_TYPES)
    return {
        path.relative_to(folder).as_posix(): PageFile(content=path.read_bytes(), media_type=MEDIA_TYPES[path.suffix])
        for path in paths
    }


def page_router(files: dict[str, PageFile]) -> APIRouter:
    """Returns a router of the two open routes, which raise NotFound for a path that isn't in the build."""
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=METHODS)
    def page() -> Response:
        """Show the page."""
        if INDEX not in files:
            raise NotFound("this gateway has no page", cure="build it by `make page`, or use the terminal")
        return files[INDEX].answer("no-store")

    @router.api_route("/assets/{name}", methods=METHODS)
    def asset(name: str) -> Response:
        """Send a part of the page, which never changes under its name."""
        file = files.get(f"{ASSETS}/{name}")
        if file is None:
            raise NotFound("the page has no such part", field="name", cure="load the page again")
        return file.answer(FOR_EVER)

    return router
