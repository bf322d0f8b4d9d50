"""Runs that lead out of the directory or can't be read: told so, and not read again and again."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ergmeter.errors import FormatError
from ergmeter.views.serve import app_state, responses
from ergmeter.views.serve import tail as tails
from ergmeter.views.serve.app_state import AnswerCache, AppState, RunListing
from ergmeter.views.serve.folder import Folder, ServedItem
from ergmeter.views.serve.live import LiveLook
from ergmeter.views.serve.tail import Tails
from tests.unit.views.serving import a_run, client, ids


def led_out(tmp_path: Path) -> tuple[Folder, ServedItem]:
    """A run with a writer that is a link to the writer of a run elsewhere."""
    outside = a_run(tmp_path / "outside" / "secret", closed=False)
    inside = a_run(tmp_path / "runs" / "one", closed=False)
    (inside / "writer").symlink_to(next(outside.glob("*/writer.json")).parent)
    folder = Folder(tmp_path / "runs")
    return folder, folder.items("run")[0]


def test_who_watches_a_run_that_leads_out_is_told_so_and_no_more(tmp_path: Path) -> None:
    folder, place = led_out(tmp_path)

    async def watch() -> list[bytes]:
        async with Tails(folder).watch([place]) as listener:
            return await listener.next(20.0)

    (seen,) = map(json.loads, asyncio.run(watch()))
    assert seen["state"] == "unreadable"
    assert seen["why"] == "one: the link writer leads out of the directory"
    assert seen["readings"] == {}


def test_a_link_made_while_somebody_watches_ends_what_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "_SLOW_S", 0.1)
    outside = a_run(tmp_path / "outside" / "secret")
    inside = a_run(tmp_path / "runs" / "one")
    folder = Folder(tmp_path / "runs")
    place = folder.items("run")[0]

    async def watch() -> list[str]:
        async with Tails(folder).watch([place]) as listener:
            before = await listener.next(20.0)
            (inside / "writer").symlink_to(next(outside.glob("*/writer.json")).parent)
            return [json.loads(one)["state"] for one in (*before, *await listener.next(20.0))]

    assert asyncio.run(watch()) == ["finished", "unreadable"]


def test_the_state_of_a_run_that_leads_out_is_not_told(tmp_path: Path) -> None:
    folder, place = led_out(tmp_path)
    with pytest.raises(FormatError, match="leads out of the directory"):
        asyncio.run(AppState(folder).state(place))


def test_a_run_that_became_a_link_itself_is_refused(tmp_path: Path) -> None:
    outside = a_run(tmp_path / "outside")
    one = a_run(tmp_path / "runs" / "one")
    folder = Folder(tmp_path / "runs")
    (place,) = folder.items("run")
    one.rename(tmp_path / "away")
    one.symlink_to(outside)
    with pytest.raises(FormatError, match="one leads out of the directory"):
        folder.stamp(place)


def test_a_directory_that_may_not_be_entered_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path / "fine")
    (tmp_path / "locked").mkdir()
    stat = Path.stat

    # Root may enter everything: the refusal is the system's, told by hand.
    def refusing(path: Path, **more: Any) -> Any:
        if path.parent.name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", refusing)
    assert [place.name for place in Folder(tmp_path).items("run")] == ["fine"]


def test_links_in_a_circle_make_a_run_unreadable_and_nothing_more(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one")
    (one / "a").symlink_to(one / "b")
    (one / "b").symlink_to(one / "a")
    folder = Folder(tmp_path)
    with pytest.raises(FormatError, match="one"):
        folder.stamp(folder.items("run")[0])


def rounds(listing: RunListing, folder: Folder, count: int) -> None:
    async def go() -> None:
        for _ in range(count):
            folder._stamps.clear()
            await listing._round()

    asyncio.run(go())


@pytest.mark.parametrize("failure", [FormatError("damaged"), KeyError("odd")])
def test_a_run_that_fails_is_read_again_only_when_its_files_change(
    tmp_path: Path, failure: Exception
) -> None:
    one = a_run(tmp_path / "one")
    folder = Folder(tmp_path)
    (place,) = folder.items("run")
    asked = []

    async def read(*_what: object, **_more: object) -> bytes:
        asked.append(1)
        raise failure

    listing = RunListing(folder, read)
    rounds(listing, folder, 3)
    assert len(asked) == 1
    assert listing.row(place)["status"] == "unreadable"
    (one / "more.txt").write_text("x")
    rounds(listing, folder, 2)
    assert len(asked) == 2


def test_a_run_is_read_again_when_its_link_is_gone(tmp_path: Path) -> None:
    one = a_run(tmp_path / "runs" / "one")
    folder = Folder(tmp_path / "runs")
    (place,) = folder.items("run")

    async def read(*_what: object, **_more: object) -> bytes:
        return json.dumps({"status": "finished"}).encode()

    listing, said = RunListing(folder, read), []
    link = one / "out"
    for has_link in (False, True, False):
        link.symlink_to(tmp_path) if has_link else link.unlink(missing_ok=True)
        rounds(listing, folder, 1)
        said.append(listing.row(place)["status"])
    assert said == ["finished", "unreadable", "finished"]


def test_a_round_that_fails_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_state, "_ROUND_S", 0.01)
    a_run(tmp_path / "one")
    tries = []

    class Failing(Folder):
        def items(self, kind: Any) -> list[ServedItem]:
            tries.append(1)
            if len(tries) == 1:
                raise PermissionError(13, "Permission denied")
            return super().items(kind)

    folder = Failing(tmp_path)

    async def read(*_what: object, **_more: object) -> bytes:
        return json.dumps({"status": "finished"}).encode()

    async def go() -> int:
        listing = RunListing(folder, read)
        listing.start()
        for _ in range(6000):
            await asyncio.sleep(0.01)
            if listing._rows:
                break
        listing.stop()
        return len(listing._rows)

    assert asyncio.run(go()) == 1


def test_readings_of_a_long_run_do_not_hold_up_the_short_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_state, "_LONG_BYTES", 0)
    a_run(tmp_path / "one")
    with client(tmp_path) as app:
        pool = app.app._app.state.shared.pool
        lanes, ask = [], pool.ask

        async def noted(name: str, *arguments: object, lane: str) -> bytes:
            lanes.append((name, lane))
            return bytes(await ask(name, *arguments, lane=lane))

        monkeypatch.setattr(pool, "ask", noted)
        assert app.get(f"/api/run/{ids(app)['one']}/series").status_code == 200
    assert [lane for name, lane in lanes if name == "series"] == ["long"]


def test_under_the_root_of_all_paths_texts_stay_as_they_are(tmp_path: Path) -> None:
    folder = Folder(Path("/"))
    assert (
        folder.relative("see https://a.example/b and /tmp/x")
        == "see https://a.example/b and /tmp/x"
    )
    assert (
        responses._packed_json({"at": "https://a.example/b"}, "/")
        == b'{"at": "https://a.example/b"}'
    )
    assert responses._packed_json({"at": f"{tmp_path}/x"}, str(tmp_path)) == b'{"at": "x"}'


def test_a_look_that_fails_is_told_and_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "_SLOW_S", 0.05)
    a_run(tmp_path / "one")
    folder = Folder(tmp_path)
    now, looks = LiveLook.now, []

    def failing(look: LiveLook) -> dict[str, Any]:
        looks.append(1)
        if len(looks) == 1:
            raise KeyError("odd")
        return now(look)

    monkeypatch.setattr(LiveLook, "now", failing)

    async def watch() -> list[dict[str, Any]]:
        async with Tails(folder).watch(folder.items("run")) as listener:
            both = [*await listener.next(20.0), *await listener.next(20.0)]
            return [json.loads(one) for one in both]

    first, second = asyncio.run(watch())
    assert (first["state"], first["why"]) == (
        "unreadable",
        "reading the run failed: KeyError('odd')",
    )
    assert second["state"] == "finished"


def test_a_run_with_a_pipe_in_it_is_told_and_holds_up_nobody(tmp_path: Path) -> None:
    """Whoever opened it would wait until somebody writes."""
    os.mkfifo(a_run(tmp_path / "odd") / "labels.json")
    a_run(tmp_path / "fine")
    with client(tmp_path) as app:
        answer = app.get(f"/api/run/{ids(app)['odd']}")
        assert answer.status_code == 422
        assert answer.json()["error"] == "odd/labels.json is a pipe, which is not read"
        assert app.get(f"/api/run/{ids(app)['fine']}/row").json()["status"] == "finished"


def test_a_run_that_two_read_at_once_is_listed(tmp_path: Path) -> None:
    """A page of it asks while the list is filled; it goes on, so that no stamp of it is kept."""
    a_run(tmp_path / "one")
    folder = Folder(tmp_path)
    (place,) = folder.items("run")

    async def read(*_what: object, **_more: object) -> bytes:
        await asyncio.sleep(0.01)
        return json.dumps({"status": "running"}).encode()

    async def go() -> list[object]:
        listing = RunListing(folder, read)
        both = (listing._read(place), listing._read(place))
        return list(await asyncio.gather(*both, return_exceptions=True))

    assert asyncio.run(go()) == [None, None]


def test_the_head_of_a_damaged_run_is_of_the_one_that_is_there(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one", "first")
    folder = Folder(tmp_path)
    (place,) = folder.items("run")

    async def read(*_what: object, **_more: object) -> bytes:
        raise FormatError("damaged")

    listing = RunListing(folder, read)
    assert listing.row(place)["title"] == "first"
    shutil.rmtree(one)
    a_run(one, "second")
    rounds(listing, folder, 1)
    assert listing.row(place)["title"] == "second"


def test_what_changes_after_the_end_is_listed_however_soon(tmp_path: Path) -> None:
    """A tag, say: what was answered a moment before is not taken for an answer of now."""
    one = a_run(tmp_path / "one")
    folder, kept = Folder(tmp_path), AnswerCache()
    (place,) = folder.items("run")

    async def made() -> bytes:
        return json.dumps({"status": "finished", "size": len(list(one.iterdir()))}).encode()

    async def read(_what: str, place: ServedItem, *, state: str) -> bytes:
        return await kept.answer(state, folder.stamp(place), made)

    listing, sizes = RunListing(folder, read), []
    for name in "abc":
        (one / name).touch()
        rounds(listing, folder, 1)
        sizes.append(listing.row(place)["size"])
    assert sizes == [sizes[0], sizes[0] + 1, sizes[0] + 2]
