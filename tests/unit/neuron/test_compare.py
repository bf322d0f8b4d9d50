"""Earlier outputs side by side: ours, the original's, repeats."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ergmeter.compare.comparison import Comparison
from ergmeter.compare.entry import Wanted, measure
from ergmeter.compare.verdicts import Verdict
from ergmeter.errors import FormatError, NotMeasurable, UsageError
from ergmeter.metrics.definitions.compute import MFU
from ergmeter.neuron.earlier_output import (
    AnalysisSource,
    compare_outputs,
    comparison_keys,
    entry_of,
    read_outputs,
)
from ergmeter.neuron.score import NKI, SCORE, THROUGHPUT
from ergmeter.records import Missing, Reading
from ergmeter.views.compare import comparison_document
from ergmeter.views.render.terminal import show


def original(mfu: float, *, offset: float = 1.0, ratio: float = 0.2, **more: Any) -> dict[str, Any]:
    """As the original writes it, with a score of these factors."""
    return {
        "model_config": "config.json", "batch_size": 64, "sequence_length": 4096, "num_nodes": 1,
        "hardware_backend": "trn1", "throughput_seq_per_sec": mfu / 7.37, "mfu_percent": mfu,
        "tflops_per_second": 224.04, "nki_analysis": {"summary": {"overall_nki_ratio": ratio}},
        "training_score": 2.0 * 0.5 * (offset + ratio),
        "training_score_breakdown": {
            "mfu_improvement": 2.0, "throughput_improvement": 0.5, "loss_improvement": 1.0,
            "convergence_rate": 1.0, "nki_flop_ratio": ratio,
        },
    } | more  # fmt: skip


def ours(exact: float, compiler: str, **more: Any) -> dict[str, Any]:
    document = original(exact)
    document["training_score_breakdown"]["score_offset"] = 1.0
    return document | {
        "format": "ergmeter analyze 1", "compat": None, "convention": "exact",
        "conventions": {
            "exact": {"mfu_percent": exact}, "neuron": {"mfu_percent": exact * 224.04 / 197.63}
        },
        "original_count": {"mfu_percent": exact * 224.04 / 197.63},
        "versions": {"neuronxcc": [compiler], "model": {"config_sha256": "abc"}},
    } | more  # fmt: skip


def compared(tmp_path: Path, *documents: dict[str, Any]) -> tuple[Comparison, dict[str, Any]]:
    """The comparison of outputs, and its keys in the JSON."""
    paths = []
    for number, output in enumerate(documents):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(output))
        paths.append(str(path))
    outputs = read_outputs(paths)
    comparison = compare_outputs(outputs)
    return comparison, comparison_keys(comparison, outputs)


def verdict(comparison: Comparison, key: str) -> Verdict:
    """The verdict on a metric of the only pair."""
    (pair,) = comparison.pairs
    (of_key,) = (each for each in pair.verdicts if each.measure.key == key)
    return of_key


def test_repeats_have_a_mean_and_a_spread(tmp_path: Path) -> None:
    comparison, keys = compared(tmp_path, *(ours(mfu, "2.18") for mfu in (13.0, 14.0, 15.0)))
    (group,) = keys["groups"]
    spread = group["metrics"]["mfu_percent"]
    assert (spread["count"], spread["mean"], spread["min"], spread["max"]) == (3, 14.0, 13.0, 15.0)
    assert spread["standard_deviation"] == pytest.approx(1.0)  # sqrt((1 + 0 + 1) / 2)
    assert keys["convention"] == "exact"
    assert any("repeats of one run" in note for note in comparison.notes)


def test_another_compiler_is_another_group_and_says_what_changed(tmp_path: Path) -> None:
    comparison, keys = compared(
        tmp_path, ours(13.0, "2.16"), ours(14.0, "2.18"), ours(14.2, "2.18")
    )
    assert comparison.group_by == ("neuronxcc",)
    assert [group.name for group in comparison.groups] == ["2.16", "2.18"]
    first, second = keys["groups"]
    assert len(second["outputs"]) == 2
    assert second["changed"] == {"neuronxcc": ["2.16", "2.18"]}
    assert first["changed"] == {}
    assert first["metrics"]["mfu_percent"]["standard_deviation"] is None
    other = ours(14.0, "2.18", versions={"neuronxcc": ["2.18"], "model": {"config_sha256": "d"}})
    _, keys = compared(tmp_path, ours(14.0, "2.18"), other)
    assert keys["groups"][1]["changed"] == {"config_sha256": ["abc", "d"]}


def test_a_change_is_against_the_group_before(tmp_path: Path) -> None:
    _, keys = compared(tmp_path, *(ours(13.0, compiler) for compiler in ("1", "2", "3")))
    assert keys["groups"][2]["changed"] == {"neuronxcc": ["2", "3"]}


def test_inputs_that_differ_are_the_question_and_no_refusal(tmp_path: Path) -> None:
    comparison, _ = compared(
        tmp_path, ours(13.0, "2.18"), ours(14.0, "2.18", batch_size=32, sequence_length=2048)
    )
    assert comparison.group_by == ("batch_size", "seq_len")
    assert comparison.is_comparable
    assert verdict(comparison, MFU).contrast is not None


def test_the_original_s_output_is_compared_under_its_own_count(tmp_path: Path) -> None:
    comparison, keys = compared(tmp_path, original(15.477), ours(15.477 * 197.63 / 224.04, "2.18"))
    assert keys["convention"] == "the original's"
    values = [group["metrics"]["mfu_percent"]["mean"] for group in keys["groups"]]
    assert values == pytest.approx([15.477, 15.477])
    assert any("all are compared under the original's" in note for note in comparison.notes)
    words = verdict(comparison, SCORE).words
    assert "not comparable: convention of the score's MFU differs" in words
    assert "(the original's / exact)" in words
    assert verdict(comparison, NKI).state == "absent"
    assert "method of counting graphs differs" in verdict(comparison, NKI).words
    # What one of them does not say is no change.
    assert keys["groups"][1]["changed"] == {"counted by": ["the original", "erg analyze"]}
    assert keys["groups"][1]["not_comparable"] == ["overall_nki_ratio", "training_score"]


def test_mfu_keeps_its_interval_under_another_convention(tmp_path: Path) -> None:
    obtained = {"mfu_percent": {"low": 12.0, "high": 14.0}}
    comparison, _ = compared(tmp_path, original(15.0), ours(13.0, "2.18", obtained=obtained))
    mfu = comparison.groups[1].entries[0].figures[MFU]
    assert isinstance(mfu, Reading)
    more = 224.04 / 197.63
    assert (mfu.low, mfu.value, mfu.high) == pytest.approx((0.12 * more, 0.13 * more, 0.14 * more))


def test_what_has_no_count_in_common_is_not_compared(tmp_path: Path) -> None:
    alone = ours(13.0, "2.18", original_count=None)
    comparison, keys = compared(tmp_path, original(15.0), alone)
    assert keys["convention"] is None
    assert "mfu_percent" not in keys["groups"][0]["metrics"]
    assert "no convention in common" in comparison.notes[0]


def test_an_offset_that_was_not_recorded_is_found_from_the_factors(tmp_path: Path) -> None:
    comparison, keys = compared(tmp_path, original(15.0, offset=1.0), original(15.0, offset=0.1))
    (group,) = comparison.groups  # the offset is no input of the training
    assert [entry.facts["score_offset"] for entry in group.entries] == ["1", "0.1"]
    assert "training_score" not in keys["groups"][0]["metrics"]
    with pytest.raises(NotMeasurable, match=r"offset of the score differs \(0\.1, 1"):
        comparison.mean(group, measure(SCORE))


def test_the_compiler_of_an_original_s_output_is_in_its_files(tmp_path: Path) -> None:
    files = [{"neuronxcc_version": "neuronxcc-2.18"}, {"status": "error"}]
    nki = {"summary": {"overall_nki_ratio": 0.2}, "per_file_metrics": files}
    comparison, keys = compared(tmp_path, original(15.0, nki_analysis=nki), original(15.0))
    assert keys["groups"][0]["inputs"]["neuronxcc"] == "neuronxcc-2.18"
    assert [group.name for group in comparison.groups] == ["neuronxcc-2.18", "not stated"]


def test_a_value_that_is_null_is_left_out_of_the_mean(tmp_path: Path) -> None:
    _, keys = compared(tmp_path, ours(13.0, "2.18"), ours(13.0, "2.18", training_score=None))
    assert keys["groups"][0]["metrics"]["training_score"]["count"] == 1


def test_an_impossible_mfu_is_marked_and_in_no_mean(tmp_path: Path) -> None:
    _, keys = compared(tmp_path, original(737.0), original(15.0))
    (group,) = keys["groups"]
    assert group["metrics"]["mfu_percent"]["count"] == 1
    first = group["outputs"][0]
    assert first["mfu_percent"] is None
    assert set(first["impossible"]) == {"mfu_percent", "training_score"}


def test_files_that_are_no_outputs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    with pytest.raises(UsageError, match="two or more earlier outputs; got 1"):
        read_outputs([str(path)])
    other = str(tmp_path / "b.json")
    with pytest.raises(FormatError, match="not an output of erg analyze"):
        read_outputs([str(path), other])
    path.write_text("{")
    with pytest.raises(FormatError, match="can't be read as JSON"):
        read_outputs([str(path), other])
    with pytest.raises(FormatError, match="No such file"):
        read_outputs([other, str(path)])
    with pytest.raises(UsageError, match="is given twice"):
        read_outputs([str(path), str(tmp_path / "." / ".." / tmp_path.name / "a.json")])


def test_every_output_is_listed_on_the_terminal(tmp_path: Path) -> None:
    mfus = (13.123, 13.456, 13.789)
    shown = text_of(tmp_path, *(ours(mfu, "2.16") for mfu in mfus), ours(13.4559, "2.18"))
    lines = [line.split() for line in shown.splitlines()]
    assert ["2.16", "3", "13.5", "%", "1.825", "20", "%", "1.2"] in lines
    assert any(line[1].endswith("2.json") and line[2] == "13.8" for line in lines if len(line) > 9)
    assert "…" not in shown


@pytest.mark.parametrize("mfu", ["NaN", '"x"', "true"])
def test_an_mfu_that_is_no_number_is_refused(tmp_path: Path, mfu: str) -> None:
    path, other = tmp_path / "a.json", tmp_path / "b.json"
    path.write_text(f'{{"mfu_percent": {mfu}}}')
    other.write_text('{"mfu_percent": 12.0}')
    with pytest.raises(FormatError, match=r"a\.json: mfu_percent must be a number or null; got"):
        read_outputs([str(path), str(other)])
    with pytest.raises(FormatError, match="can't be read: Is a directory"):
        read_outputs([str(tmp_path), str(other)])


def text_of(tmp_path: Path, *documents: dict[str, Any]) -> str:
    comparison, _ = compared(tmp_path, *documents)
    console = Console(width=240, file=StringIO())
    show(comparison_document(comparison, lists_runs=True), console)
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    return shown


def test_a_mean_over_some_of_the_repeats_says_over_how_many(tmp_path: Path) -> None:
    absent = ours(13.0, "2.16") | {"training_score": None}
    assert "1 of 2 runs of trn1 have it" in text_of(tmp_path, ours(13.0, "2.16"), absent)


def test_a_difference_is_shown_where_the_repeats_do_not_explain_it(tmp_path: Path) -> None:
    repeats = [ours(mfu, "2.16") for mfu in (13.0, 13.1, 13.2)]
    near, far = (
        compared(tmp_path, *repeats, *(ours(mfu + more, "2.18") for mfu in (13.0, 13.1, 13.2)))[0]
        for more in (0.01, 5.0)
    )
    assert verdict(near, MFU).state == "not shown"
    assert verdict(far, MFU).state == "better"
    once, _ = compared(tmp_path, ours(13.0, "2.16"), ours(14.0, "2.18"))
    assert verdict(once, MFU).state == "no interval"


def test_scores_that_are_not_comparable_have_no_change(tmp_path: Path) -> None:
    comparison, keys = compared(tmp_path, original(15.0), original(15.0, offset=0.1, batch_size=32))
    assert verdict(comparison, SCORE).state == "absent"
    assert keys["groups"][1]["not_comparable"] == ["training_score"]


def test_lora_is_an_object_for_programs_and_groups_by_its_settings(tmp_path: Path) -> None:
    adapters = {"r": 16, "targets": ["q_proj", "v_proj"]}
    comparison, keys = compared(
        tmp_path, ours(13.0, "2.18", lora=None), ours(13.0, "2.18", lora=adapters)
    )
    assert keys["groups"][1]["changed"] == {"lora": ["none", adapters]}
    assert [group.name for group in comparison.groups] == ["full", "lora"]
    higher = ours(13.0, "2.18", lora=adapters | {"r": 32})
    comparison, _ = compared(tmp_path, ours(13.0, "2.18", lora=adapters), higher)
    assert [group.name for group in comparison.groups] == ["16", "32"]


def test_an_output_is_an_entry_with_facts_and_readings(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    obtained = {"mfu_percent": {"low": 12.0, "high": 14.0}}
    output = ours(13.0, "2.18", obtained=obtained, training_score=None)
    path.write_text(json.dumps(output | {"missing": {"training_score": "no graphs"}}))
    entry = entry_of(str(path))
    mfu = Reading(0.13, "frac", "reported", 0.12, 0.14, note="exact")
    assert entry.figures[MFU] == mfu
    assert entry.value(THROUGHPUT) == 13.0 / 7.37
    assert entry.value(NKI) == 0.2
    assert entry.figures[SCORE] == Missing("no graphs")
    facts = {"batch_size": "64", "sequence_length": "4096", "neuronxcc": "2.18"}
    assert facts.items() <= entry.facts.items()
    assert entry.facts["convention"] == "exact"
    assert (entry.facts["model"], entry.facts["seq_len"], entry.facts["device"]) == (
        *("abc", "4096", "trn1"),
    )
    assert "tuning" not in entry.facts  # an output that does not record adapters
    adapters = {"r": 16, "targets": ["v_proj", "q_proj"]}
    path.write_text(json.dumps(ours(13.0, "2.18", lora=adapters)))
    facts = {"tuning": "lora", "lora_r": "16", "lora_targets": "q_proj v_proj"}
    assert facts.items() <= entry_of(str(path)).facts.items()


def test_an_entry_of_an_impossible_mfu_has_the_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(original(737.0)))
    entry = entry_of(str(path))
    for key, value in ((MFU, 7.37), (SCORE, 1.2)):
        reading = entry.figures[key]
        assert isinstance(reading, Reading)
        assert reading.value == pytest.approx(value)
        assert "above 100 %: an input is wrong" in reading.impossible
    assert entry.value(MFU) is None


def test_an_output_is_recognised_by_its_first_keys(tmp_path: Path) -> None:
    path, other = tmp_path / "a.json", tmp_path / "b.json"
    path.write_text(json.dumps(original(15.0)))
    other.write_text('{"hidden_size": 8}')
    source = AnalysisSource()
    assert [source.recognises(file) for file in (path, other, tmp_path)] == [True, False, False]
    (entry,) = source.read(path, Wanted()).entries
    assert entry.value(MFU) == 0.15
    assert entry.source == str(path)
