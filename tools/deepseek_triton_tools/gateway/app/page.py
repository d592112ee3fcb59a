"""The pages for people: one static file each, which loads nothing else and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


@dataclass(frozen=True, slots=True)
class StaticPage:
    """A page as it is sent. headers: the ETag by which a browser asks again among them."""

    body: bytes
    headers: dict[str, str]

    async def respond(self, request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if self.headers["ETag"] in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers, media_type="text/html")


def page_routes() -> list[Route]:
    """The chat page at /, and one that watches the servers at /dashboard."""
    return [Route("/", _read("index.html").respond), Route("/dashboard", _read("dashboard.html").respond)]


def _read(name: str) -> StaticPage:
    body = resources.files("deepseek_triton_tools.gateway").joinpath("page", name).read_bytes()
    policy = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
        "script-src": _hashes("script", body),
        "style-src": _hashes("style", body),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": "; ".join(f"{key} {value}" for key, value in policy.items()),
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return StaticPage(body, headers)


def _hashes(tag: str, body: bytes) -> str:
    """Allows the page's own elements of this kind, and no other."""
    contents = re.findall(rb"<%s\b[^>]*>(.*?)</%s>" % (tag.encode(), tag.encode()), body, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in contents)
