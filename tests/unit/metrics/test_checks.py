"""Findings on a real recording, where it is known what disturbed it, and on runs made for each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ergmeter.metrics.checks import CHECKS, CheckFinding, Fitness, fitness
from ergmeter.metrics.explain.waterfall import explain
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.records import Mark, Sample, Step
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import GPU, add_writer, even_steps, make_run, report_page, run_of
from tests.unit.metrics.test_h200 import replayed
from tests.unit.metrics.test_h200_run import unpacked

S = 10**9
HOT, CAPPED = 0x40, 0x4


def checked(run: Run, **settings: Any) -> Fitness:
    return fitness(evidence_of(run, Settings(**settings)))


def names(found: Fitness, weight: str) -> set[str]:
    return {one.check for one in found.findings if one.weight == weight}


def said(found: Fitness, check: str) -> str:
    (one,) = [one for one in found.findings if one.check == check]
    return f"{one.seen}: {one.effect}"


# -- the H200 -----------------------------------------------------------------------------------


def test_the_stalls_of_a_recording_are_found_with_their_share_of_the_time(tmp_path: Path) -> None:
    """Its program slept for half a second after every fifth step, six times in 12.4 s."""
    found = checked(replayed(tmp_path / "run", "full_bf16_1b_stalls"))
    assert "6 of 31 steps" in said(found, "stalls")
    assert f"{6 * 0.5 / 12.4:.1%}"[:2] in said(found, "stalls")
    assert not found.is_fit
    assert "noise" in names(found, "serious")


def test_what_is_said_of_stalls_is_what_explain_says_of_them(tmp_path: Path) -> None:
    """Steps, the longest and the share: of a recording with stalls and no names for them."""
    run = replayed(tmp_path / "run", "full_bf16_1b_stalls")
    (block,) = [one for one in explain(evidence_of(run)).blocks if one.key == "stalls"]
    (fact,) = [one.said for one in block.facts if one.key == "time.step_median_s"]
    _, of, longest = fact.split(", ")
    (found,) = [one for one in checked(run).findings if one.check == "stalls"]
    assert found.seen == f"{of} took twice the median or more, {longest} beyond it"
    assert (of, longest) == ("6 of 31 steps", "up to 497 ms")
    assert found.effect.startswith(f"{100 * block.share_frac:.1f} % of the time: ")


def test_what_has_a_name_in_a_fine_tuning_is_no_stall(tmp_path: Path) -> None:
    """Its checkpoint of 11 s made one step of 11.9 s, its evaluation another: both are cut."""
    run = unpacked("finetune", tmp_path)
    blocks = {one.key: one for one in explain(evidence_of(run)).blocks}
    assert "stalls" not in blocks
    found = checked(run)
    assert {"stalls", "pauses"} <= set(found.passed)
    assert not {"checkpoint", "eval"} & blocks.keys()
    assert found.window.endswith("without 1.39 s of evaluation and 11 s of checkpoints")


@pytest.mark.parametrize(
    ("phase", "capped"),
    [
        ("full_bf16_1b", "84 %"),
        ("full_bf16_1b_stalls", "91 %"),
        ("lora_bf16_1b", "88 %"),
        ("qlora_nf4_1b", "77 %"),
    ],
)
def test_the_power_limit_and_the_warming_of_the_large_models_are_found(
    tmp_path: Path, phase: str, capped: str
) -> None:
    found = checked(replayed(tmp_path / "run", phase), warmup_steps=0)
    assert f"at its power limit in {capped} of the readings" in said(found, "throttling")
    assert "to 62 °C in the window" in said(found, "temperature")
    assert "from 38" in said(found, "temperature") or "from 39" in said(found, "temperature")
    # The recording does not say who computed, nor the FLOPs of its steps.
    assert set(found.unchecked) == {"company", "flop_count"}


def test_the_first_step_of_a_recording_is_found_until_it_is_left_out(tmp_path: Path) -> None:
    run = replayed(tmp_path / "run", "full_bf16_1b")
    assert "--warmup-steps 1" in said(checked(run, warmup_steps=0), "warm_up")
    assert checked(run, warmup_steps=1).is_fit
    assert checked(run).is_fit


def test_of_a_small_model_after_its_warm_up_there_is_nothing_but_the_low_load(
    tmp_path: Path,
) -> None:
    found = checked(replayed(tmp_path / "run", "tiny_20ms"), warmup_steps=2)
    assert found.is_fit
    assert [one.check for one in found.findings] == ["load"]
    assert "14 %" in said(found, "load")


def test_the_worst_is_on_the_card(tmp_path: Path) -> None:
    notes = summarize(replayed(tmp_path / "run", "qlora_nf4_1b"), Settings(warmup_steps=5)).notes
    assert any("at its power limit in 80 % of the readings" in note for note in notes)


# -- made for it --------------------------------------------------------------------------------


def read(seconds: float, *, every_s: float = 0.1, **values: Any) -> list[Sample]:
    """An even load, of which some values are functions of the time."""
    samples = []
    for number in range(round(seconds / every_s) + 20):
        t_s = number * every_s - 1.0
        made = {name: value(t_s) if callable(value) else value for name, value in values.items()}
        even = {"power_w": 500.0, "energy_j": 1e4 + 500.0 * t_s, "busy_frac": 0.95}
        samples.append(Sample(round(t_s * S), GPU.id, **{**even, **made}))
    return samples


def made(path: Path, steps: list[Step] | None = None, **values: Any) -> Run:
    steps = even_steps(40, seconds=0.25, tokens_computed=10) if steps is None else steps
    seconds = steps[-1].end_ns / S
    marks = [Mark(0, "device_used", GPU.id), *values.pop("marks", ())]
    every_s = values.pop("every_s", 0.1)
    samples = values.pop("samples", None) or read(seconds, every_s=every_s, **values)
    gpu = {"clock_hz": 1.9e9, "temperature_c": 60.0, "throttled": 0, "memory_bytes": 10**10}
    samples = [
        replace(one, **{n: v for n, v in gpu.items() if getattr(one, n) is None}) for one in samples
    ]
    return run_of(path, steps=steps, samples=samples, devices=[GPU], marks=marks)


def test_a_quiet_run_has_no_finding_and_every_check_but_the_count_was_made(tmp_path: Path) -> None:
    found = checked(made(tmp_path / "run"))
    assert found.findings == ()
    assert found.unchecked.keys() == {"flop_count"}  # its FLOPs are not known
    assert found.is_fit


@pytest.mark.parametrize(
    ("values", "check", "words"),
    [
        ({"throttled": lambda t: HOT if t > 5 else 0}, "throttling", "throttled by heat in 50 %"),
        ({"throttled": 0x80}, "throttling", "a hardware slowdown in 100 %"),
        (
            {"energy_j": lambda t: 1e4 + 400.0 * t},
            "counter",
            "integrated power is 25 % more than its counter says",
        ),
    ],
)
def test_serious_findings(tmp_path: Path, values: Any, check: str, words: str) -> None:
    found = checked(made(tmp_path / "run", **values))
    assert names(found, "serious") == {check}
    assert words in said(found, check)
    assert not found.is_fit


@pytest.mark.parametrize(
    ("values", "check", "words"),
    [
        ({"throttled": CAPPED}, "throttling", "power limit in 100 %"),
        ({"clock_hz": lambda t: 1.98e9 if t < 5 else 1.5e9}, "clock", "1500 and 1980 MHz"),
        ({"temperature_c": lambda t: 40 + max(0.0, t)}, "temperature", "from 40 to 50 °C"),
        ({"busy_frac": 0.2}, "load", "20 %"),
        ({"memory_bytes": lambda t: 10**10 + round(2e8 * t)}, "memory", "by 1.5 GB"),
    ],
)
def test_minor_findings(tmp_path: Path, values: Any, check: str, words: str) -> None:
    found = checked(made(tmp_path / "run", **values))
    assert [one.check for one in found.findings] == [check]
    assert words in said(found, check)
    assert found.is_fit


def test_memory_that_is_taken_once_does_not_only_grow(tmp_path: Path) -> None:
    found = checked(made(tmp_path / "run", memory_bytes=lambda t: 10**10 if t > 1 else 10**9))
    assert found.findings == ()


def test_a_slow_beginning_is_counted_from_the_start_of_the_run(tmp_path: Path) -> None:
    """Five slow steps, of which a warm-up of three leaves two, and later one that stalls."""
    lasts_s = [*[1.5] * 5, *[0.25] * 20, 1.0, *[0.25] * 14]
    edges = [round(sum(lasts_s[:number]) * S) for number in range(len(lasts_s) + 1)]
    steps = [
        Step(start, end, index=number, tokens_computed=10)
        for number, (start, end) in enumerate(itertools.pairwise(edges))
    ]
    run = made(tmp_path / "run", steps)
    found = checked(run, warmup_steps=3)
    assert "the first 2 counted steps are up to 6.0 times" in said(found, "warm_up")
    assert "--warmup-steps 5 leaves them out" in said(found, "warm_up")
    assert "1 of 37 steps took twice the median or more, up to 750 ms beyond it" in said(
        found, "stalls"
    )
    after = checked(run, warmup_steps=5)
    assert "warm_up" not in names(after, "serious")
    assert "1 of 35 steps took" in said(after, "stalls")


def test_a_slow_beginning_is_in_steps_also_where_rows_hold_ten(tmp_path: Path) -> None:
    lasts_s = [*[1.5] * 3, *[0.25] * 40]
    edges = [round(sum(lasts_s[:number]) * S) for number in range(len(lasts_s) + 1)]
    steps = [
        Step(start, end, index=10 * number, steps=10, tokens_computed=10)
        for number, (start, end) in enumerate(itertools.pairwise(edges))
    ]
    run = made(tmp_path / "run", steps)
    assert "--warmup-steps 30 leaves them out" in said(checked(run, warmup_steps=0), "warm_up")
    # 30 of 430 steps; of the first 250 that the rule looks at, 50 may go.
    assert (
        checked(run).window
        == "over 400 steps (40 rows) in 10 s, after 30 steps (3 rows) of warm-up"
    )
    assert "warm_up" not in names(checked(run, warmup_steps=30), "serious")


@pytest.mark.parametrize("table", ["steps", "samples"])
@pytest.mark.parametrize("how", ["other bytes", "cut"])
def test_a_file_that_is_not_what_was_written_is_found(tmp_path: Path, table: str, how: str) -> None:
    path = made(tmp_path / "run").path
    (file,) = path.glob(f"*/{table}*.arrows")
    whole = file.read_bytes()
    file.write_bytes(b"x" * 500 if how == "other bytes" else whole[: len(whole) * 2 // 3])
    found = checked(Run.open(path))
    assert file.name in said(found, "record")
    assert not found.is_fit


def test_a_killed_writers_half_message_is_no_damage(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(40, tokens_computed=10), closed=False)
    (file,) = run.path.glob("*/steps*.arrows")
    file.write_bytes(file.read_bytes()[:-40])
    assert Run.open(run.path).verified() == []


def test_of_two_devices_alike_a_finding_names_the_one(tmp_path: Path) -> None:
    other = replace(GPU, id="GPU-1")
    hot = [replace(one, throttled=HOT) for one in read(10.0)]
    cool = [replace(one, device=other.id, throttled=0) for one in read(10.0)]
    steps = even_steps(40, seconds=0.25, tokens_computed=10)
    run = run_of(tmp_path / "run", steps=steps, samples=[*hot, *cool], devices=[GPU, other])
    assert said(checked(run), "throttling").startswith("Test GPU [GPU-0]: throttled by heat")


def test_steps_are_counted_for_one_rank(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in range(2):
        add_writer(run, steps=even_steps(6, tokens_computed=10, rank=rank))
    assert "6 steps in 6 s: " in said(checked(Run.open(run)), "window")


def test_what_can_not_be_checked_is_named(tmp_path: Path) -> None:
    found = checked(run_of(tmp_path / "run", steps=even_steps(40, tokens_computed=10)))
    assert set(found.unchecked) == {
        *("company", "gaps", "throttling", "counter", "clock", "temperature", "load"),
        "flop_count",
    }
    assert set(CHECKS) > set(found.unchecked)


def test_without_sensors_nobody_knows_whether_it_is_fit(tmp_path: Path) -> None:
    """8 of the 17 checks are of accelerators; what held their clock down is one of the decisive."""
    found = checked(run_of(tmp_path / "run", steps=even_steps(40, tokens_computed=10)))
    assert (found.verdict, found.is_fit) == ("not known", False)
    assert found.text == "not known: 8 of 17 checks could not be made, throttling among them"
    assert set(found.passed) == {
        *("ranks", "record", "window", "warm_up", "noise"),
        *("stalls", "pauses", "stragglers", "memory"),
    }


def test_a_run_of_too_few_steps_to_tell_its_noise_is_not_fit_for_that(tmp_path: Path) -> None:
    found = checked(run_of(tmp_path / "run", steps=even_steps(2, tokens_computed=10)))
    assert found.verdict == "not fit"
    assert set(found.undecided) == {"noise", "throttling"}
    assert found.text == (f"not fit to be compared ({17 - len(found.unchecked)} of 17 checks made)")


def test_a_verdict_says_how_many_checks_it_rests_on(tmp_path: Path) -> None:
    assert checked(made(tmp_path / "a")).text == "fit to be compared (16 of 17 checks made)"
    recorded = checked(replayed(tmp_path / "b", "full_bf16_1b"), warmup_steps=1)
    assert recorded.text == "fit to be compared (15 of 17 checks made)"


def test_the_command_says_not_known_and_does_not_fail(
    erg: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(40, tokens_computed=10)).path
    code, out, _ = erg("check", run)
    assert code == 0
    assert "not known: 8 of 17 checks could not be made, throttling among them" in out
    code, out, _ = erg("check", run, "--json")
    (told,) = json.loads(out)
    assert code == 0
    assert (told["is_fit"], told["verdict"]) == (False, "not known")
    assert told["checks"] == {
        "all": 17,
        "made": 9,
        "decisive": ["window", "noise", "throttling"],
        "undecided": ["throttling"],
    }
    assert erg("check", replayed(tmp_path / "bad", "full_bf16_1b_stalls").path)[0] == 1


def test_the_page_says_what_the_command_says(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(40, tokens_computed=10))
    page = report_page(run)
    said = "not known: 8 of 17 checks could not be made, throttling among them"
    assert f"<strong>{said}</strong>" in page


def test_a_gpu_that_says_nothing_hides_nothing_of_the_others(tmp_path: Path) -> None:
    silent = replace(GPU, id="GPU-silent")
    hot = read(12.0, power_w=300.0, throttled=HOT, clock_hz=1e9, temperature_c=80.0)
    run = run_of(tmp_path / "run", steps=even_steps(12), samples=hot, devices=[GPU, silent])
    found = checked(run)
    assert "throttling" in names(found, "serious")
    (unseen,) = [one for one in found.findings if one.check == "throttling" and "not" in one.seen]
    assert "GPU-silent" in unseen.seen


def test_a_gpu_that_two_probes_read_keeps_what_the_first_said_of_it(tmp_path: Path) -> None:
    """An average of a second is not instant power because another probe says nothing of it."""
    first = replace(GPU, facts={"power_field": "draw"})
    second = replace(GPU, probe="dcgm", facts={"dcgm": "4.2"})
    for number, devices in enumerate(([first, second], [second, first])):
        read_w = read(12.0, power_w=300.0)
        path = tmp_path / str(number)
        run = run_of(path, steps=even_steps(12), samples=read_w, devices=devices)
        (found,) = evidence_of(run).devices("gpu")
        assert found.facts == {"power_field": "draw", "dcgm": "4.2"}


def test_a_check_that_failed_is_not_one_without_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> list[CheckFinding]:
        raise ZeroDivisionError

    run = run_of(tmp_path / "run", steps=even_steps(40, tokens_computed=10))
    monkeypatch.setitem(CHECKS, "noise", broken)
    said = checked(run).text
    assert said == (
        "not known: 8 of 17 checks could not be made and 1 of 17 checks failed, noise, throttling"
        " among them"
    )
    only = made(tmp_path / "quiet")
    assert checked(only).text == (
        "not known: 1 of 17 checks could not be made and 1 of 17 checks failed, noise among them"
    )


def test_of_several_runs_each_is_told_by_its_directory(
    erg: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    runs = [make_run(tmp_path / name, name="demo") for name in ("one", "two")]
    for run in runs:
        add_writer(run, steps=even_steps(40, tokens_computed=10))
    _, out, _ = erg("check", *runs)
    named = [line.partition(":")[0] for line in out.splitlines() if "not known: 8" in line]
    assert named == ["one", "two"]
    assert erg("check", runs[0])[1].startswith("demo: not known: ")
