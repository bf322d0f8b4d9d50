"""An alarm marks, tells and stops; what it tells by may fail, and nobody waits for it."""

from __future__ import annotations

import http.server
import json
import math
import re
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ergmeter import Budget, Meter, Run, UsageError
from ergmeter.meter import alert_watch
from ergmeter.meter.alert_watch import Alarm, AlertPlan
from ergmeter.metrics.live.alert_judge import Alert, Judge
from ergmeter.metrics.live.alert_rules import parse_rules
from ergmeter.metrics.live.follow import RunFollower
from ergmeter.records import Mark, Reading, Step
from ergmeter.runlog.settings import Settings
from tests.runs import add_writer, make_run


def trained(path: Path, *, steps: int = 250, nan_at: int = 60, **options: Any) -> tuple[Meter, int]:
    """A loop of ten-millisecond steps whose loss is lost; the Meter, and where it stopped."""
    with Meter(path, probes=(), alerts=["loss nan"], **options) as meter:
        number = 0
        for number in range(steps):
            with meter.step(tokens=100) as step:
                time.sleep(0.01)
                step.loss = math.nan if number >= nan_at else 2.0
            if meter.should_stop:
                break
    return meter, number


def marks(path: Path, name: str) -> list[str]:
    return [mark.detail for mark in Run.open(path).marks if mark.name == name]


def test_an_alert_is_one_mark_with_what_was_seen_and_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run", steps=120)
    assert marks(tmp_path / "run", "alert") == ["loss nan: loss nan at step 60"]
    assert capfd.readouterr().err == "ergmeter: alert: loss nan: loss nan at step 60\n"
    run = Run.open(tmp_path / "run")
    assert run.writers[0].header["alerts"] == {"rules": ["loss nan"], "stop_on": []}


def test_the_report_tells_of_it(tmp_path: Path) -> None:
    meter, _ = trained(tmp_path / "run", steps=120)
    assert "alert: loss nan: loss nan at step 60" in meter.summary().notes


def test_what_was_told_live_is_what_the_judge_says_of_the_run_afterwards(tmp_path: Path) -> None:
    trained(tmp_path / "run", steps=120)
    following = RunFollower(tmp_path / "run")
    following.learn()
    judge = Judge(parse_rules(["loss nan"]), devices=following.devices)
    found = judge.feed(following.look(is_last=True)[1])
    following.close()
    told = [(m.t_ns, m.detail) for m in Run.open(tmp_path / "run").marks if m.name == "alert"]
    assert [(one.t_ns, one.text) for one in found] == told


def test_should_stop_becomes_true_for_the_kinds_it_was_asked_for(tmp_path: Path) -> None:
    _, stopped = trained(tmp_path / "a", steps=3000, stop_on="nan")
    assert 60 < stopped < 2999
    assert marks(tmp_path / "a", "stop_asked") == ["loss nan: loss nan at step 60"]
    meter, stopped = trained(tmp_path / "b", steps=120)
    assert stopped == 119
    assert not meter.should_stop


def test_a_budget_is_an_alert_to_stop_for(tmp_path: Path) -> None:
    budget = Budget(steps=10_000, hours=1 / 3600)
    with Meter(tmp_path / "run", probes=["process"], budget=budget, stop_on=["budget"]) as meter:
        deadline_s = time.monotonic() + 60
        while not meter.should_stop and time.monotonic() < deadline_s:
            with meter.step(tokens=1):
                time.sleep(0.02)
        assert meter.should_stop
        assert meter.progress().total == 10_000
    (said,) = marks(tmp_path / "run", "alert")
    assert re.fullmatch(r"time > 0\.000277778 h: [\d.]+ s used", said), said  # 1, or looked at late


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alerts": ["los nan"]}, "did you mean 'loss nan'"),
        ({"alerts": "loss nan"}, r"give alerts=\['loss nan'\]"),
        ({"alerts": ["loss nan"], "stop_on": "budget"}, "stop on 'budget' has no effect"),
        ({"alerts": ["cost > 5"]}, "needs a price"),
        ({"alert_webhook": "http://x/"}, "but no alert; add"),
        ({"alerts": ["loss nan"], "alert_webhook": "file:///etc/passwd"}, "http:// or https://"),
        ({"alerts": ["loss nan"], "alert_command": "no-such-tool {alert}"}, "not an executable"),
        ({"alerts": ["loss nan"], "alert_command": "echo {loss}"}, "there are {alert}"),
        ({"alerts": ["loss nan"], "alert_command": "echo {alert.text}"}, "there are {alert}"),
        ({"alerts": ["loss nan"], "alert_command": "echo {value:.2f}"}, "so give {value} alone"),
        ({"alerts": ["loss nan"], "alert_command": "echo {alert!r}"}, "so give {alert} alone"),
        ({"alerts": ["loss nan"], "alert_command": "echo 'half"}, "can't be read"),
        ({"budget": Budget(cost=5.0)}, "needs a price"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Meter(**options)


def test_a_command_gets_the_alert_as_one_word_and_no_shell_sees_it(tmp_path: Path) -> None:
    script = tmp_path / "tell.py"
    script.write_text(
        "import json, os, sys\n"
        "kept = {n: v for n, v in os.environ.items() if n.startswith('ERGMETER_')}\n"
        "open(sys.argv[1], 'a').write(json.dumps([sys.argv[2:], kept]) + '\\n')\n"
    )
    out = tmp_path / "told; touch harm $(touch harm)"
    command = f"{sys.executable} {script} '{out}' 'said: {{alert}}' {{value}} {{kind}}"
    trained(tmp_path / "run", steps=120, alert_command=command)
    (line,) = out.read_text().splitlines()
    words, variables = json.loads(line)
    assert words == ["said: loss nan: loss nan at step 60", "None", "nan"]
    assert variables["ERGMETER_ALERT"] == "loss nan: loss nan at step 60"
    assert variables["ERGMETER_RULE"] == "loss nan"
    assert not list(tmp_path.glob("harm*"))
    assert marks(tmp_path / "run", "alert_failed") == []


def test_a_command_that_fails_is_a_mark(tmp_path: Path) -> None:
    trained(tmp_path / "run", steps=120, alert_command="false {alert}")
    assert marks(tmp_path / "run", "alert_failed") == ["command false: exit code 1"]


class Server(http.server.ThreadingHTTPServer):
    """Keeps what is posted to it, or lets one wait."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posted: list[dict[str, Any]] = []
        self.code = 204
        self.location: str | None = None
        self.hang = threading.Event()
        self.hang.set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook/s3cret"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.hang.wait(30)
        self.server.posted.append(json.loads(body))
        self.send_response(self.server.code)
        if self.server.location is not None:
            self.send_header("Location", self.server.location)
        self.end_headers()

    def do_GET(self) -> None:
        """As most servers answer one who was sent on: with a page."""
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing: it is a test."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.hang.set()
        server.shutdown()
        thread.join()


def test_a_webhook_gets_the_alert_as_json(tmp_path: Path, server: Server) -> None:
    trained(tmp_path / "run", steps=120, alert_webhook=server.address)
    (posted,) = server.posted
    assert posted["text"] == "loss nan: loss nan at step 60"
    assert posted["rule"] == "loss nan"
    assert posted["value"] is None
    assert posted["run"] == str(tmp_path / "run")


def test_a_webhook_that_refuses_is_a_mark_without_its_key(tmp_path: Path, server: Server) -> None:
    server.code = 500
    trained(tmp_path / "run", steps=120, alert_webhook=server.address)
    (said,) = marks(tmp_path / "run", "alert_failed")
    assert said == "webhook at 127.0.0.1: HTTPError: HTTP Error 500: Internal Server Error"
    assert "s3cret" not in (tmp_path / "run").rglob("marks.jsonl").__next__().read_text()


def told_by(ways: alert_watch.AlertPlan, *texts: str) -> list[str]:
    """What is marked when these alerts are told of."""
    kept: list[str] = []
    telling = alert_watch.Notices(ways, mark=lambda mark: kept.append(mark.detail))
    for text in texts:
        telling.tell({"text": text})
    telling.end()
    return kept


def test_of_an_address_that_is_none_the_mark_has_no_key() -> None:
    ways = alert_watch.AlertPlan(webhook="http://127.0.0.1:9/hook/s3cret key")
    assert told_by(ways, "x") == ["webhook at 127.0.0.1: InvalidURL"]


def test_a_webhook_that_sends_on_elsewhere_is_a_mark_without_where(server: Server) -> None:
    server.code, server.location = 302, "file:///s3cret"
    ways = alert_watch.AlertPlan(webhook=server.address)
    assert told_by(ways, "x") == ["webhook at 127.0.0.1: HTTPError: HTTP Error 302: Found"]


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_webhook_that_has_moved_was_not_told(server: Server, code: int) -> None:
    """The one it is sent on to gets no alert: a GET has none in it."""
    server.code, server.location = code, server.address
    ways = alert_watch.AlertPlan(webhook=server.address)
    (said,) = told_by(ways, "x")
    assert said.startswith(f"webhook at 127.0.0.1: HTTPError: HTTP Error {code}: ")


def test_what_fails_unforeseen_is_a_mark_and_the_next_one_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = []

    def ran(words: list[str], _environment: dict[str, str]) -> int:
        if words[1] == "first":
            raise ZeroDivisionError
        told.append(words)
        return 0

    monkeypatch.setattr(alert_watch, "_run_command", ran)
    ways = alert_watch.AlertPlan(command=("notify", "{alert}"))
    assert told_by(ways, "first", "second") == ["command: ZeroDivisionError"]
    assert told == [["notify", "second"]]


def test_a_text_the_system_takes_for_none_is_a_mark_and_the_next_one_is_told(
    tmp_path: Path,
) -> None:
    out = tmp_path / "told"
    script = f"import sys; open({str(out)!r}, 'a').write(sys.argv[1])"
    ways = alert_watch.AlertPlan(command=(sys.executable, "-c", script, "{alert}"))
    (said,) = told_by(ways, "no text: \ud800", "fine")
    assert said.startswith(f"command {sys.executable}: ")
    assert out.read_text() == "fine"


def test_a_webhook_that_hangs_holds_up_no_step_and_the_end_not_for_long(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert_watch, "WEBHOOK_S", 60.0)
    monkeypatch.setattr(alert_watch, "END_S", 0.2)
    server.hang.clear()
    _, last = trained(tmp_path / "run", steps=120, alert_webhook=server.address)
    assert last == 119
    assert marks(tmp_path / "run", "alert_failed") == ["it was not sent before the program ended"]
    assert Run.open(tmp_path / "run").status == "finished"


@pytest.mark.parametrize(
    ("rule", "is_told"),
    [("energy > 1 J", True), ("cost > 1", True), ("time > 1 s", False), ("step_s > 1 s", False)],
)
def test_a_rank_that_is_not_the_first_tells_of_what_only_it_knows(
    tmp_path: Path, rule: str, is_told: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    (parsed,) = parse_rules([rule])
    kept: list[Mark] = []
    alarm = Alarm(
        AlertPlan((parsed,)), tmp_path, settings=Settings(), mark=kept.append,
        is_first=lambda: False,
    )  # fmt: skip
    alarm._raised(Alert(parsed, 5, 2.0, 1.0, "so much"), may_stop=True)
    alarm._notices.end()
    assert [mark.detail for mark in kept] == [f"{rule}: so much"]
    assert (f"alert: {rule}: so much" in capfd.readouterr().err) is is_told


def test_of_a_loss_that_several_ranks_lose_the_first_is_told_and_each_is_marked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Until all are back: then the next one is news again."""
    (rule,) = parse_rules(["loss nan"])
    kept: list[Mark] = []
    alarm = Alarm(AlertPlan((rule,)), tmp_path, settings=Settings(), mark=kept.append)
    story = [("a", False), ("b", False), ("a", True), ("c", False), ("b", True), ("c", True)]
    for at, (writer, is_over) in enumerate([*story, ("b", False)]):
        alarm._raised(Alert(rule, at, math.nan, math.nan, f"{at}", writer, is_over), may_stop=True)
    alarm._notices.end()
    assert [mark.name for mark in kept].count("alert") == 4
    assert capfd.readouterr().err.splitlines() == [
        "ergmeter: alert: loss nan: 0",
        "ergmeter: alert: loss nan: 6",
    ]


def test_a_judge_that_fails_is_one_mark_of_its_own_and_no_part_of_the_record_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr("ergmeter.meter.alert_watch.EVERY_S", 0.05)
    monkeypatch.setattr(Alarm, "_begun", broken)
    meter, _ = trained(tmp_path / "run", steps=60)
    assert marks(tmp_path / "run", "alarm_failed") == ["ZeroDivisionError: of all things"]
    assert marks(tmp_path / "run", "handover_failed") == []
    assert "alerts may be missing: ZeroDivisionError: of all things" in meter.summary().notes
    assert not any("part of the record" in note for note in meter.summary().notes)


def test_what_judging_costs_is_part_of_what_we_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that takes 0.2 s of CPU time, on the alarm's thread, and one at the end."""
    look = Alarm._look

    def dear(alarm: Alarm, *, is_last: bool = False) -> None:
        until_s = time.thread_time() + 0.2
        while time.thread_time() < until_s:
            pass
        look(alarm, is_last=is_last)

    monkeypatch.setattr("ergmeter.meter.alert_watch.EVERY_S", 0.05)
    monkeypatch.setattr(
        "ergmeter.meter.alert_watch._STOP_S", 60.0
    )  # however long it waits for a core
    monkeypatch.setattr(Alarm, "_look", dear)
    meter, _ = trained(tmp_path / "run", steps=60)
    (spent,) = Run.open(tmp_path / "run").series("cpu_s").values()
    assert spent.values[-1] >= 0.4
    own = meter.summary().readings["overhead.cpu_frac"]
    assert isinstance(own, Reading)
    assert "that judge alerts" in own.note


@pytest.mark.parametrize(("second_at", "told"), [(30, 2), (3, 1)])
def test_the_loss_of_a_second_training_is_news_and_that_of_a_second_rank_is_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], second_at: int, told: int
) -> None:
    """The first ended with its loss lost: no alert of it is ever over."""
    run = make_run(tmp_path / "run")
    for at in (0, second_at):
        steps = [
            Step((at + n) * 10**9, (at + n + 1) * 10**9, loss=math.nan, index=n) for n in range(10)
        ]
        add_writer(run, steps=steps)
    alarm = Alarm(
        AlertPlan(parse_rules(["loss nan"])), run, settings=Settings(), mark=lambda _: None
    )
    alarm.start()
    alarm.stop(lambda: None)
    line = "ergmeter: alert: loss nan: loss nan at step 0"
    assert capfd.readouterr().err.splitlines() == [line] * told


def test_a_rule_that_nothing_is_told_for_is_said_once_and_marked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Meter(tmp_path / "run", probes=(), alerts=["loss nan", "stalled > 1 h"]) as meter:
        for _ in range(3):
            with meter.step(tokens=100):
                pass
    lacks = "no step reports loss, and no printed line has it"
    assert capfd.readouterr().err == f"ergmeter: alert 'loss nan' is not judged: {lacks}\n"
    assert marks(tmp_path / "run", "alert_unjudged") == [f"loss nan: {lacks}"]
    assert f"an alert was not judged: loss nan: {lacks}" in meter.summary().notes


def test_a_relative_rule_without_a_median_is_told_of_at_the_end_and_not_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """45 s, of which there are four stretches of 10 s, in more steps than a rule is waited for."""
    monkeypatch.setattr("ergmeter.meter.alert_watch._SOME_STEPS", 5)
    rule, told = "tokens_per_s < -20%", list[Mark]()
    run = make_run(tmp_path / "run")
    steps = [Step(n * 10**9, (n + 1) * 10**9, tokens_computed=10, index=n) for n in range(45)]
    add_writer(run, steps=steps)
    alarm = Alarm(AlertPlan(parse_rules([rule])), run, settings=Settings(), mark=told.append)
    alarm._look()
    assert alarm._followed is not None
    assert alarm._followed[1].totals.rows > 5
    assert capfd.readouterr().err == ""
    alarm.start()
    alarm.stop(lambda: None)
    lacks = "the run's median needs 5 stretches of 10 s, and one more; 4 seen"
    assert capfd.readouterr().err == f"ergmeter: alert {rule!r} is not judged: {lacks}\n"
    assert [(one.name, one.detail) for one in told] == [("alert_unjudged", f"{rule}: {lacks}")]


@pytest.mark.parametrize(("first_steps", "told_by_second"), [(10, []), (15, [5, 15])])
def test_of_ranks_with_an_alarm_each_one_tells_until_its_loss_is_back(
    tmp_path: Path,
    first_steps: int,
    told_by_second: list[int],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Lost at step 5, back at 10, lost at 15: the first rank ends before it is back, or after."""
    run = make_run(tmp_path / "run")
    losses = [2.0] * 5 + [math.nan] * 5 + [2.0] * 5 + [math.nan] * 5
    steps = [Step(i * 10**9, (i + 1) * 10**9, index=i, loss=one) for i, one in enumerate(losses)]
    said: list[list[str]] = []
    held: list[Alarm] = []
    for rank, count in enumerate((first_steps, 20)):
        alarm = Alarm(
            AlertPlan(parse_rules(["loss nan"])),
            run,
            settings=Settings(),
            mark=lambda _: None,
            only=add_writer(run, steps=steps[:count]).name,
            rank=partial(int, rank),
        )
        held.append(alarm)
        alarm._look(is_last=True)
        assert alarm._followed
        alarm._followed[0].close()
        said.append(capfd.readouterr().err.splitlines())
    line = "ergmeter: alert: loss nan: loss nan at step {} (rank {})"
    assert said == [[line.format(5, 0)], [line.format(at, 1) for at in told_by_second]]
