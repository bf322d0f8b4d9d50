"""Groups against a baseline: what is refused, what could explain it, what is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ergmeter.compare.comparison import Comparison, GroupPair, compare
from ergmeter.compare.entry import Entry, SourceEntries
from ergmeter.compare.pairing import CompareOptions
from ergmeter.compare.verdicts import Verdict
from ergmeter.errors import UsageError
from ergmeter.records import Missing, Reading, Result
from ergmeter.stats.ratio import PAIRED, WELCH

RATE, JOULES, MEMORY = (
    "throughput.tokens_per_s",
    "energy.joules_per_token",
    "memory.device_peak_bytes",
)
FACTS = {
    "model": "m",
    "dataset": "sft",
    "data_sha256": "ab" * 32,
    "seq_len": "1024",
    "batch_size": "4",
    "grad_accum": "2",
    "tuning": "lora",
    "lora_r": "32",
    "device": "H200",
    "precision": "bf16",
    "steps": "100",
}


def entry(backend: str, number: int, rate: float, **more: object) -> Entry:
    """A run; figures by key of the catalogue, the rest are facts."""
    figures: dict[str, Result] = {
        RATE: Reading(rate, "tokens/s", "measured"),
        "time.window_s": Reading(30.0, "s", "measured"),
        "steps.count": Reading(50.0, "steps", "measured"),
    }
    facts = {**FACTS, "backend": backend, "seed": str(number)}
    for name, value in more.items():
        key = name.replace("__", ".")
        if "." in key:
            figures[key] = value if isinstance(value, Missing) else Reading(value, "1", "measured")  # type: ignore[arg-type]
        elif value is None:
            facts.pop(name, None)
        else:
            facts[name] = str(value)
    return Entry(f"{backend}-{number}", "ledger.csv", facts, figures)


def group(backend: str, rates: Sequence[float], **more: object) -> list[Entry]:
    return [entry(backend, number, rate, **more) for number, rate in enumerate(rates)]


SLOW = [1000.0, 1010.0, 990.0]
FAST = [1310.0, 1325.0, 1295.0]


def compared(*groups: list[Entry], **options: object) -> Comparison:
    entries = tuple(one for own in groups for one in own)
    return compare(SourceEntries(entries), replace(CompareOptions(), **options))  # type: ignore[arg-type]


def only(found: Comparison) -> GroupPair:
    (pair,) = found.pairs
    return pair


def words(pair: GroupPair, key: str = RATE) -> str:
    return said(pair, key).words


def said(pair: GroupPair, key: str = RATE) -> Verdict:
    (found,) = [one for one in pair.verdicts if one.measure.key == key]
    return found


def test_who_is_faster_and_how_sure_that_is() -> None:
    pair = only(compared(group("bnb", SLOW), group("unsloth", FAST)))
    assert words(pair).startswith("unsloth 1.31x faster, 95 % interval 1.3")
    assert said(pair).state == "better"
    # The formula of SFT-Play's guide, bnb over unsloth, would call this a "speedup" of 0.76x.
    contrast = said(pair).contrast
    assert contrast is not None
    assert contrast.value == pytest.approx(
        np.prod(np.array(FAST) / np.array(SLOW)) ** (1 / 3), rel=1e-12
    )


def test_another_baseline_turns_it_round() -> None:
    found = compared(group("bnb", SLOW), group("unsloth", FAST), baseline="unsloth")
    assert words(only(found)).startswith("bnb 1.31x slower, 95 % interval 1.3")
    with pytest.raises(UsageError, match="did you mean 'unsloth'"):
        compared(group("bnb", SLOW), group("unsloth", FAST), baseline="unslot")


def test_less_energy_is_better() -> None:
    found = compared(
        group("bnb", SLOW, energy__joules_per_token=0.20),
        group("unsloth", FAST, energy__joules_per_token=0.15),
    )
    one = said(only(found), JOULES)
    assert one.words == "unsloth 25 % less energy per token, the same in every repeat"
    assert one.state == "better"


def test_no_difference_says_what_would_show_one() -> None:
    pair = only(compared(group("a", [1000, 1020, 980]), group("b", [985, 1030, 1001])))
    assert words(pair).startswith("no difference in speed shown (0.9")
    assert "repeats of each would show 2 %" in words(pair)
    assert said(pair).needed is not None


def test_no_difference_where_one_would_have_shown() -> None:
    """A scatter of 0.1 %: 2 % could not have hidden."""
    pair = only(compared(group("a", [1000, 1001, 999]), group("b", [999, 1000.5, 1000])))
    assert words(pair).endswith("a difference of 2 % would have shown")


def test_one_run_of_each_has_no_verdict() -> None:
    pair = only(compared(group("a", [1000]), group("b", [1310])))
    assert words(pair).startswith("b 1.31x faster; one run of each: no interval")
    assert said(pair).state == "no interval"


def test_seeds_that_match_make_pairs() -> None:
    pair = only(compared(group("bnb", SLOW), group("unsloth", FAST)))
    assert said(pair).contrast.method == PAIRED  # type: ignore[union-attr]
    other = [entry("unsloth", n + 7, rate) for n, rate in enumerate(FAST)]
    pair = only(compared(group("bnb", SLOW), other))
    assert said(pair).contrast.method == WELCH  # type: ignore[union-attr]
    assert "seeds differ" in pair.fairness.remarks[0]


def test_pairs_are_matched_by_seed_and_not_by_order() -> None:
    pair = only(compared(group("bnb", SLOW), group("unsloth", FAST)))
    turned = only(compared(group("bnb", SLOW), group("unsloth", FAST)[::-1]))
    assert said(pair).contrast == said(turned).contrast


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"seq_len": "2048"}, "sequence length differs (1024 / 2048)"),
        ({"model": "other"}, "model differs (m / other)"),
        ({"data_sha256": "cd" * 32}, "data differs (abababababab.. / cdcdcdcdcdcd..)"),
        ({"grad_accum": "4"}, "batch (size x accumulation x processes) differs (8 / 16)"),
        ({"tuning": "full"}, "what is tuned differs (lora / full)"),
        ({"lora_r": "16"}, "LoRA rank differs (32 / 16)"),
        ({"device": "A100"}, "device differs (H200 / A100)"),
    ],
)
def test_other_work_is_not_comparable(changed: dict[str, str], refusal: str) -> None:
    groups = group("bnb", SLOW), group("unsloth", FAST, **changed)
    found = compared(*groups)
    assert only(found).fairness.refusals[0] == refusal
    assert not found.is_comparable
    assert not only(found).verdicts
    anyway = compared(*groups, anyway=True)
    assert words(only(anyway)).startswith("unsloth 1.31x faster")
    assert only(anyway).fairness.refusals[0] == refusal


def test_the_same_batch_split_otherwise_is_comparable() -> None:
    pair = only(compared(group("a", SLOW), group("b", FAST, batch_size="8", grad_accum="1")))
    assert pair.is_comparable
    assert pair.fairness.explanations == ("batch size (4 / 8)", "accumulation (2 / 1)")


def test_what_belongs_to_the_question_stands_beside_the_verdict() -> None:
    pair = only(
        compared(
            group("torch", SLOW, optimizer="AdamW"),
            group("bnb", FAST, optimizer="PagedAdamW8bit", tuning="qlora", bits="4"),
        )
    )
    assert pair.is_comparable
    assert pair.fairness.explanations == ("optimizer (AdamW / PagedAdamW8bit)", "bits (none / 4)")


def test_what_is_asked_is_not_held_against_it() -> None:
    groups = group("a", SLOW), group("a", FAST, seq_len="2048")
    found = compared(*groups, group_by=("seq_len",))
    assert [one.name for one in found.groups] == ["1024", "2048"]
    assert found.is_comparable


def test_a_group_that_mixes_work_is_refused() -> None:
    mixed = [*group("bnb", SLOW), entry("bnb", 9, 2000.0, seq_len="2048")]
    found = compared(mixed, group("unsloth", FAST))
    assert (
        "bnb mixes runs of different sequence length (1024, 2048)" in only(found).fairness.refusals
    )


def test_a_short_window_is_refused() -> None:
    short = group("unsloth", FAST, time__window_s=3.2)
    assert (
        "unsloth-0: a steady window of 3.2 s, but at least 5 s are needed"
        in only(compared(group("bnb", SLOW), short)).fairness.refusals
    )
    few = group("unsloth", FAST, steps__count=7)
    assert (
        "unsloth-0: 7 steady steps, but at least 10 are needed"
        in only(compared(group("bnb", SLOW), few)).fairness.refusals
    )


def test_losses_of_other_steps_are_not_compared_but_rates_are() -> None:
    pair = only(
        compared(
            group("a", SLOW, training__loss=2.0),
            group("b", FAST, training__loss=1.0, steps="200"),
        )
    )
    assert words(pair).startswith("b 1.31x faster")
    assert "not comparable: number of steps differs (100 / 200)" in words(pair, "training.loss")


def test_a_lower_loss_is_told_by_its_difference() -> None:
    a = [entry("a", n, 1000.0 + n, training__eval_loss=2.0 + 0.001 * n) for n in range(3)]
    b = [entry("b", n, 1000.0 + n, training__eval_loss=1.9 + 0.0011 * n) for n in range(3)]
    one = said(only(compared(a, b)), "training.eval_loss")
    assert one.words.startswith("b evaluation loss 0.0999 lower, 95 % interval 0.0")
    assert one.state == "better"


def test_runs_that_were_not_interleaved_are_told() -> None:
    early = [entry("a", n, 1000.0 + n, started=f"2026-11-16T0{n}:00:00Z") for n in range(3)]
    late = [entry("b", n, 1000.0 - n, started=f"2026-11-16T1{n}:00:00Z") for n in range(3)]
    assert "interleave" in only(compared(early, late)).fairness.remarks[0]
    among = [entry("b", n, 999.0, started=f"2026-11-16T0{n}:30:00Z") for n in range(3)]
    assert not only(compared(early, among)).fairness.remarks


def test_what_one_side_does_not_say_is_not_checked_and_said_so() -> None:
    pair = only(compared(group("a", SLOW), group("b", FAST, data_sha256=None)))
    assert pair.is_comparable
    assert pair.fairness.unknown == ("data",)


def test_what_neither_side_says_of_the_work_is_named_too() -> None:
    silent = {"tuning": None, "lora_r": None, "dataset": None, "steps": None}
    pair = only(compared(group("a", SLOW, **silent), group("b", FAST, **silent)))
    assert pair.is_comparable
    assert pair.fairness.unknown == ("what is tuned", "number of steps")
    # Without checksums nothing says that the data are the same.
    silent["data_sha256"] = None
    pair = only(compared(group("a", SLOW, **silent), group("b", FAST, **silent)))
    assert pair.fairness.unknown == ("data set", "what is tuned", "number of steps")


def test_other_flops_of_a_token_stand_beside_the_verdict() -> None:
    full = group("a", SLOW, flops_per_token="6.76 GFLOP, exact")
    lora = group("b", FAST, flops_per_token="4.708 GFLOP, exact")
    pair = only(compared(full, lora))
    assert pair.fairness.explanations == (
        "FLOPs per token (6.76 GFLOP, exact / 4.708 GFLOP, exact)",
    )


def test_an_assumption_widens_the_interval() -> None:
    """Each may be half of what it is taken for or a tenth more: 25 % less is not shown by that.

    0.15 / 2 over 0.20 x 1.1 is 0.34; 0.15 x 1.1 over 0.20 / 2 is 1.65.
    """

    def of(own: list[Entry], value: float, assumed: frozenset[str]) -> list[Entry]:
        reading = Reading(value, "J/token", "assumed", value / 2, value * 1.1, "not measured")
        return [
            replace(one, figures={**one.figures, JOULES: reading}, assumed=assumed) for one in own
        ]

    both = [(group("a", SLOW), 0.20), (group("b", FAST), 0.15)]
    found = said(only(compared(*(of(*one, frozenset({JOULES})) for one in both))), JOULES)
    assert found.state == "not shown"
    assert found.words == "no difference in energy per token shown (0.34 to 1.65); not measured"
    # Low and high of other figures are of one run's own steps, and repeats say more of them.
    found = said(only(compared(*(of(*one, frozenset()) for one in both))), JOULES)
    assert found.state == "better"


def test_the_front_is_who_nobody_beats() -> None:
    """c has the least memory, b is better than a in everything."""
    found = compared(
        group("a", SLOW, energy__joules_per_token=0.2, memory__device_peak_bytes=3e9),
        group("b", FAST, energy__joules_per_token=0.1, memory__device_peak_bytes=3e9),
        group("c", SLOW, energy__joules_per_token=0.2, memory__device_peak_bytes=1e9),
    )
    assert found.front is not None
    assert found.front.axes == (RATE, JOULES, MEMORY)
    assert found.front.on == ("b", "c")
    assert found.front.beaten == {"a": ("b", "c")}


def test_a_third_group_does_not_push_another_off_the_front() -> None:
    """b is shown to have less memory than a; Holm over more tests must not hide that."""

    def runs(name: str, rates: list[float], memory: list[float]) -> list[Entry]:
        return [
            entry(name, number, rate, memory__device_peak_bytes=size)
            for number, (rate, size) in enumerate(zip(rates, memory, strict=True))
        ]

    a = runs("a", [1100, 1101, 1099, 1100.5], [20.7e9, 20.9e9, 20.5e9, 20.65e9])
    b = runs("b", [1000, 1001, 999, 1000.5], [20.0e9, 20.4e9, 19.9e9, 20.35e9])
    c = runs("c", [950, 951, 949, 950.5], [20.4e9, 20.9e9, 19.9e9, 20.3e9])
    for groups in ((a, b), (a, b, c)):
        found = compared(*groups)
        assert found.front is not None
        assert "b" in found.front.on


def test_noise_beats_nobody() -> None:
    found = compared(
        group("a", [1000, 1010, 990], memory__device_peak_bytes=2e9),
        group("b", [1003, 1007, 991], memory__device_peak_bytes=2e9),
    )
    assert found.front is not None
    assert found.front.on == ("a", "b")


def test_a_figure_that_some_runs_lack_is_told() -> None:
    runs = group("a", SLOW, energy__joules_per_token=0.2)
    runs[1] = entry("a", 1, 1010.0, energy__joules_per_token=Missing("no sensor"))
    found = compared(runs, group("b", FAST, energy__joules_per_token=0.2))
    assert "energy per token: 2 of 3 runs of a have it" in found.notes


def test_a_figure_that_nobody_has_is_a_note_with_its_reason() -> None:
    lacking = {"energy__joules_per_token": Missing("no sensor")}
    found = compared(group("a", SLOW, **lacking), group("b", FAST, **lacking))
    assert JOULES not in [one.key for one in found.measures]
    assert "no energy per token: no sensor" in found.notes


def test_one_group_is_shown_and_said_to_be_alone() -> None:
    found = compared(group("a", SLOW))
    assert not found.pairs
    assert "one group: nothing to compare it with" in found.notes
    assert not found.is_comparable


def test_a_column_that_nobody_has_is_refused() -> None:
    with pytest.raises(UsageError, match="no run has a column 'colour'; there are backend"):
        compared(group("a", SLOW), group_by=("colour",))
    with pytest.raises(UsageError, match="nothing to compare: x: broken"):
        compare(SourceEntries((), ("x: broken",)), CompareOptions())


def test_who_does_not_say_the_column_is_left_out() -> None:
    silent = replace(entry("c", 1, 5.0), facts={"model": "m"})
    found = compared(group("a", SLOW), group("b", FAST), [silent])
    assert found.left_out == ("c-1: it does not state its backend",)


def test_without_backends_the_sources_are_the_groups() -> None:
    a = [replace(one, argument="runs/a") for one in group("x", SLOW)]
    b = [replace(one, argument="runs/b") for one in group("x", FAST)]
    found = compared(a, b)
    assert found.group_by == ("source",)
    assert [one.name for one in found.groups] == ["a", "b"]  # without the folder they share


def test_where_nothing_differs_the_whole_tool_claims_about_one_in_twenty() -> None:
    """Through all of it, verdicts and all: 4 standard errors of 400 fair comparisons."""
    rng = np.random.default_rng(11)
    trials = 400
    claims = 0
    for _ in range(trials):
        a, b = (np.exp(rng.normal(8.0, 0.02, 4)).tolist() for _ in "ab")
        pair = only(compared(group("a", a), group("b", b), metrics=("tok_per_s",)))
        claims += said(pair).state in ("better", "worse")
    assert abs(claims - 0.05 * trials) < 4 * (trials * 0.05 * 0.95) ** 0.5
