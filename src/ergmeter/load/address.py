"""Which server is meant, and is it on this machine?

The trap: joules of the wrong machine. A client in one building and a server in another make a fine
figure for J/token, of the client's idle GPU. Devices are read only where the server's name resolves
to this machine. A tunnel on a local port looks the same as a server: `--no-energy` is for that.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from ergmeter.errors import UsageError

Endpoint = Literal["chat", "completions"]
_PATHS: dict[str, str] = {"chat": "/chat/completions", "completions": "/completions"}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where requests go."""

    host: str
    port: int
    path: str
    is_tls: bool

    @property
    def authority(self) -> str:
        """Host and port as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.is_tls else 80
        return host if self.port == usual else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The whole address."""
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.path}"


def address(url: str, endpoint: Endpoint) -> ServerAddress:
    """The address of an endpoint below a base URL, with or without its /v1. UsageError if none."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{url!r} is no URL ({error}); give http://HOST:PORT") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is no URL of a server; give http://HOST:PORT or https://HOST")
    if parts.username or parts.password:
        raise UsageError("a URL with a password would be kept in the run; use --api-key-env")
    if not url.isascii() or any(character.isspace() for character in url):
        raise UsageError(f"{url!r} is no URL: write blanks and other alphabets as %20 and the like")
    is_tls = parts.scheme == "https"
    path = _path(parts.path, endpoint) + (f"?{parts.query}" if parts.query else "")
    return ServerAddress(parts.hostname, port or (443 if is_tls else 80), path, is_tls)


def _path(path: str, endpoint: Endpoint) -> str:
    path = path.rstrip("/")
    if path.endswith(_PATHS[endpoint]):
        return path
    if any(path.endswith(other) for other in _PATHS.values()):
        raise UsageError(f"the URL ends in {path!r}, but --endpoint is {endpoint}; make them agree")
    return f"{path or '/v1'}{_PATHS[endpoint]}"


def elsewhere(host: str) -> str:
    """Why a server's devices can't be read here; empty if its name leads to this machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"{host} has no address ({error.strerror or error})"
    addresses = {str(entry[4][0]).partition("%")[0] for entry in found}
    own = _own_addresses()
    foreign = sorted(
        a for a in addresses if not ipaddress.ip_address(a).is_loopback and a not in own
    )
    if not foreign:
        return ""
    return f"the server is not on this machine ({host} is {', '.join(foreign)})"


def _own_addresses() -> set[str]:
    import psutil  # noqa: PLC0415

    return {
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
