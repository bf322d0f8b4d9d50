"""What the sampler promises of its schedule, of probes that fail or hang, and of its memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from ergmeter import registry
from ergmeter import sampler as module
from ergmeter.errors import NotMeasurable, PluginError
from ergmeter.ports import Probe, ProbeRequest
from ergmeter.records import Device, Mark, Sample
from ergmeter.sampler import Sampler, default_probes, open_probes


class Clockwork:
    """A probe of our own that counts its readings, and fails or hangs when told to."""

    def __init__(
        self,
        name: str = "clockwork",
        *,
        period_s: float = 0.02,
        cost_s: float = 0.0,
        fails_at: int | None = None,
        hangs_at: int | None = None,
        kind: str = "node",
    ) -> None:
        self.name = name
        self.period_s = period_s
        self.devices: Sequence[Device] = [Device(name, kind, name, name)]  # type: ignore[arg-type]
        self.reads = 0
        self.closed = 0
        self.released = threading.Event()
        self._cost_s, self._fails_at, self._hangs_at = cost_s, fails_at, hangs_at

    def read(self) -> Sequence[Sample | Mark]:
        self.reads += 1
        if self.reads == self._fails_at:
            raise OSError("the bus is gone")
        if self.reads == self._hangs_at:
            self.released.wait(30)
        time.sleep(self._cost_s)
        return [Sample(time.monotonic_ns(), self.name, power_w=float(self.reads))]

    def close(self) -> None:
        self.closed += 1


def run_until(sampler: Sampler, condition: Callable[[], bool]) -> None:
    """Until it holds, however long a busy machine takes for it."""
    sampler.start()

    def holds() -> bool:
        sampler.watch()
        return condition()

    until(holds)
    sampler.stop()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_first_reading_is_there_when_start_returns() -> None:
    probe = Clockwork(period_s=60)
    sampler = Sampler([probe])
    sampler.start()
    assert probe.reads == 1
    sampler.stop()


def test_a_last_reading_is_taken_at_the_end_and_the_probe_is_closed_once() -> None:
    probe = Clockwork(period_s=60)
    sampler = Sampler([probe])
    sampler.start()
    before_ns = time.monotonic_ns()
    sampler.stop()
    samples, _ = sampler.drain()
    assert samples["clockwork"][-1].t_ns > before_ns
    assert probe.closed == 1


def test_every_probe_gets_a_last_reading_that_leaves_nothing_out() -> None:
    """Also one that was read just before the end, by the schedule."""

    class Dear(Clockwork):
        def read_last(self) -> Sequence[Sample | Mark]:
            return [Sample(time.monotonic_ns(), self.name, energy_j=1.0)]

    for pause_s in (0.0, 0.03, 0.05, 0.08):
        dear, other = Dear("dear", kind="gpu", period_s=0.1), Clockwork("other", period_s=5)
        sampler = Sampler([dear, other])
        sampler.start()
        time.sleep(pause_s)
        sampler.stop()
        samples, _ = sampler.drain()
        assert samples["dear"][-1].energy_j == 1.0
        assert len(samples["other"]) == 2


def test_ticks_do_not_drift_by_the_cost_of_reading() -> None:
    """Forty periods of 20 ms take 0.8 s, also if each reading takes 10 ms of them."""
    probe = Clockwork(period_s=0.02, cost_s=0.01)
    sampler = Sampler([probe])
    began = time.monotonic()
    run_until(sampler, lambda: time.monotonic() > began + 0.8)
    due = (time.monotonic() - began) / 0.02
    kept = probe.reads + sum(sampler.missed.values())
    # A loop that sleeps makes two thirds of it. What a thread waits for a core it has missed, but
    # for its first tick and its last.
    assert 0.75 * due < kept <= due + 3


def test_each_probe_has_its_own_schedule() -> None:
    fast, slow = Clockwork("fast", period_s=0.02), Clockwork("slow", period_s=0.2)
    sampler = Sampler([fast, slow])
    run_until(sampler, lambda: slow.reads >= 3)
    assert fast.reads > slow.reads


def test_a_probe_that_fails_is_marked_and_dropped_and_the_others_go_on() -> None:
    bad, good = Clockwork("bad", fails_at=3), Clockwork("good")
    sampler = Sampler([bad, good])
    run_until(sampler, lambda: bad.reads == 3 and good.reads > 8)
    samples, marks = sampler.drain()
    assert bad.reads == 3
    assert len(samples["bad"]) == 2
    assert [(mark.name, mark.detail) for mark in marks] == [
        ("probe_failed", "bad: OSError: the bus is gone")
    ]


def test_a_probe_that_fails_is_closed_and_whoever_asked_hears_of_it() -> None:
    bad, good = Clockwork("bad", fails_at=3), Clockwork("good")
    heard: list[str] = []
    sampler = Sampler([bad, good], on_failed=heard.append)
    run_until(sampler, lambda: heard == ["bad"])
    assert (bad.closed, good.closed) == (1, 1)


def test_closing_a_failed_probe_may_hang_or_raise_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CLOSE_WAIT_S", 0.1)

    class Clings(Clockwork):
        def close(self) -> None:
            super().close()
            self.released.wait(30)

    class Breaks(Clockwork):
        def close(self) -> None:
            super().close()
            raise OSError("no such handle")

    clings, breaks = Clings("clings", fails_at=2), Breaks("breaks", fails_at=2)
    unsound, good = Breaks("unsound"), Clockwork("good")
    sampler = Sampler([clings, breaks, unsound, good])
    run_until(sampler, lambda: breaks.reads == 2 and good.reads > 8)
    until(lambda: [one.closed for one in (clings, breaks, unsound, good)] == [1, 1, 1, 1])
    clings.released.set()


def test_a_probe_that_hangs_is_closed_when_it_comes_back_and_not_under_its_call() -> None:
    stuck, good = Clockwork("stuck", hangs_at=2), Clockwork("good")
    heard: list[str] = []
    sampler = Sampler([stuck, good], on_failed=heard.append)
    sampler.start()
    until(lambda: stuck.reads == 2)
    sampler.watch(hang_s=0)
    assert heard == ["stuck"]
    assert stuck.closed == 0
    stuck.released.set()
    until(lambda: stuck.closed == 1)
    sampler.stop()
    assert (stuck.closed, good.closed) == (1, 1)


def test_a_probe_that_hangs_at_the_end_keeps_no_other_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "HANG_S", 0.2)
    stuck, good = Clockwork("stuck", hangs_at=2), Clockwork("good", period_s=60)
    sampler = Sampler([stuck, good])
    sampler.start()
    until(lambda: stuck.reads == 2)
    sampler.stop()
    assert (stuck.closed, good.closed) == (0, 1)
    stuck.released.set()


def test_a_probe_that_is_added_after_the_end_is_only_closed() -> None:
    sampler = Sampler([Clockwork()])
    sampler.start()
    sampler.stop()
    late = Clockwork("late")
    sampler.add(late)
    assert (late.reads, late.closed) == (0, 1)


def test_a_probe_that_hangs_is_marked_and_dropped_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck, good = Clockwork("stuck", hangs_at=3), Clockwork("good")
    sampler = Sampler([stuck, good])
    sampler.start()
    marks: list[Mark] = []

    def is_marked() -> bool:
        sampler.watch(hang_s=0.3)
        marks.extend(sampler.drain()[1])
        return bool(marks)

    until(lambda: stuck.reads == 3)
    until(is_marked)
    before = good.reads
    until(lambda: good.reads > before + 3)
    assert marks[0].name == "probe_failed"
    assert marks[0].detail.startswith("stuck: has not answered for ")
    stuck.released.set()  # it comes back, too late: its reading is not taken
    time.sleep(0.2)
    assert "stuck" not in sampler.drain()[0]
    sampler.stop()


def test_stopping_while_a_probe_hangs_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANG_S", 0.3)
    stuck = Clockwork("stuck", hangs_at=2)
    sampler = Sampler([stuck])
    sampler.start()
    until(lambda: stuck.reads == 2)
    sampler.stop()
    _, marks = sampler.drain()
    assert [mark.name for mark in marks] == ["probe_failed"]
    stuck.released.set()


def test_what_nobody_drains_is_bounded_and_the_loss_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 5)
    probe = Clockwork(period_s=0.01)
    sampler = Sampler([probe])
    run_until(sampler, lambda: probe.reads > 8)
    samples, marks = sampler.drain()
    assert len(samples["clockwork"]) == 5
    assert samples["clockwork"][-1].power_w == probe.reads  # the newest are kept
    assert marks[0].name == "samples_dropped"
    assert marks[0].detail.startswith(f"clockwork: {probe.reads - 5} samples")


def test_an_energy_counter_gets_time_to_refresh_before_the_end() -> None:
    gpu = Clockwork("gpu", kind="gpu", period_s=0.05)
    sampler = Sampler([gpu])
    sampler.start()
    before_ns = time.monotonic_ns()
    sampler.stop()
    last = sampler.drain()[0]["gpu"][-1]
    assert last.t_ns - before_ns >= module.SETTLE_S * 1e9


def test_a_probe_that_is_added_is_read_at_once() -> None:
    sampler = Sampler([Clockwork("slow", period_s=600)])
    sampler.start()
    time.sleep(0.2)
    late = Clockwork("late", period_s=600)
    sampler.add(late)
    until(lambda: late.reads == 1)
    sampler.stop()


def test_its_own_cost_is_counted() -> None:
    probe = Clockwork(period_s=0.01)
    sampler = Sampler([probe])
    began = time.monotonic()
    run_until(sampler, lambda: probe.reads > 20)
    assert 0 < sampler.cpu_s < time.monotonic() - began


def test_a_probe_that_can_not_work_here_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Absent(Clockwork):
        def __init__(self, request: ProbeRequest) -> None:
            raise NotMeasurable("no such sensor: buy one")

    class Broken(Clockwork):
        def __init__(self, request: ProbeRequest) -> None:
            raise ZeroDivisionError("oops")

    class Stuck(Clockwork):
        def __init__(self, request: ProbeRequest) -> None:
            time.sleep(5)

    class Works(Clockwork):
        def __init__(self, request: ProbeRequest) -> None:
            super().__init__("works")

    found = {"absent": Absent, "broken": Broken, "stuck": Stuck, "works": Works}
    monkeypatch.setattr("ergmeter.registry.load", lambda _kind, name: found[name])
    opened = open_probes(ProbeRequest(1, "."), found, wait_s=1.5)
    assert [probe.name for probe in opened.probes] == ["works"]
    assert opened.unavailable == {
        "absent": "no such sensor: buy one",
        "broken": "ZeroDivisionError: oops",
        "stuck": "the driver did not answer within 1.5 s",
    }


def test_a_probe_that_is_there_when_nobody_waits_any_more_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening: list[Clockwork] = []

    class Slow(Clockwork):
        def __init__(self, request: ProbeRequest) -> None:
            super().__init__("slow")
            opening.append(self)
            self.released.wait(30)

    monkeypatch.setattr("ergmeter.registry.load", lambda *_: Slow)
    opened = open_probes(ProbeRequest(1, "."), ["slow"], wait_s=0.1)
    assert not opened.probes
    opening[0].released.set()
    until(lambda: opening[0].closed == 1)


def test_an_unknown_probe_is_named_with_those_there_are() -> None:
    opened = open_probes(ProbeRequest(1, "."), ["nvlm"])
    assert "no plugin 'nvlm' among the probes" in opened.unavailable["nvlm"]
    assert "nvml" in opened.unavailable["nvlm"]


def test_our_own_probe_keeps_the_protocol() -> None:
    assert isinstance(Clockwork(), Probe)


def test_a_probe_declares_itself_whether_it_is_read_by_default_and_at_an_interval() -> None:
    machine = ("amd", "apple", "grace", "neuron", "node", "nvml", "rapl")
    assert default_probes() == tuple(sorted((*machine, "process")))
    assert registry.declaring("probes", is_default=True, reads="machine") == machine
    assert registry.declaring("probes", has_interval=True) == (
        "amd", "apple", "grace", "nvml", "rapl",
    )  # fmt: skip


def test_a_probe_that_declares_nothing_or_does_not_load_is_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(_kind: str, name: str) -> object:
        if name == "nvml":
            raise PluginError("no pynvml")
        return Clockwork

    monkeypatch.setattr(registry, "load", load)
    assert default_probes() == ()
