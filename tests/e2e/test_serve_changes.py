"""`erg serve` in a real browser: what a page keeps while the list, the run or the server changes.

Focus, sort and choice of the list; the basis of a figure and why there is none; what is said of a
run that can't be read and of a server that refuses or does not answer.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import stat
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import TIMEOUT_S, Lab, eventually, script
from tests.e2e.test_serve import (
    CHROMIUM,
    WAIT_MS,
    S,
    Served,
    expect_names,
    following,  # noqa: F401  a fixture
    long_run,
    playwright_api,
    serving,  # noqa: F401  a fixture
    simple_run,
    steps,
)
from tests.runs import add_writer, even_steps, make_run

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
    pytest.mark.browser,
]

TOKEN = "correct+horse&battery#staple%41"


@pytest.fixture
def served(serving: Served) -> Served:  # noqa: F811
    """A server over an empty directory. Name it before `page`, which must go first."""
    return serving


@pytest.fixture
def page(tabs: Any) -> Iterator[Any]:
    """One that may complain: of what is gone, or refused."""
    made = tabs.new_page()
    made.set_default_timeout(WAIT_MS)
    yield made
    made.close()


def expect(found: Any) -> Any:
    return playwright_api.expect(found)


def tagged(run: Path, tag: str) -> None:
    (run / "labels.json").write_text(json.dumps({"tags": [tag], "notes": []}))


def test_the_keyboard_stays_where_it_is_when_the_list_changes(
    served: Served, lab: Lab, page: Any
) -> None:
    runs = lab.path / "runs"
    for name in ("b", "d"):
        simple_run(runs / name, name)
    page.goto(served.address + "/#sort=name&down=")
    expect(page.locator("#count")).to_have_text("2 runs")
    link, box = page.locator("#runs tbody a >> text=d"), page.get_by_label("choose d")
    link.focus()
    simple_run(runs / "a", "a")  # before it
    expect_names(page, ["a", "b", "d"])
    expect(link).to_be_focused()
    tagged(runs / "d", "keep")  # in its own row, which is made anew
    expect(page.locator("#runs tbody .tag")).to_have_text("keep")
    expect(link).to_be_focused()
    box.focus()
    shutil.rmtree(runs / "b")
    tagged(runs / "d", "another")
    expect(page.locator("#runs tbody .tag")).to_have_text("another")
    expect_names(page, ["a", "d"])
    expect(box).to_be_focused()
    head = page.locator('button[data-sort="status"]')
    head.focus()
    simple_run(runs / "e", "e")
    expect_names(page, ["a", "d", "e"])
    expect(head).to_be_focused()


def test_the_address_keeps_the_order_also_the_rising_one(
    served: Served, lab: Lab, page: Any
) -> None:
    for name in ("a", "b", "c"):
        simple_run(lab.path / "runs" / name, name)
    page.goto(served.address + "/")
    page.click('button[data-sort="name"]')
    expect_names(page, ["a", "b", "c"])
    page.reload()
    expect_names(page, ["a", "b", "c"])
    expect(page.locator('th[aria-sort="ascending"]')).to_have_text("run ▲")
    page.click('button[data-sort="name"]')
    page.reload()
    expect_names(page, ["c", "b", "a"])


def test_a_run_that_is_gone_is_chosen_no_more(served: Served, lab: Lab, page: Any) -> None:
    for name in ("a", "b", "c"):
        simple_run(lab.path / "runs" / name, name)
    page.goto(served.address + "/#sort=name&down=")
    for name in ("a", "b", "c"):
        page.get_by_label(f"choose {name}").check()
    compare = page.locator("#compare")
    expect(compare).to_have_text("compare 3 runs")
    shutil.rmtree(lab.path / "runs" / "b")
    expect(compare).to_have_text("compare 2 runs")
    ids = f"{served.id('a')},{served.id('c')}"
    expect(compare).to_have_attribute("href", f"/compare?ids={ids}")


def test_a_live_figure_shows_its_basis_and_a_missing_one_its_reason(
    served: Served, lab: Lab, page: Any
) -> None:
    """A program on a CPU that nobody meters: tokens and time there are, and no energy."""
    lab.start(*script("steady", "runs/one"))
    page.goto(f"{served.address}/run/{served.id('one')}")
    rate = page.locator(".tile", has=page.locator("dt >> text=tokens/s"))
    expect(rate.locator(".basis")).to_have_text("measured")
    expect(page.locator(".tile", has_text="loss").locator(".basis")).to_have_text("reported")
    expect(page.locator("#window")).to_contain_text("Of the newest steps: a window of")
    missing = page.locator("#no-tiles")
    expect(missing).to_contain_text("No power, energy per token: ")
    expect(missing).to_contain_text("MFU")
    so_far = page.locator("#figures .absent")
    expect(so_far.first).to_be_visible()
    told = " ".join(so_far.all_inner_texts())
    reasons = served.ask(f"/api/run/{served.id('one')}")["shown"]
    for key in ("energy.run_j", "utilization.mfu_frac"):
        assert reasons[key]["missing"] in told


def test_of_a_long_run_what_is_not_there_is_told_before_its_report(
    served: Served, lab: Lab, page: Any
) -> None:
    long_run(lab)
    page.route("**/report", lambda _route: None)  # which takes for ever
    page.goto(f"{served.address}/run/{served.id('long')}")
    absent = page.locator("#figures .absent")
    row = served.ask(f"/api/run/{served.id('long')}/row")
    why = row["readings"]["utilization.mfu_frac"]["missing"]
    expect(absent).to_have_text([f"No MFU: {why}"])


def test_a_page_becomes_the_report_also_where_the_server_did_not_answer_at_first(
    served: Served, lab: Lab, page: Any
) -> None:
    long_run(lab)
    tries: list[str] = []

    def answer(route: Any) -> None:
        tries.append(route.request.url)
        route.abort() if len(tries) == 1 else route.continue_()

    page.route("**/report", answer)
    page.goto(f"{served.address}/run/{served.id('long')}")
    page.wait_for_selector("text=How to cite")
    assert len(tries) == 2


def test_a_run_whose_writer_is_yet_to_come_is_followed(served: Served, lab: Lab, page: Any) -> None:
    run = make_run(lab.path / "runs" / "one")
    page.goto(f"{served.address}/run/{served.id('one')}")
    expect(page.locator("#state-line")).to_have_text("running")
    clock = {"monotonic_ns": 0, "wall_ns": time.time_ns() - 5 * S}
    add_writer(run, steps=even_steps(5), header={"clock": clock}, closed=False)
    eventually(lambda: page.locator("#step").count() and steps(page) == 5, "five steps")


def test_a_run_that_can_not_be_read_is_not_said_to_be_gone(
    served: Served, lab: Lab, page: Any
) -> None:
    lab.start(*script("steady", "runs/one"))
    page.goto(f"{served.address}/run/{served.id('one')}")
    eventually(lambda: page.locator("#step").count() and steps(page) > 0, "a step")
    before = steps(page)
    header = lab.path / "runs" / "one" / "run.json"
    said = header.read_text()
    header.write_text("{")
    state = page.locator("#state-line")
    expect(state).to_contain_text("the run can't be read; what is shown is the last that was seen")
    expect(state).to_contain_text("one/run.json: not JSON")
    assert steps(page) >= before
    page.reload()  # as one that has seen nothing of it
    expect(state).to_contain_text("the run can't be read (one/run.json")
    header.write_text(said)
    expect(state).to_have_text("running")


# How many of its rounds are waiting at once, and how many there were.
COUNT_ROUNDS = """
window.rounds = { most: 0, made: 0, waiting: 0 };
const later = window.setTimeout;
window.setTimeout = (act, wait) => {
  if (act.name !== "keepUp") return later(act, wait);
  rounds.most = Math.max(rounds.most, ++rounds.waiting);
  return later(() => { rounds.waiting--; rounds.made++; act(); }, wait);
};
"""


def test_a_run_that_comes_back_is_kept_up_with_once(served: Served, lab: Lab, page: Any) -> None:
    lab.start(*script("steady", "runs/one"))
    page.add_init_script(COUNT_ROUNDS)
    page.goto(f"{served.address}/run/{served.id('one')}")
    run, state = lab.path / "runs" / "one", page.locator("#state-line")
    for _ in range(2):
        expect(state).to_have_text("running")
        run.rename(lab.path / "away")
        expect(state).to_contain_text("the run's directory is gone")
        (lab.path / "away").rename(run)
    expect(state).to_have_text("running")
    made = page.evaluate("rounds.made")
    eventually(lambda: page.evaluate("rounds.made") >= made + 3, "three rounds")
    assert page.evaluate("rounds.most") == 1


def test_a_page_that_is_one_too_many_says_so_and_follows_when_there_is_room(
    served: Served, lab: Lab, page: Any
) -> None:
    lab.start(*script("steady", "runs/one"))
    run = served.id("one")
    host, port = served.address.removeprefix("http://").split(":")
    question = f"GET /api/run/{run}/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    with ExitStack() as others:
        for _ in range(512):
            other = others.enter_context(socket.create_connection((host, int(port)), TIMEOUT_S))
            other.sendall(question)
            assert other.recv(12) == b"HTTP/1.1 200"
        page.goto(f"{served.address}/run/{run}")
        state = page.locator("#state-line")
        expect(state).to_contain_text(
            "512 viewers already, and the limit is 512: close some pages."
        )
    expect(state).to_have_text("running")
    eventually(lambda: page.locator("#step").count() and steps(page) > 0, "a step")


# As so many tabs and one more: a port each, to the worker that they share.
MANY_TABS = """(tabs) => {
  const worker = document.querySelector("script[data-worker]").dataset.worker;
  window.heard = {};
  window.ports = [...Array(tabs).keys()].map((number) => {
    const { port } = new SharedWorker(worker, "erg-serve");
    port.onmessage = ({ data }) => { heard[number] = { ...heard[number], ...data }; };
    port.postMessage({ id: number.toString(16).padStart(12, "0") });
    return port;
  });
}"""


def test_a_tab_too_many_is_told_and_the_others_go_on(served: Served, page: Any) -> None:
    page.goto(served.address + "/")
    page.evaluate(MANY_TABS, 201)
    eventually(lambda: page.evaluate("heard[200]?.why"), "the reason")
    assert page.evaluate("heard[200].why").startswith("200 runs are followed at once")
    # There are no such runs, which is what the stream says of each of the first two hundred.
    told = "[...Array(200).keys()].every((number) => heard[number]?.state === 'gone')"
    eventually(lambda: page.evaluate(told), "word of the others")
    page.evaluate("ports[7].postMessage({ bye: true })")
    page.evaluate("ports[200].postMessage({ id: 'c8'.padStart(12, '0') })")
    eventually(lambda: page.evaluate("heard[200].state") == "gone", "room for the last")


def test_a_browser_without_shared_workers_follows_too(served: Served, lab: Lab, page: Any) -> None:
    lab.start(*script("steady", "runs/one"))
    page.add_init_script("delete window.SharedWorker")
    page.goto(f"{served.address}/run/{served.id('one')}")
    eventually(lambda: page.locator("#step").count() and steps(page) > 0, "a step")
    before = steps(page)
    eventually(lambda: steps(page) > before, "a step more")
    expect(page.locator("#state-line")).to_have_text("running")


def test_a_bench_whose_name_did_not_come_says_why(served: Served, lab: Lab, page: Any) -> None:
    cell = lab.path / "runs" / "matrix" / "exp_0"
    cell.mkdir(parents=True)
    (cell / "status.json").write_text('{"status": "ok"}')
    eventually(lambda: served.ask("/api/benches")["benches"], "the bench")
    bench = served.ask("/api/benches")["benches"][0]["id"]
    page.route("**/api/benches", lambda route: route.abort())
    page.goto(f"{served.address}/bench/{bench}")
    expect(page.locator("#state-line")).to_have_attribute("data-kind", "bad")


@pytest.fixture
def locked(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server with a token that means something in an address, and a browser that notes what it
    is called with."""
    simple_run(lab.path / "runs" / "one", "one")
    browser = lab.path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$*" > "{lab.path}/called"\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    server = Served(lab.path / "runs", "--token", TOKEN, "--open")
    yield server
    server.stop(signal.SIGTERM)


def test_the_printed_address_opens_whatever_the_token(locked: Served, page: Any) -> None:
    page.goto(locked.whole)
    page.wait_for_url(locked.address + "/")
    expect_names(page, ["one"])


def test_the_browser_is_opened_and_its_command_line_holds_no_token(
    locked: Served, lab: Lab, page: Any
) -> None:
    called = lab.path / "called"
    eventually(lambda: called.exists() and called.read_text(), "the browser")
    address = called.read_text()
    assert "horse" not in address
    file = Path(address.removeprefix("file://"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    page.goto(address)
    page.wait_for_url(locked.address + "/")
    expect_names(page, ["one"])
    assert locked.stop(signal.SIGTERM) == ""
    assert not file.parent.exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_bound_to_every_address_the_printed_one_answers(lab: Lab, host: str) -> None:
    if host == "::" and not _has_version_6():
        pytest.skip("no IPv6 here")
    simple_run(lab.path / "runs" / "one", "one")
    server = Served(lab.path / "runs", "--host", host)
    with urllib.request.urlopen(server.whole, timeout=TIMEOUT_S) as answer:
        assert answer.status == 200
    assert socket.gethostname() not in server.address
    assert server.stop() == ""


def _has_version_6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as asked:
            asked.bind(("::", 0))
    except OSError:
        return False
    return True
