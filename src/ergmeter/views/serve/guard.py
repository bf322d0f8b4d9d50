"""Access control and security headers of the server.

The Host header must be one of ours, against DNS rebinding. A token in an address would stay in
histories and logs, so it is exchanged once for a cookie. Names in runs are untrusted, so the
Content-Security-Policy allows only our own scripts.

After the token, a page of our own forwards the browser. An HTTP redirect would lose the
SameSite=Strict cookie if the browser came from another site's link.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import ipaddress
import json
import re
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LONGEST_ADDRESS = 8192
_HOST = re.compile(r"(?:\[(?P<number>[0-9a-f:.]+)\]|(?P<name>[^:\[\]]+))(?::\d*)?")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src-elem 'self';"
    " style-src-attr 'unsafe-inline'; img-src 'self' data:;"  # charts set widths on elements
    " connect-src 'self'; worker-src 'self'; font-src 'none'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
_PLAIN = """<!doctype html><html lang="en"><meta charset="utf-8"><title>erg serve</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">{head}{body}</html>
"""


@dataclass(frozen=True, slots=True)
class Access:
    """The accepted host names and the token; None if no token is needed."""

    hosts: frozenset[str] = frozenset(LOOPBACK)
    token: str | None = None
    # Bound to the wildcard address, any IP address is valid. Names must still be ours: only a
    # name can be rebound to another address.
    by_number: bool = False

    def is_ours(self, host: str) -> bool:
        """True if a Host header (without port) names this server."""
        return host in self.hosts or (self.by_number and ip_address(host) is not None)

    @property
    def cookie(self) -> str:
        """Return the cookie's name, derived from the token: cookies ignore ports."""
        return f"erg_{self._digest('name')[:8]}"

    @property
    def ticket(self) -> str:
        """Return the cookie's value, derived from the token but not the token itself."""
        return self._digest("ticket")

    def is_token(self, text: str) -> bool:
        """Compare with the token in constant time."""
        return self.token is not None and hmac.compare_digest(text.encode(), self.token.encode())

    def is_ticket(self, text: str) -> bool:
        """Compare with the ticket in constant time."""
        return hmac.compare_digest(text.encode(), self.ticket.encode())

    def _digest(self, purpose: str) -> str:
        key = (self.token or "").encode()
        return hmac.new(key, f"erg serve {purpose}".encode(), hashlib.sha256).hexdigest()


class Guard:
    """ASGI middleware: rejects requests and adds security headers."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await (refusal or self._app)(scope, receive, sent)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if len(scope["path"]) + len(scope["query_string"]) > _LONGEST_ADDRESS:
            return refused(414, "the address is too long")
        # A browser drops tabs and line ends: "/\t/elsewhere" would lead to another host.
        if any(ord(character) < 0x20 or ord(character) == 0x7F for character in scope["path"]):
            return refused(404, "the address has control characters in it")
        if not self._access.is_ours(_host(headers.get("host", ""))):
            return refused(421, "the Host header is not a name of this server")
        if scope["method"] not in ("GET", "HEAD"):
            return refused(405, "read only: GET and HEAD", {"allow": "GET, HEAD"})
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return refused(413, "a request must have no body")
        if _is_foreign(headers):
            return refused(403, "requested by a page of another site")
        return self._unknown(scope, headers) if self._access.token is not None else None

    def _unknown(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the answer to a request without a valid token or cookie; None if it has one."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._access.is_token(token.strip()):
            return None
        if self._access.is_ticket(_cookie(headers, self._access.cookie)):
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if any(name == "token" and self._access.is_token(value) for name, value in query):
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            return self._admitted(scope["path"] + (f"?{rest}" if rest else ""))
        why = "a token is needed: open the address that erg serve printed, with its token"
        bearer = {"www-authenticate": "Bearer"}
        if not wants_page(scope["path"], headers):
            return refused(401, why, bearer)
        # Plain: our styles are behind the token too.
        return HTMLResponse(_PLAIN.format(head="", body=f"<p>{why}</p>"), 401, bearer)

    def _admitted(self, address: str) -> Response:
        # Just a path: "//elsewhere" would be another host.
        response = HTMLResponse(onward_page("/" + address.lstrip("/\\")))
        name, ticket = self._access.cookie, self._access.ticket
        response.set_cookie(name, ticket, httponly=True, samesite="strict", path="/")
        return response


def onward_page(address: str) -> str:
    """Return a page that forwards the browser to an address."""
    inside = html.escape(address)
    onward = f'<meta http-equiv="refresh" content="0;url={inside}">'
    return _PLAIN.format(head=onward, body=f'<p><a href="{inside}">on to the runs</a></p>')


def wants_page(path: str, headers: Headers) -> bool:
    """True if a browser asks for a page; programs use the API."""
    return "text/html" in headers.get("accept", "") and not path.startswith("/api/")


def refused(code: int, why: str, headers: dict[str, str] | None = None) -> Response:
    """Return an error response with its reason."""
    return Response(json.dumps({"error": why}), code, headers, media_type="application/json")


def _host(header: str) -> str:
    """Return the host name of a Host header without its port, "" if invalid."""
    match = _HOST.fullmatch(header.strip().lower())
    return match["name"] or match["number"] if match else ""


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host as an IP address, None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_foreign(headers: Headers) -> bool:
    """True for cross-site requests other than navigation. Old browsers do not declare them."""
    site = headers.get("sec-fetch-site", "none")
    is_visit = headers.get("sec-fetch-mode") == "navigate"
    return site not in ("none", "same-origin") and not is_visit


def _cookie(headers: Headers, name: str) -> str:
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return cookie.value if cookie else ""
