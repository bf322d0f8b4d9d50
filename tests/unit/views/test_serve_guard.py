"""Who may ask `erg serve`, and what a browser may do with the answer."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ergmeter.errors import UsageError
from ergmeter.views.serve.app import ListenAddress, _onward
from ergmeter.views.serve.folder import Folder
from ergmeter.views.serve.guard import Access
from tests.unit.views.serving import a_run, client, ids

TOKEN = "correct-horse-battery"


@pytest.fixture
def app(tmp_path: Path) -> Iterator[TestClient]:
    a_run(tmp_path / "runs" / "one")
    with client(tmp_path / "runs") as made:
        yield made


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[TestClient]:
    a_run(tmp_path / "runs" / "one")
    with client(tmp_path / "runs", Access(token=TOKEN)) as made:
        yield made


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost:1", 200),
        ("LOCALHOST", 200),
        ("[::1]:8000", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:8000", 421),
        ("[::1].evil.example", 421),
        ("127.0.0.1:80:80", 421),
        ("", 421),
    ],
)
def test_only_our_own_names_are_answered(app: TestClient, host: str, code: int) -> None:
    assert app.get("/api/runs", headers={"host": host}).status_code == code


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_reading_is_allowed(app: TestClient, method: str) -> None:
    assert app.request(method, "/api/runs").status_code == 405


def test_a_body_and_a_long_address_are_refused(app: TestClient) -> None:
    assert app.request("GET", "/api/runs", content=b"x" * 10).status_code == 413
    assert app.get("/api/compare?ids=" + "a" * 9000).status_code == 414


def test_a_page_from_elsewhere_may_link_to_ours_and_read_nothing(app: TestClient) -> None:
    foreign = {"sec-fetch-site": "cross-site"}
    assert app.get("/api/runs", headers={**foreign, "sec-fetch-mode": "cors"}).status_code == 403
    assert app.get("/", headers={**foreign, "sec-fetch-mode": "navigate"}).status_code == 200
    answer = app.get("/api/runs", headers={"origin": "http://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("address", ["/", "/api/runs", "/nothing", "/api/run/000000000000"])
def test_every_answer_says_what_a_browser_may_do_with_it(app: TestClient, address: str) -> None:
    headers = app.get(address).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe-eval" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_without_the_token_nothing_is_told(locked: TestClient) -> None:
    for address in ("/", "/api/runs", "/static/x.js", f"/?token={TOKEN}x", "/?token=", "/nothing"):
        answer = locked.get(address)
        assert answer.status_code == 401, address
        assert "set-cookie" not in answer.headers
    assert locked.get("/", headers={"authorization": "Bearer nonsense"}).status_code == 401
    assert locked.get("/", headers={"cookie": f"erg_x={TOKEN}"}).status_code == 401


def test_the_token_is_taken_once_and_a_cookie_given_for_it(locked: TestClient) -> None:
    first = locked.get(f"/compare?ids=a&token={TOKEN}")
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert TOKEN not in first.text
    assert 'url=/compare?ids=a"' in first.text
    assert locked.get("/api/runs").status_code == 200


def test_the_token_is_also_taken_as_a_header(locked: TestClient) -> None:
    answer = locked.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200


def test_the_way_on_after_the_token_leads_nowhere_else(locked: TestClient) -> None:
    answer = locked.get(f"http://127.0.0.1:8000//evil.example/?token={TOKEN}")
    assert "url=/evil.example/" in answer.text
    assert "//evil" not in answer.text


@pytest.mark.parametrize("sign", ["%09", "%0A", "%0d", "%00", "%7f"])
def test_control_characters_in_an_address_are_refused(locked: TestClient, sign: str) -> None:
    # A browser drops a tab: what is left of "/<tab>/evil.example/" is another host.
    answer = locked.get(f"/{sign}/evil.example/?token={TOKEN}")
    assert answer.status_code == 404
    assert "evil" not in answer.text
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    ("host", "has_token"),
    [
        ("127.0.0.1", False),
        ("localhost", False),
        ("::1", False),
        ("0.0.0.0", True),
        ("10.1.2.3", True),
    ],
)
def test_an_address_that_others_can_reach_has_a_token(host: str, has_token: bool) -> None:
    access = ListenAddress(host).access()
    assert (access.token is not None) == has_token
    assert host in access.hosts or host == "0.0.0.0"
    if access.token:
        assert len(access.token) >= 32
        assert access.token != ListenAddress(host).access().token


def test_a_short_token_is_refused() -> None:
    with pytest.raises(UsageError, match="5 characters; it needs 16"):
        ListenAddress(token="short").access()


@pytest.mark.parametrize(
    "path",
    [
        "/api/run/..%2f..%2fetc%2fpasswd",
        "/api/run/../../etc/passwd",
        "/api/ledger/%2e%2e%2fledger",
        "/static/..%2f..%2fguard.py",
        "/static/app-0000000000000000.js",
        "/run/%00",
        "/api/run/" + "a" * 500,
    ],
)
def test_a_path_in_an_address_is_nothing(app: TestClient, path: str) -> None:
    answer = app.get(path)
    assert answer.status_code == 404
    assert "root:" not in answer.text


def test_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    outside = a_run(tmp_path / "outside" / "secret")
    root = tmp_path / "runs"
    inside = a_run(root / "one")
    (root / "away").symlink_to(outside)
    (root / "up").symlink_to(tmp_path)
    folder = Folder(root)
    assert [place.name for place in folder.items("run")] == ["one"]
    assert sorted(folder.left_out) == [
        "away: a link; links are not followed",
        "up: a link; links are not followed",
    ]
    (inside / "writer").symlink_to(next(outside.glob("*/writer.json")).parent)
    with client(root) as app:
        answer = app.get(f"/api/run/{ids(app)['one']}")
    assert answer.status_code == 422
    assert answer.json() == {"error": "one: the link writer leads out of the directory"}


def test_packed_runs_are_left_out_with_the_way_to_have_them(tmp_path: Path) -> None:
    a_run(tmp_path / "one")
    for name in ("a.zip", "b.tar.gz", "c.tgz", "d.zip"):
        (tmp_path / "away").mkdir(exist_ok=True)
        (tmp_path / "away" / name).touch()
    folder = Folder(tmp_path)
    assert [place.name for place in folder.items("run")] == ["one"]
    assert folder.left_out == [
        "away/a.zip, away/b.tar.gz, away/c.tgz, ...: packed, so not shown;"
        " `erg runs unpack FILE` unpacks a run"
    ]


def test_no_answer_tells_where_the_directory_lies(app: TestClient, tmp_path: Path) -> None:
    one = ids(app)["one"]
    others = f"/api/compare?ids={one},{one}"
    for address in (f"/api/run/{one}", f"/run/{one}/report", others, "/api/runs"):
        answer = app.get(address)
        assert answer.status_code == 200
        assert str(tmp_path) not in answer.text


def test_an_id_is_of_a_place_and_not_of_what_a_run_says(tmp_path: Path) -> None:
    a_run(tmp_path / "a", "same")
    a_run(tmp_path / "b", "same")
    found = Folder(tmp_path).items("run")
    assert len({place.id for place in found}) == 2
    assert [place.id for place in Folder(tmp_path).items("run")] == [place.id for place in found]


def test_a_name_that_is_no_text_is_listed(tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "fine")
    (tmp_path / "runs" / "fine").rename(tmp_path / "runs" / os.fsdecode(b"\xff\xfe"))
    with client(tmp_path / "runs") as app:
        rows = app.get("/api/runs").json()["runs"]
        assert json.dumps(rows)
        assert len(rows) == 1


def test_packed_runs_are_named_also_where_there_are_too_many_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ergmeter.views.serve.folder._MOST_DIRECTORIES", 3)
    (tmp_path / "one.zip").touch()
    for number in range(5):
        (tmp_path / f"{number}").mkdir()
    folder = Folder(tmp_path)
    folder.items("run")
    assert [said.partition(":")[0] for said in folder.left_out] == [
        "more than 3 directories",
        "one.zip",
    ]


def test_a_browser_without_the_token_is_told_in_a_page(locked: TestClient) -> None:
    answer = locked.get("/", headers={"accept": "text/html"})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "<p>a token is needed: open the address that erg serve printed" in answer.text
    told = locked.get("/api/runs", headers={"accept": "text/html"})
    assert told.json()["error"].startswith("a token is needed")


@pytest.mark.parametrize("any_address", ["0.0.0.0", "::", "::0"])
def test_bound_to_every_address_it_is_asked_by_each_of_them_and_by_no_other_name(
    tmp_path: Path, any_address: str
) -> None:
    """A name can be made to mean this machine; an address is what it is."""
    a_run(tmp_path / "runs" / "one")
    access = ListenAddress(any_address, token=TOKEN).access()
    said = {"authorization": f"Bearer {TOKEN}"}
    with client(tmp_path / "runs", access) as app:
        for host in ("10.1.2.3:8000", "[fd00::7]:8000", "127.0.0.1", socket.gethostname()):
            answer = app.get("/api/runs", headers={**said, "host": host})
            assert answer.status_code == 200, host
        for host in ("evil.example", "10.1.2.3.evil.example", "10.1.2", "0x7f.1", "[10.1.2.3"):
            answer = app.get("/api/runs", headers={**said, "host": host})
            assert answer.status_code == 421, host


def test_bound_to_one_address_it_is_asked_by_no_other(tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "one")
    access = ListenAddress("10.1.2.3", token=TOKEN).access()
    said = {"authorization": f"Bearer {TOKEN}"}
    with client(tmp_path / "runs", access) as app:
        codes = [
            app.get("/api/runs", headers={**said, "host": host}).status_code
            for host in ("10.1.2.3:80", "10.1.2.4:80")
        ]
    assert codes == [200, 421]


def test_the_browser_is_led_on_by_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    address = "http://10.1.2.3:8000/?token=a%2Bb&x=<y>"
    page = Path(_onward(tmp_path, address).removeprefix("file://"))
    assert page.stat().st_mode & 0o777 == 0o600
    assert "url=http://10.1.2.3:8000/?token=a%2Bb&amp;x=&lt;y&gt;" in page.read_text()
