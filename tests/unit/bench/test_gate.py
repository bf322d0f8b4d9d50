from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ergmeter.bench.tables import as_table
from ergmeter.compare.comparison import Comparison
from ergmeter.compare.gate import POOLED, Gate, parse_noise, parse_rule
from ergmeter.compare.pairing import CompareOptions
from ergmeter.errors import UsageError
from ergmeter.stats.ratio import RunNoise
from ergmeter.views import gate as gate_view
from ergmeter.views.render.markdown import markdown
from tests.unit.bench.rows import (
    change,
    compare,
    configuration_lines,
    gate,
    matched,
    noisy,
    repeats,
    row,
    write_table,
)

SPEED = "tokens_per_s -3%"
FAST = [1000.0, 1004.0, 996.0]
SLOW = [950.0, 954.0, 946.0]


def gate_text(found: Gate) -> str:
    return markdown(gate_view.gate_document(found))


def cells_text(found: Comparison) -> str:
    return markdown(gate_view.cells_document(found))


def judged(new: list[float], ref: list[float], text: str = SPEED, **asked: Any) -> Gate:
    column = "loss" if text.startswith("loss") else "real_tokens_per_s"
    sides = [as_table(repeats("g", column, values)) for values in (new, ref)]
    return gate(sides[0], sides[1], [text], **asked)


@pytest.mark.parametrize(
    ("text", "low", "high", "scale"),
    [
        ("tokens_per_s -3%", 0.97, None, "ratio"),
        ("peak_memory +2%", None, 1.02, "ratio"),
        ("loss +-1%", 0.99, 1.01, "ratio"),
        ("loss +0.05", None, 0.05, "difference"),
        ("train_loss  ± 1 %", 0.99, 1.01, "ratio"),
        # Without a sign, the catalogue says which way is worse.
        ("mfu 3%", 0.97, None, "ratio"),
        ("energy.joules_per_token 3%", None, 1.03, "ratio"),
    ],
)
def test_a_rule_is_read_as_it_is_written(
    text: str, low: float | None, high: float | None, scale: str
) -> None:
    found = parse_rule(text)
    assert (found.low, found.high, found.scale) == (low, high, scale)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tokens_per_s", "a metric, a sign and a size"),
        ("token_per_s -3%", "did you mean tokens_per_s"),
        ("tokens_per_s -100%", "less than 100 %"),
    ],
)
def test_what_is_no_rule_is_refused_with_what_was_meant(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_rule(text)


def test_a_slowdown_of_five_percent_is_red_and_a_speedup_is_not() -> None:
    assert judged(SLOW, FAST).state == "worse"
    assert judged(SLOW, FAST).exit_code == 1
    assert judged(FAST, SLOW).state == "pass"


def test_the_interval_is_welchs() -> None:
    one = judged(SLOW, FAST).verdicts[0].contrast
    assert one is not None
    # By hand: both sides scatter by s of 4/1000 and 4/950 in logarithms; 4 degrees of freedom but
    # for the slight difference of the two; t is 2.776.
    error = math.sqrt((0.004**2 + (4 / 950) ** 2) / 3)
    assert one.value == pytest.approx(0.95, rel=1e-4)
    assert one.low is not None
    assert math.log(one.value / one.low) == pytest.approx(2.776 * error, rel=0.01)


def test_a_noisy_cell_is_inconclusive_and_not_red() -> None:
    found = judged([900.0, 1010.0, 940.0], [1000.0, 930.0, 1060.0])
    assert found.state == "inconclusive"
    assert found.exit_code == 0
    assert "scatter" in found.verdicts[0].words


def test_strict_takes_inconclusive_for_red() -> None:
    found = judged([900.0, 1010.0, 940.0], [1000.0, 930.0, 1060.0], is_strict=True)
    assert (found.state, found.exit_code) == ("inconclusive", 1)


def test_within_the_rule_but_too_noisy_to_tell_is_inconclusive() -> None:
    assert judged([1000.0, 1100.0, 900.0], [1000.0, 1090.0, 910.0]).state == "inconclusive"


def test_single_runs_need_a_noise_or_a_word_that_it_is_a_plain_threshold() -> None:
    alone = judged([950.0], [1000.0])
    assert alone.state == "inconclusive"
    assert "noise is not known" in alone.verdicts[0].words
    assert "--noise" in gate_text(alone)
    assert (
        judged([950.0], [1000.0], options=CompareOptions(noise=parse_noise(["1%"]))).state
        == "worse"
    )
    assert (
        judged([950.0], [1000.0], options=CompareOptions(noise=parse_noise(["4%"]))).state
        == "inconclusive"
    )
    plain = judged([950.0], [1000.0], is_plain=True)
    assert plain.state == "worse"
    assert "plain threshold" in plain.verdicts[0].words


def test_one_new_run_is_held_against_the_noise_of_the_references_repeats() -> None:
    found = judged([900.0], FAST)
    assert found.state == "worse"
    assert found.verdicts[0].contrast is not None
    assert "REF's repeats" in found.verdicts[0].contrast.method


def test_a_figure_that_never_scatters_is_judged_exactly() -> None:
    def table(size: float) -> Any:
        return as_table(repeats("g", "memory_hf_peak_bytes", [size] * 2))

    assert gate(table(1.03e9), table(1e9), ["peak_memory +2%"]).state == "worse"
    assert gate(table(1.01e9), table(1e9), ["peak_memory +2%"]).state == "pass"


def test_peak_memory_is_of_one_kind_on_both_sides_or_absent() -> None:
    new = as_table(repeats("g", "memory_hf_peak_bytes", [1e9, 1e9]))
    ref = as_table(repeats("g", "memory_nvidia_mean_bytes", [1e9, 1e9]))
    (found,) = gate(new, ref, ["peak_memory +2%"]).verdicts
    assert found.state == "absent"


def test_a_figure_that_only_the_reference_has_is_no_pass() -> None:
    ref = [{**one, "memory_hf_peak_bytes": 1e9} for one in repeats("g", "loss", [1.0, 1.0])]
    new = repeats("g", "loss", [1.0, 1.0])
    rules = ["loss +-1%", "peak_memory +2%"]
    found = gate(as_table(new), as_table(ref), rules, is_strict=True)
    assert found.state == "inconclusive"
    assert found.exit_code == 2  # no cell can be judged by memory
    lenient = gate(as_table(new), as_table(ref), rules, is_strict=True, allow_missing=True)
    assert lenient.exit_code == 1
    back = gate(as_table(ref), as_table(new), rules)  # new figures are none that was lost
    assert back.state == "pass"


def test_a_loss_may_be_held_in_its_own_unit() -> None:
    assert judged([2.10, 2.101], [2.0, 2.001], "loss +0.05").state == "worse"
    assert judged([1.90, 1.901], [2.0, 2.001], "loss +0.05").state == "pass"
    assert judged([1.90, 1.901], [2.0, 2.001], "loss +-1%").state == "worse"


def test_what_failed_is_missing_or_is_not_what_it_says_is_told() -> None:
    ref = [*repeats("a", "loss", [1.0]), *repeats("b", "loss", [1.0]), *repeats("c", "loss", [1.0])]
    new = [
        row(group="a", framework_config="a", status="oom", reason="CUDA out of memory"),
        *repeats("b", "loss", [1.0], claims_broken="attention: sdpa"),
        *repeats("d", "loss", [1.0]),
    ]
    found = gate(
        as_table(new),
        as_table(ref),
        ["loss +-1%"],
        options=CompareOptions(noise={"": RunNoise(0.001)}),
    )
    told = {(one.name, one.state): one.words for one in found.remarks}
    assert "failed in NEW, worked in REF; oom: CUDA out of memory" in told["a", "worse"]
    assert told["b", "worse"] == "claim not met: attention: sdpa"
    assert told["c", "inconclusive"] == "missing in NEW"
    assert ("d", "absent") in told


def test_failing_on_both_sides_is_no_news_and_working_again_is_good() -> None:
    failed = as_table([row(group="a", status="error")])
    worked = as_table(repeats("a", "loss", [1.0]))
    assert gate(failed, failed, ["loss +-1%"]).remarks[0].state == "absent"
    assert gate(failed, failed, ["loss +-1%"]).exit_code == 2  # nothing was judged at all
    assert gate(failed, failed, ["loss +-1%"], allow_missing=True).exit_code == 0
    assert gate(worked, failed, ["loss +-1%"]).remarks[0].state == "pass"


def test_cells_without_shared_ids_match_by_their_settings_in_any_spelling() -> None:
    new = as_table(
        [
            row(group=f"x{beta}", loss=1.0, learning_rate="2.00E-05", settings={"beta": beta})
            for beta in (1, 2)
        ]
    )
    ref = as_table(
        [
            row(group=f"y{beta}", loss=1.0, learning_rate="2e-5", settings={"beta": str(beta)})
            for beta in (1, 2)
        ]
    )
    found = compare(new, ref)
    assert len(found.pairs) == 2
    assert "beta" in matched(found).by


def test_ids_that_look_like_large_numbers_are_told_apart() -> None:
    ids = ("4e5678901234", "7e9999999999", "123456789012", "123456789013")
    table = as_table([row(group=one, framework_config=one, loss=1.0) for one in ids])
    assert len(compare(table, table).pairs) == 4


def test_settings_that_differ_in_the_last_digit_are_told_apart() -> None:
    table = as_table([row(loss=1.0, settings={"limit": one}) for one in (1234567, 1234568)])
    assert len(compare(table, table).pairs) == 2


def test_no_shared_cell_is_an_error() -> None:
    with pytest.raises(UsageError, match="no cell of NEW"):
        gate(
            as_table([row(framework_config="a", loss=1.0)]),
            as_table([row(framework_config="b", loss=1.0)]),
            [SPEED],
        )


# Padded and padding-free training of the same samples: a third of what is counted is padding.
PADDED = row(
    framework_config="none", samples_per_s=5.0, computed_tokens_per_s=2400.0, runtime_s=1500.0
)
FREE = row(
    framework_config="free", samples_per_s=7.0, computed_tokens_per_s=2030.0, runtime_s=1071.0
)
CHOSEN = CompareOptions(
    new_where={"framework_config": "free"}, ref_where={"framework_config": "none"}
)


def test_the_padding_paradox_is_explained() -> None:
    both = as_table([PADDED, FREE])
    found = compare(both, both, options=CHOSEN)
    said = found.pairs[0].padding
    # 2400 / 5 = 480 tokens a sample, 2030 / 7 = 290: 40 % fewer.
    assert "+40 %" in said
    assert "-15 %" in said
    assert "480 tokens in REF and is 290 in NEW" in said
    assert "at least 40 % of what REF counted was padding" in said
    assert said in cells_text(found)


def test_tokens_that_are_not_alike_are_never_red() -> None:
    both = as_table([PADDED, FREE])
    found = gate(both, both, [SPEED], options=CHOSEN, is_plain=True)
    assert found.state == "inconclusive"
    assert "the sides count different tokens" in found.verdicts[0].words


def test_a_slowdown_of_all_cells_shows_over_them_though_none_was_repeated() -> None:
    new, ref = noisy(1, groups=12, runs=1, factor=0.95), noisy(2, groups=12, runs=1)
    found = gate(new, ref, [SPEED])
    red = [one.name for one in found.verdicts if one.state == "worse"]
    assert red == [POOLED]


def alarms(gates: int, *, factor: float = 1.0, **how: Any) -> float:
    """The share of gates that go red, over made-up pairs of benches."""
    red = 0
    for seed in range(gates):
        new = noisy(2 * seed, factor=factor, **how)
        red += gate(new, noisy(2 * seed + 1, **how), [SPEED]).state == "worse"
    return red / gates


def at_most(share: float, gates: int) -> float:
    """A share and three standard errors of as many tries."""
    return share + 3.0 * math.sqrt(share * (1.0 - share) / gates)


@pytest.mark.parametrize(
    ("groups", "spread", "gates"), [(1, 0.02, 200), (1, 0.05, 200), (20, 0.05, 60)]
)
def test_where_nothing_changed_a_whole_gate_is_red_in_one_case_of_twenty_at_most(
    groups: int, spread: float, gates: int
) -> None:
    assert alarms(gates, groups=groups, noise=spread) <= at_most(0.05, gates)


def test_a_slowdown_of_five_percent_is_caught_at_one_percent_noise_with_three_repeats() -> None:
    # The power is 99.5 % (of 1500 simulated pairs of one cell).
    assert alarms(200, factor=0.95, noise=0.01) >= 0.97


def test_a_plain_threshold_would_cry_wolf() -> None:
    # What the gate is for: at 3 % noise, single runs, one in four is beyond 3 % by chance.
    crying = sum(
        gate(
            noisy(2 * seed, runs=1, noise=0.03),
            noisy(2 * seed + 1, runs=1, noise=0.03),
            [SPEED],
            is_plain=True,
        ).state
        == "worse"
        for seed in range(200)
    )
    assert crying > 30


def test_the_command_exits_by_the_gates_word_and_writes_the_markdown(
    tmp_path: Path, erg: Callable[..., tuple[int, str, str]]
) -> None:
    new, ref, summary = (tmp_path / n for n in ("new.parquet", "ref.parquet", "summary.md"))
    for path, values in ((new, SLOW), (ref, FAST)):
        write_table(as_table(repeats("g", "real_tokens_per_s", values)), path)
    code, out, _ = erg("gate", new, ref, "--rule", SPEED, "--format", "json", "--markdown", summary)
    assert code == 1
    document = json.loads(out)
    assert document["state"] == "red"
    assert document["judgements"][0]["rule"] == SPEED
    assert "-5.0 %" in summary.read_text()
    assert erg("gate", ref, new, "--rule", SPEED)[0] == 0


def test_what_is_stated_of_a_cell_that_failed_is_not_held_against_it() -> None:
    failed = row(group="a", status="oom", reason="CUDA out of memory", claims_broken="x: not told")
    table = as_table([failed, *repeats("b", "loss", [1.0])])
    found = gate(table, table, ["loss +-1%"], is_plain=True)
    assert [one.state for one in found.remarks] == ["absent"]
    assert found.exit_code == 0


@pytest.mark.parametrize(
    ("statuses", "state"),
    [
        (["cancelled"], "inconclusive"),
        (["cancelled", "cancelled"], "inconclusive"),
        (["oom", "cancelled"], "worse"),  # one of them failed by itself
    ],
)
def test_a_cell_that_somebody_ended_is_not_done_and_not_red(
    statuses: list[str], state: str
) -> None:
    new = [row(group="a", status=one, repeat=n, reason=one) for n, one in enumerate(statuses)]
    found = gate(as_table(new), as_table(repeats("a", "loss", [1.0])), ["loss +-1%"])
    assert [one.state for one in found.remarks] == [state]
    assert found.state == state


def scenarios(*names: str, column: str = "loss", value: float = 1.0, group: str = "g") -> Any:
    return as_table(
        [
            row(index=i, group=group, scenario=name, repeat=n, **{column: value * (i + 1)})
            for i, name in enumerate(names)
            for n in (1, 2)
        ]
    )


def test_two_scenarios_with_one_command_are_two_cells() -> None:
    found = compare(scenarios("one", "two"), scenarios("one", "two"))
    assert [cell.name for cell in found.pairs] == ["one", "two"]
    assert [change(cell, "loss").repeats for cell in found.pairs] == [(2, 2), (2, 2)]
    assert [change(cell, "loss").means[0] for cell in found.pairs] == pytest.approx([1.0, 2.0])
    assert matched(found).by == ("group", "scenario")


@pytest.mark.parametrize("group", ["g", "another command"])
def test_a_scenario_that_was_renamed_is_matched_and_that_is_told(group: str) -> None:
    found = compare(scenarios("new name"), scenarios("old name", group=group))
    assert len(found.pairs) == 1
    told = "measured differently in 1 of 1 cells: scenario new name in NEW, old name in REF"
    assert told in gate_view.remarks(found)
    # Where REF has two that run the same, the name says which.
    both = compare(scenarios("one"), scenarios("two", "one", group=group))
    assert [change(cell, "loss").means[1] for cell in both.pairs] == pytest.approx([2.0])
    assert [pair.name for pair in matched(both).only_ref] == ["two"]


def test_a_column_to_match_by_that_there_is_not_is_refused() -> None:
    table = as_table([row(group=f"g{n}", loss=1.0, settings={"depth": n}) for n in (1, 2)])
    assert len(compare(table, table, options=CompareOptions(by=("depth",))).pairs) == 2
    with pytest.raises(UsageError, match=r"no column 'dept' in NEW .* did you mean depth"):
        compare(table, table, options=CompareOptions(by=("dept",)))
    with pytest.raises(UsageError, match="no column 'peft_method' in NEW"):
        compare(table, table, options=CompareOptions(by=("peft_method",)))


def test_a_choice_that_no_row_meets_is_told_with_what_there_is() -> None:
    table = as_table([row(group=one, loss=1.0, settings={"mode": one}) for one in ("a", "b")])
    with pytest.raises(UsageError, match=r"no row of NEW has mode=zzz: mode is a, b there"):
        compare(table, table, options=CompareOptions(new_where={"mode": "zzz"}))
    found = compare(
        table, table, options=CompareOptions(new_where={"mode": "a"}, ref_where={"mode": "b"})
    )
    assert "mode a against b" in gate_view.legend(found)[0]
    assert [pair.name for pair in matched(found).pairs] == ["mode a against b"]


def test_where_no_cell_is_shared_the_columns_that_keep_them_apart_are_named() -> None:
    sides = [as_table([row(num_gpus=n, loss=1.0, packing="True")]) for n in (1, 2)]
    with pytest.raises(UsageError, match=r"num_gpus is 1 in NEW and 2 in REF; --by nodes,"):
        compare(sides[0], sides[1])


def test_a_setting_called_nan_has_its_name() -> None:
    table = as_table([row(group=one, loss=1.0, settings={"mode": one}) for one in ("nan", "b")])
    assert [pair.name for pair in matched(compare(table, table)).pairs] == ["mode nan", "mode b"]
    # Nor is it what is not told, where cells are matched by their settings.
    sides = [
        as_table([row(group=f"{side}{m}", loss=1.0, settings={"mode": m}) for m in ("nan", None)])
        for side in "xy"
    ]
    assert len(compare(sides[0], sides[1]).pairs) == 2


def test_a_cell_has_one_name_in_report_and_gate() -> None:
    table = as_table(
        [
            row(
                index=n,
                group=f"g{n}",
                scenario="s",
                loss=1.0,
                per_device_train_batch_size=str(n),
                effective_batch_size=str(n),
            )
            for n in (2, 4)
        ]
    )
    names = [line[0] for line in configuration_lines(table)]
    assert [pair.name for pair in matched(compare(table, table)).pairs] == names
    assert names == ["batch 2", "batch 4"]
    by = compare(table, table, options=CompareOptions(by=("scenario",)))
    assert [pair.name for pair in matched(by).pairs] == ["s"]


def test_a_rule_that_nothing_can_be_judged_by_is_an_error() -> None:
    table = as_table(repeats("g", "loss", [1.0, 1.0]))
    lost = gate(table, table, ["samples_per_s -3%", "loss +-1%"])
    assert (lost.state, lost.exit_code) == ("pass", 2)
    assert lost.why_useless.startswith("nothing to judge by samples_per_s: no cell has it")
    assert "both sides have loss" in lost.why_useless
    allowed = gate(table, table, ["samples_per_s -3%", "loss +-1%"], allow_missing=True)
    assert (allowed.exit_code, allowed.why_useless) == (0, "")
    assert "not judged, since no cell has it on both sides: samples_per_s -3%" in (
        gate_view.gate_method(allowed)
    )
    # A regression is red all the same.
    worse = as_table(repeats("g", "loss", [2.0, 2.0]))
    assert gate(worse, table, ["samples_per_s -3%", "loss +-1%"]).exit_code == 1


def test_a_figure_of_0_has_a_reason_of_its_own() -> None:
    table = as_table([{**one, "samples_per_s": 0.0} for one in repeats("g", "loss", [1.0, 1.0])])
    lost = gate(table, table, ["samples_per_s -3%", "loss +-1%"])
    why = "it is not above 0 on both sides, so there is no ratio to judge"
    assert lost.why_useless.startswith(f"nothing to judge by samples_per_s: {why}")
    assert [one.words for one in lost.verdicts if one.state == "absent"] == [why]


def test_default_rules_may_lack_what_the_reference_never_had() -> None:
    table = as_table(repeats("g", "loss", [1.0, 1.0]))
    assert gate(table, table).exit_code == 0
    speed = as_table([{**one, "real_tokens_per_s": 5.0} for one in repeats("g", "loss", [1.0] * 2)])
    assert gate(table, speed).exit_code == 2  # NEW tells no tokens any more
    nothing = as_table(repeats("g", "loss", [1.0]))
    none = nothing.set_column(nothing.column_names.index("loss"), "loss", [[None]])
    assert gate(none, none).exit_code == 2


def test_the_command_says_which_metric_nothing_has(
    tmp_path: Path, erg: Callable[..., tuple[int, str, str]]
) -> None:
    path = tmp_path / "a.parquet"
    write_table(as_table(repeats("g", "loss", [1.0, 1.0])), path)
    code, out, said = erg("gate", path, path, "--rule", "mfu -3%", "--format", "json")
    assert code == 2
    assert json.loads(out)["exit_code"] == 2
    assert said.count("\n") == 1
    assert said.startswith("erg gate: nothing to judge by mfu: ")
    assert erg("gate", path, path, "--rule", "mfu -3%", "--allow-missing")[0] == 0


def test_runs_that_were_measured_otherwise_are_told() -> None:
    tracked = json.dumps({"train_mem_cpu_alloc_delta": 1})
    plain = {"id": "x", "rates_from": "run"}
    ref = as_table(repeats("g", "loss", [1.0, 1.0], device="A", **plain))
    new = as_table(repeats("g", "loss", [1.0, 1.0], device="B", **{**plain, "raw": tracked}))
    found = gate(new, ref, ["loss +-1%"])
    said = gate_view.gate_method(found)
    begun = "measured differently in 1 of 1 cells: "
    assert f"{begun}device B in NEW, A in REF" in said
    assert f"{begun}the Trainer's memory tracker was on in NEW, off in REF" in said
    assert not [line for line in gate_view.gate_method(gate(ref, ref)) if "otherwise" in line]


def test_a_comparison_says_how_it_is_to_be_read() -> None:
    table = as_table(repeats("g", "real_tokens_per_s", FAST))
    slow = as_table(repeats("g", "real_tokens_per_s", SLOW))
    text = cells_text(compare(slow, table))
    assert "- g, REF to NEW: tokens_per_s 1000 to 950 (3 and 3 runs)" in text
    assert "above (+) or below (-) REF" in text
    assert "the interval of 95 %" in text
    assert "--plain changed nothing" in " ".join(
        gate_view.gate_method(gate(slow, table, [SPEED], is_plain=True))
    )


def test_names_are_no_markup_in_markdown() -> None:
    table = as_table([row(index=i, group=str(i), loss=1.0, scenario=f"<b>|{i}") for i in range(2)])
    for text in (
        cells_text(compare(table, table)),
        gate_text(gate(table, table, ["loss +-1%"])),
    ):
        assert "<b>" not in text
        assert "&lt;b&gt;\\|0" in text
