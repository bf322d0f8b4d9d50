"""Sinks get every update, or the run says why not; training never waits for one of them."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ergmeter import Meter, Run, UsageError, registry
from ergmeter.meter import sink_feed
from ergmeter.records import Reading

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ergmeter.ports import Update


class Kept:
    """A sink that keeps what it is given, and may be told to fail."""

    def __init__(self, name: str = "kept", fail: Callable[[int], object] | None = None) -> None:
        self.name = name
        self.updates: list[Update] = []
        self.calls = 0
        self.closed = False
        self.threads: set[str] = set()
        self._fail = fail

    def write(self, update: Update) -> None:
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        if self._fail is not None:
            self._fail(self.calls)
        self.updates.append(update)

    def close(self) -> None:
        self.closed = True


def trained(path: Path, *sinks: object, steps: int = 30, **options: Any) -> dict[str, list[str]]:
    """A loop of ten-millisecond steps with these sinks; the marks that it left, by name."""
    options = {"probes": (), "sinks_every_s": 0.1, **options}
    with Meter(path, sinks=sinks, **options) as meter:  # type: ignore[arg-type]
        for _ in range(steps):
            with meter.step(tokens=100) as step:
                time.sleep(0.01)
                step.loss = 2.5
    marks: dict[str, list[str]] = {}
    for mark in Run.open(path).marks:
        marks.setdefault(mark.name, []).append(mark.detail)
    return marks


def tokens_in(update: Update) -> float:
    found = update.summary.readings["tokens.total"]
    assert isinstance(found, Reading)
    return found.value


def down_twice(call: int) -> None:
    if call <= 2:
        raise ConnectionError("refused")


def always_down(_call: int) -> None:
    raise ConnectionError("refused")


def test_updates_hold_every_step_once_and_the_last_is_of_the_whole_run(tmp_path: Path) -> None:
    sink = Kept()
    trained(tmp_path / "run", sink, warmup_steps=0)  # a slow first step would be warm-up
    *updates, last = sink.updates
    assert sum(map(tokens_in, updates)) == 3000
    assert last.is_final
    assert not any(update.is_final for update in updates)
    assert tokens_in(last) == 3000
    assert [u.step for u in updates] == sorted(u.step for u in updates)
    assert last.step == 30
    assert abs(last.wall_s - time.time()) < 60
    assert sink.closed
    assert sink.threads == {"ergmeter-sink-kept"}


def test_a_sink_that_fails_is_offered_the_same_update_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_feed, "_RETRY_S", (0.01,))
    monkeypatch.setattr(sink_feed, "_RETRY_LAST_S", 0.01)
    sink = Kept(fail=down_twice)
    marks = trained(tmp_path / "run", sink)
    assert marks["sink_failed"] == ["kept: ConnectionError: refused; trying again"]
    assert marks["sink_recovered"] == ["kept: after 2 failures"]
    assert sum(tokens_in(u) for u in sink.updates if not u.is_final) == 3000


def test_one_sink_for_which_there_is_no_hope_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_feed, "STOP_S", 1.0)
    monkeypatch.setattr(sink_feed, "_RETRY_LAST_S", 0.05)

    def refuses(_call: int) -> None:
        raise UsageError("no such project: 'x'")

    good, bad, down = Kept("good"), Kept("bad", refuses), Kept("down", always_down)
    marks = trained(tmp_path / "run", bad, down, good)
    # Of 3000, but for the last where the end did not wait for that either.
    assert 0 < sum(tokens_in(u) for u in good.updates if not u.is_final) <= 3000
    assert "bad: no such project: 'x'" in marks["sink_failed"]
    assert bad.calls == 1
    assert any(
        said.startswith("down: had not finished when the program ended;")
        for said in marks["sink_failed"]
    )


def test_a_factory_that_makes_no_sink_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(registry, "load", lambda _kind, _name: calls.append)
    trained(tmp_path / "run", "console")
    assert len(calls) == 1


def test_a_sink_whose_library_is_missing_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "ergmeter.sinks.prometheus", raising=False)
    marks = trained(tmp_path / "run", "prometheus")
    [said] = marks["sink_failed"]
    assert said.startswith("prometheus: ")
    assert "pip install 'ergmeter[prometheus]'" in said


def test_a_sink_that_blocks_holds_up_neither_the_steps_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_feed, "STOP_S", 0.5)
    stuck = threading.Event()
    blocked, good = Kept("blocked", lambda _call: stuck.wait(60)), Kept("good")
    began = time.monotonic()
    marks = trained(tmp_path / "run", blocked, good)
    took = time.monotonic() - began
    stuck.set()
    assert took < 30  # not the minute that the sink would have taken
    # Of 3000, but for the last where the end did not wait for that either.
    assert 0 < sum(tokens_in(u) for u in good.updates if not u.is_final) <= 3000
    assert any(said.startswith("blocked: had not finished") for said in marks["sink_failed"])


def test_what_piles_up_before_a_dead_server_is_bounded_and_what_was_lost_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_feed, "MAX_WAITING", 1)
    monkeypatch.setattr(sink_feed, "_RETRY_S", (0.05,))

    began_s = time.monotonic()

    def down_for_long(_call: int) -> None:
        if time.monotonic() < began_s + 1.2:  # of 2 s
            raise ConnectionError("refused")

    sink = Kept(fail=down_for_long)
    marks = trained(tmp_path / "run", sink, steps=200)
    [said] = marks["sink_recovered"]
    assert "updates were lost" in said
    assert 0 < sum(tokens_in(u) for u in sink.updates if not u.is_final) < 20_000
    assert tokens_in(sink.updates[-1]) == 20_000  # the whole run is whole


def test_one_rank_feeds_for_all(tmp_path: Path) -> None:
    sink = Kept()
    trained(tmp_path / "run", sink, rank=1)
    assert sink.updates == []


@pytest.mark.parametrize(
    ("sinks", "said"),
    [
        (["tensorbord"], "no sink 'tensorbord'; did you mean 'tensorboard'?"),
        ([7], "a sink is NAME, NAME:OPTION=VALUE, (name, options) or a Sink; got 7"),
        ([("csv",)], "a sink is NAME, NAME:OPTION=VALUE, (name, options) or a Sink; got ('csv',)"),
    ],
)
def test_what_is_no_sink_is_refused_before_anything_starts(sinks: list[Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Meter(sinks=sinks)
    assert said in str(caught.value)


def test_steps_take_as_long_with_a_dead_and_a_blocked_sink_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of both in one run. A step of some 0.3 ms that waited for a sink would take a hundred
    times as long; three times is what a shared machine may do."""
    monkeypatch.setattr(sink_feed, "STOP_S", 0.05)
    stuck = threading.Event()

    def median_step_s(turn: int, *sinks: Kept) -> float:
        path = tmp_path / f"run-{turn}-{len(sinks)}"
        with Meter(path, probes=(), sinks=sinks, sinks_every_s=0.05) as meter:
            for _ in range(150):
                with meter.step(tokens=1):
                    sum(range(20_000))
        steps = Run.open(path).steps()
        return float(np.median(np.diff(steps["start_ns"])))

    ratios = []
    for turn in range(5):
        bare = median_step_s(turn)
        dead = Kept("dead", always_down), Kept("stuck", lambda _call: stuck.wait(60))
        ratios.append(median_step_s(turn, *dead) / bare)
    stuck.set()
    assert float(np.median(ratios)) < 3


def test_a_wrong_option_is_refused_at_once_and_a_text_is_no_list(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no option 'pth'; did you mean path"):
        Meter(tmp_path / "run", sinks=[("csv", {"pth": "x"})])
    with pytest.raises(UsageError, match=r"sinks=\['tensorboard'\]"):
        Meter(tmp_path / "run", sinks="tensorboard")
    assert not (tmp_path / "run").exists()


def test_a_sink_whose_library_is_not_here_is_told_of_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ergmeter.sinks.shared.updates.find_spec", lambda _name: None)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "ergmeter.sinks.prometheus", raising=False)
    with Meter(tmp_path / "run", probes=(), sinks=["prometheus"]) as meter:
        said = capsys.readouterr().err
        with meter.step(tokens=1):
            pass
    assert "nothing goes to the sink 'prometheus'" in said
    assert "pip install 'ergmeter[prometheus]'" in said
    assert len(Run.open(tmp_path / "run").steps()["end_ns"]) == 1


def test_the_figures_of_the_whole_run_say_how_it_ended(tmp_path: Path) -> None:
    kept, other = Kept(), Kept()
    trained(tmp_path / "run", kept)
    assert [one.summary.status for one in kept.updates if one.is_final] == ["finished"]
    with suppress(ValueError), Meter(tmp_path / "other", probes=(), sinks=[other]) as meter:
        with meter.step(tokens=1):
            pass
        raise ValueError("nan")
    assert other.updates[-1].summary.status == "failed (ValueError: nan)"


def test_what_making_figures_for_sinks_costs_is_part_of_what_we_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.2 s of CPU time each, on the thread that feeds: twice at least, with the last."""
    fed = sink_feed.Feed._feed

    def dear(one: sink_feed.Feed, *, is_last: bool) -> None:
        until_s = time.thread_time() + 0.2
        while time.thread_time() < until_s:
            pass
        fed(one, is_last=is_last)

    monkeypatch.setattr(sink_feed, "STOP_S", 60.0)  # however long it waits for a core
    monkeypatch.setattr(sink_feed.Feed, "_feed", dear)
    trained(tmp_path / "run", Kept(), steps=100)
    (spent,) = Run.open(tmp_path / "run").series("cpu_s").values()
    assert spent.values[-1] >= 0.4
