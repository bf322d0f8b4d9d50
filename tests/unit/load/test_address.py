"""Which server a URL means, and whether it is on this machine."""

from __future__ import annotations

import socket

import pytest

from ergmeter.errors import UsageError
from ergmeter.load.client import Endpoint, address, why_remote


@pytest.mark.parametrize(
    ("url", "endpoint", "whole"),
    [
        ("http://localhost:8000", "chat", "http://localhost:8000/v1/chat/completions"),
        ("localhost:8000", "chat", "http://localhost:8000/v1/chat/completions"),
        ("http://localhost:8000/", "completions", "http://localhost:8000/v1/completions"),
        ("http://localhost:8000/v1", "chat", "http://localhost:8000/v1/chat/completions"),
        ("https://h/api/v1/", "chat", "https://h/api/v1/chat/completions"),
        ("https://h/v1/chat/completions", "chat", "https://h/v1/chat/completions"),
        ("http://[::1]:8000", "chat", "http://[::1]:8000/v1/chat/completions"),
        ("http://h:80/v1", "completions", "http://h/v1/completions"),
        ("https://h/v1?version=2", "chat", "https://h/v1/chat/completions?version=2"),
    ],
)
def test_a_base_url_leads_to_its_endpoint(url: str, endpoint: Endpoint, whole: str) -> None:
    assert address(url, endpoint).url == whole


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host", "not a server's URL"),
        ("http://", "not a server's URL"),
        ("http://host:port", "is not a URL"),
        ("http://host:99999", "is not a URL"),
        ("http://ho st", "percent-encode blanks"),
        ("http://hôte/v1", "percent-encode blanks"),
        ("http://me:secret@host", "--api-key-env"),
        ("http://[::1", "is not a URL"),
        ("http://h/v1/completions", "make them agree"),
    ],
)
def test_what_is_no_url_of_a_server_is_a_mistake_of_use(url: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        address(url, "chat")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.3.2.1", "::1"])
def test_a_loopback_address_is_this_machine(host: str) -> None:
    assert why_remote(host) == ""


def test_this_machines_own_address_is_this_machine() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of a datagram socket: nothing is sent
        except OSError:
            pytest.skip("no route out: this machine has no address of its own")
        own = probe.getsockname()[0]
    assert why_remote(own) == ""


def test_another_machine_is_named_with_its_address() -> None:
    # 192.0.2.0/24 is set aside for documentation (RFC 5737): it is nobody's.
    assert why_remote("192.0.2.1") == "the server is not on this machine (192.0.2.1 is 192.0.2.1)"


def test_a_name_without_an_address_is_not_this_machine() -> None:
    assert "nowhere.invalid has no address" in why_remote("nowhere.invalid")
