"""A plain loop: its steps are seen from inside and tell no loss, its lines print it."""

from __future__ import annotations

import io
import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ergmeter.compare.sources import read_entries
from ergmeter.metrics.live.alert_judge import Alert, Judge
from ergmeter.metrics.live.alert_rules import parse_rules
from ergmeter.metrics.live.follow import RunFollower
from ergmeter.metrics.live.frame import LiveFrame, RunWatcher
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.metrics.timeline import loss_line, loss_series
from ergmeter.records import Mark, Step
from ergmeter.runlog.reader import Run
from ergmeter.views.run import watch
from tests.runs import add_writer, even_steps, make_run, printed_card, reading, reason
from tests.unit.importers.captured import reported, steps
from tests.unit.importers.printed import live

S = 10**9
REFUSED = Mark(15 * S, "value_refused", "loss is not a number (nan) from step 14 on")
LOST = "loss is not a number (nan) from step 14 on; the last number was 2.7 at step 13"


def lost_at(step: int, *, again_at: int = 20) -> list[float]:
    """Losses 4.0, 3.9, .. of twenty steps, none from a step on, and numbers again from another."""
    return [math.nan if step <= i < again_at else 4.0 - 0.1 * i for i in range(20)]


def printed(losses: list[float]) -> list[Step]:
    return [Step(i * S, (i + 1) * S, index=i, loss=loss) for i, loss in enumerate(losses)]


def looped(path: Path, losses: list[float], *, told: list[Step] | None = None) -> Path:
    run = make_run(path)
    add_writer(run, steps=even_steps(20, tokens_computed=100) if told is None else told)
    add_writer(
        run, steps=printed(losses), stream="output", marks=[REFUSED, Mark(0, "ended", "finished")]
    )
    return run


def judged(run: Path) -> tuple[list[Alert], Judge]:
    with closing(RunFollower(run)) as following:
        following.learn()
        judge = Judge(parse_rules(["loss nan", "grad_norm nan"]), start_ns=0)
        return judge.feed(following.look(is_last=True)[1]), judge


def frame_of(run: Path) -> LiveFrame:
    with closing(RunWatcher(run, rules=["loss nan"])) as watching:
        return watching.look(totals=False)


def test_a_printed_loss_that_is_none_is_an_alert_where_the_steps_tell_none(tmp_path: Path) -> None:
    found, judge = judged(looped(tmp_path / "run", lost_at(14, again_at=17)))
    said = [(one.t_ns // S, one.detail, one.is_over) for one in found]
    assert said == [
        (15, "loss nan at step 14, as printed", False),
        (18, "loss 2.3 at step 17, as printed", True),
    ]
    assert judge.unjudged == {
        "grad_norm nan": "no step reports grad norm, and no printed line has it"
    }


def test_what_a_step_tells_goes_before_what_is_printed(tmp_path: Path) -> None:
    told = [Step(i * S, (i + 1) * S, index=i, loss=1.0) for i in range(20)]
    run = looped(tmp_path / "run", lost_at(14), told=told)
    assert judged(run)[0] == []
    frame = frame_of(run)
    assert (frame.loss, frame.loss_is_printed) == (1.0, False)
    assert set(frame.curves["loss"]) == {1.0}
    assert reading(Run.open(run), "training.loss").value == 1.0


def test_lines_read_after_the_last_step_are_its_own_unless_steps_follow(tmp_path: Path) -> None:
    """Lines are read a step late, so that the last begins when the last step has ended."""
    run = make_run(tmp_path / "run")
    add_writer(run, steps=even_steps(20))
    lines = [Step((i + 1) * S, (i + 2) * S, loss=4.0 - 0.1 * i) for i in range(20)]
    add_writer(run, steps=lines, stream="output")
    assert reading(Run.open(run), "training.loss").value == pytest.approx(2.1)
    assert reading(Run.open(run), "training.loss", window="0:10").value == pytest.approx(3.2)


def test_a_printed_loss_is_of_the_step_that_the_program_printed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_writer(run, steps=printed([3.0, 2.0, 1.0]), stream="output")
    assert "of step 2, the last of 3" in reading(Run.open(run), "training.loss").note


def test_watching_shows_the_printed_loss_and_says_so(tmp_path: Path) -> None:
    frame = frame_of(looped(tmp_path / "run", [4.0 - 0.1 * i for i in range(20)]))
    assert frame.loss == pytest.approx(2.1)
    assert (frame.curves["loss"][0], frame.curves["loss"][-1]) == pytest.approx((4.0, 2.1))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(watch.page(frame, columns=100))
    (row,) = (line for line in console.export_text().splitlines() if line.startswith("loss"))
    assert row.split()[1] == "2.1"
    assert row.rstrip().endswith("as printed")


def test_a_training_that_diverged_has_no_loss(tmp_path: Path) -> None:
    run = Run.open(looped(tmp_path / "run", lost_at(14)))
    assert reason(run, "training.loss") == f"diverged: {LOST}, as printed"
    shown = " ".join(printed_card(run, width=100).replace("│", " ").split())
    assert f"! the training diverged: {LOST}, as printed" in shown
    assert " 4 to 2.7, then no number" in shown


def test_a_step_that_tells_none_is_no_number_as_well(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_writer(run, steps=printed(lost_at(14)))
    assert reason(Run.open(run), "training.loss") == f"diverged: {LOST}"


def test_an_imported_log_says_it_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_writer(run, steps=printed(lost_at(14)), stream="output", marks=[REFUSED])
    notes = summarize(Run.open(run)).notes
    assert [note for note in notes if "not a number" in note] == [f"the training diverged: {LOST}"]


def test_a_loss_that_came_back_is_a_number_and_says_what_was_none(tmp_path: Path) -> None:
    found = reading(Run.open(looped(tmp_path / "run", lost_at(14, again_at=17))), "training.loss")
    assert found.value == pytest.approx(2.1)
    assert "as printed, the last of 17 told, 3 before it are no numbers" in found.note


def test_a_run_that_diverged_is_not_compared(tmp_path: Path) -> None:
    looped(tmp_path / "runs" / "bad", lost_at(14))
    looped(tmp_path / "runs" / "good", [2.0] * 20)
    found = read_entries([tmp_path / "runs"])
    assert [entry.source for entry in found.ended_well] == [str(tmp_path / "runs" / "good")]
    assert found.unused == (f"{tmp_path / 'runs' / 'bad'}: it diverged: {LOST}, as printed",)


def test_the_curve_of_the_loss_is_the_printed_one(tmp_path: Path) -> None:
    line = loss_line(evidence_of(Run.open(looped(tmp_path / "run", lost_at(14)))))
    assert line.is_printed
    assert np.allclose(line.values, [4.0 - 0.1 * i for i in range(14)])
    assert np.allclose(line.t_s, range(1, 15))


LITGPT = "Epoch 1 | iter {0} step {0} | loss train: {1:.3f}, val: n/a | iter time: 10.00 ms (step)"


@pytest.mark.parametrize(
    "lines",
    [
        [LITGPT.format(n, 3.0 - n / 10) for n in range(1, 11)],  # each with its own time
        [f"step {n}: loss {3.0 - (n + 1) / 10:.3f}" for n in range(10)],
        ["step 1: loss 2.9"],  # of the second step, and no more
    ],
    ids=["litgpt", "plain", "once"],
)
def test_all_losses_that_a_loop_prints_are_its_losses_the_first_and_the_last_too(
    tmp_path: Path, lines: list[str]
) -> None:
    run = make_run(tmp_path / "run")
    add_writer(run, steps=even_steps(20, tokens_computed=100))
    told = live(*((number + 1, line) for number, line in enumerate(lines)))
    add_writer(run, steps=steps(told), reported=reported(told), stream="output")
    wanted = [3.0 - (n + 1) / 10 for n in range(len(lines))]
    opened = Run.open(run)
    assert loss_series(evidence_of(opened))[0].values.tolist() == pytest.approx(wanted)
    assert reading(opened, "training.loss").value == pytest.approx(wanted[-1])
