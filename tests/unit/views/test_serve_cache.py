"""What is kept between questions, and one look for all who watch."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ergmeter.errors import FormatError
from ergmeter.views.serve import tail as tails
from ergmeter.views.serve.app_state import AnswerCache
from ergmeter.views.serve.folder import Folder, ServedItem
from ergmeter.views.serve.pool import Pool
from ergmeter.views.serve.tail import Tails, TooManyError
from tests.unit.views.serving import a_run, client, ids


class Counted:
    """Says how often it was asked."""

    def __init__(self, size: int = 1) -> None:
        self.times = 0
        self._size = size

    async def __call__(self) -> bytes:
        self.times += 1
        await asyncio.sleep(0.01)
        return str(self.times).encode() * self._size


def test_a_question_that_many_ask_at_once_is_answered_once() -> None:
    async def ask() -> tuple[list[bytes], int]:
        kept, make = AnswerCache(), Counted()
        said = await asyncio.gather(*(kept.answer("q", "s", make) for _ in range(50)))
        return said, make.times

    assert asyncio.run(ask()) == ([b"1"] * 50, 1)


def test_an_answer_holds_until_the_files_change_and_a_while_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ergmeter.views.serve.app_state._SHORTEST_S", 60.0)
    monkeypatch.setattr("ergmeter.views.serve.app_state._PATIENCE", 0.0)

    async def ask() -> list[bytes]:
        kept, make = AnswerCache(), Counted()
        said = [await kept.answer("q", "one", make), await kept.answer("q", "two", make)]
        monkeypatch.setattr("ergmeter.views.serve.app_state._SHORTEST_S", 0.0)  # it has passed
        return [*said, await kept.answer("q", "one", make), await kept.answer("q", "two", make)]

    assert asyncio.run(ask()) == [b"1", b"1", b"1", b"2"]


def test_what_is_kept_is_bounded_and_the_least_used_goes() -> None:
    async def ask() -> tuple[int, int]:
        kept, make = AnswerCache(most_bytes=1000), Counted(size=300)
        for number in range(20):
            await kept.answer(str(number), "s", make)
        before = make.times
        await kept.answer("19", "s", make)
        return kept.size_bytes, make.times - before

    size, again = asyncio.run(ask())
    assert size <= 1000
    assert again == 0


def test_who_goes_away_does_not_take_the_answer_with_him() -> None:
    async def ask() -> bytes:
        kept, make = AnswerCache(), Counted()
        impatient = asyncio.create_task(kept.answer("q", "s", make))
        await asyncio.sleep(0)
        other = asyncio.create_task(kept.answer("q", "s", make))
        await asyncio.sleep(0)
        impatient.cancel()
        return await other

    assert asyncio.run(ask()) == b"1"


def test_a_failure_is_told_and_not_kept() -> None:
    async def fails() -> bytes:
        raise FormatError("no run")

    async def ask() -> bytes:
        kept = AnswerCache()
        with pytest.raises(FormatError):
            await kept.answer("q", "s", fails)
        return await kept.answer("q", "s", Counted())

    assert asyncio.run(ask()) == b"1"


def test_a_worker_that_dies_costs_its_question_and_no_more(tmp_path: Path) -> None:
    a_run(tmp_path / "one")

    async def ask() -> bytes:
        pool = Pool()
        try:
            with pytest.raises(FormatError, match="the process that read it died"):
                await pool.ask("os._exit", 1)  # nothing of ours is called so: see below
            return await pool.ask("row", str(tmp_path / "one"), str(tmp_path))
        finally:
            pool.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ergmeter.views.serve.pool._answer", _dies_or_answers)
        assert b'"finished"' in asyncio.run(ask())


def _dies_or_answers(name: str, *arguments: object) -> bytes:
    import os

    from ergmeter.views.serve import pool

    if name == "os._exit":
        os._exit(9)
    return pool._answer(name, *arguments)


def test_fifty_who_watch_one_run_share_one_look(tmp_path: Path) -> None:
    a_run(tmp_path / "one", closed=False)
    folder = Folder(tmp_path)
    place = folder.items("run")[0]

    async def watch() -> tuple[list[list[bytes]], int, dict[str, int]]:
        all_tails = Tails(folder)

        async def one() -> list[bytes]:
            async with all_tails.watch([place]) as listener:
                seen = await listener.next(20.0)
                await asyncio.sleep(0.2)
                return seen

        watching = [asyncio.create_task(one()) for _ in range(50)]
        await asyncio.sleep(0.05)
        tail = all_tails._tails[place.id]
        seen = await asyncio.gather(*watching)
        return seen, tail.looks, all_tails.watching

    seen, looks, left = asyncio.run(watch())
    assert len(seen) == 50
    assert len({tuple(one) for one in seen}) == 1
    assert looks < 25  # one a second, however long it takes; each on its own would be 50
    assert left == {}


def test_a_run_is_looked_at_when_its_files_have_grown_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "_LOOK_S", 0.01)
    monkeypatch.setattr(tails, "_GLANCE_S", 0.01)
    monkeypatch.setattr(tails, "_ANYWAY_S", 3600.0)
    monkeypatch.setattr("ergmeter.views.serve.folder._STAMP_AGE_S", 0.0)
    run = a_run(tmp_path / "one", closed=False)
    folder = Folder(tmp_path)
    place = folder.items("run")[0]
    glances: list[str] = []

    def stamped(one: ServedItem) -> str:
        glances.append(Folder.stamp(folder, one))
        return glances[-1]

    monkeypatch.setattr(folder, "stamp", stamped)

    async def watch() -> tuple[int, int]:
        every = Tails(folder)

        async def glanced(more: int) -> None:
            wanted = len(glances) + more
            for _ in range(6000):
                if len(glances) >= wanted:
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("nobody looks at the files")

        async with every.watch([place]) as listener:
            await listener.next(60.0)
            tail = every._tails[place.id]
            await glanced(20)
            before = tail.looks
            (run / "more.txt").write_text("a file more")
            await glanced(20)
            return before, tail.looks

    assert asyncio.run(watch()) == (1, 2)


def test_more_than_so_many_may_not_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "MOST_LISTENERS", 2)
    a_run(tmp_path / "one")
    folder = Folder(tmp_path)
    places = folder.items("run")

    async def watch() -> None:
        every = Tails(folder)
        async with every.watch(places), every.watch(places), every.watch(places):
            pass

    with pytest.raises(TooManyError, match="2 viewers already, and the limit is 2"):
        asyncio.run(watch())


def test_who_is_one_too_many_is_told_with_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "MOST_LISTENERS", 0)
    a_run(tmp_path / "one")
    with client(tmp_path) as app:
        one = ids(app)["one"]
        for address in (f"/api/run/{one}/events", f"/api/events?ids={one}"):
            answer = app.get(address)
            assert answer.status_code == 503
            assert (
                answer.json()["error"] == "0 viewers already, and the limit is 0: close some pages"
            )


def test_more_runs_than_a_stream_may_have_are_refused(tmp_path: Path) -> None:
    a_run(tmp_path / "one")
    with client(tmp_path) as app:
        answer = app.get("/api/events?ids=" + ",".join([f"{n:012x}" for n in range(201)]))
    assert answer.status_code == 400
    assert answer.json()["error"] == "ids= has 201 values; at most 200"


def test_an_error_of_ours_comes_back_from_a_worker_as_it_is(tmp_path: Path) -> None:
    async def ask() -> None:
        pool = Pool(lambda: ThreadPoolExecutor(1))
        await pool.ask("row", str(tmp_path / "none"), str(tmp_path))

    with pytest.raises(FormatError, match="does not exist"):
        asyncio.run(ask())


def test_a_pool_that_is_closed_leaves_no_thread_behind(tmp_path: Path) -> None:
    """One that minds the workers would be woken at the interpreter's end, while it goes."""
    before = set(threading.enumerate())

    async def ask() -> list[threading.Thread]:
        pool = Pool()
        asked = asyncio.ensure_future(pool.ask("row", str(tmp_path / "none"), str(tmp_path)))
        await asyncio.gather(asked, return_exceptions=True)
        pool.close()
        return [one for one in threading.enumerate() if one not in before and one.is_alive()]

    assert asyncio.run(ask()) == []
