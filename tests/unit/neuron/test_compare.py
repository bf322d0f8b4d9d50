"""Earlier outputs side by side: ours, the original's, repeats."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ergmeter.compare.entry import Wanted
from ergmeter.errors import FormatError, UsageError
from ergmeter.metrics.definitions.compute import MFU
from ergmeter.neuron.compare import OutputComparison, compare
from ergmeter.neuron.earlier_output import AnalysisSource, entry_of, read_outputs
from ergmeter.neuron.metrics import NKI, SCORE, THROUGHPUT
from ergmeter.records import Missing, Reading
from ergmeter.views.analyze.compare import document
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


def compared(tmp_path: Path, *documents: dict[str, Any]) -> OutputComparison:
    paths = []
    for number, output in enumerate(documents):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(output))
        paths.append(str(path))
    return compare(read_outputs(paths))


def test_repeats_have_a_mean_and_a_spread(tmp_path: Path) -> None:
    found = compared(tmp_path, *(ours(mfu, "2.18") for mfu in (13.0, 14.0, 15.0)))
    (group,) = found.groups
    spread = group.spreads["mfu_percent"]
    assert (spread.count, spread.mean, spread.min, spread.max) == (3, 14.0, 13.0, 15.0)
    assert spread.standard_deviation == pytest.approx(1.0)  # sqrt((1 + 0 + 1) / 2)
    assert found.convention == "exact"
    assert found.notes == ()


def test_another_compiler_is_another_group_and_says_what_changed(tmp_path: Path) -> None:
    found = compared(tmp_path, ours(13.0, "2.16"), ours(14.0, "2.18"), ours(14.2, "2.18"))
    first, second = found.groups
    assert len(second.outputs) == 2
    assert second.changed == {"neuronxcc": ("2.16", "2.18")}
    assert first.spreads["mfu_percent"].standard_deviation is None
    other = ours(14.0, "2.18", versions={"neuronxcc": ["2.18"], "model": {"config_sha256": "d"}})
    changed = compared(tmp_path, ours(14.0, "2.18"), other).groups[1].changed
    assert changed == {"config_sha256": ("abc", "d")}


def test_the_original_s_output_is_compared_under_its_own_count(tmp_path: Path) -> None:
    found = compared(tmp_path, original(15.477), ours(15.477 * 197.63 / 224.04, "2.18"))
    assert found.convention == "the original's"
    values = [group.spreads["mfu_percent"].mean for group in found.groups]
    assert values == pytest.approx([15.477, 15.477])
    assert any("all are shown under the original's" in note for note in found.notes)
    assert any("scores hold MFUs under exact and the original's" in note for note in found.notes)
    # What one of them does not say is no change.
    assert found.groups[1].changed == {"counted by": ("the original", "erg analyze")}
    assert found.groups[1].not_comparable == ("overall_nki_ratio", "training_score")


def test_what_has_no_count_in_common_is_not_compared(tmp_path: Path) -> None:
    alone = ours(13.0, "2.18", original_count=None)
    found = compared(tmp_path, original(15.0), alone)
    assert found.convention is None
    assert "mfu_percent" not in found.groups[0].spreads
    assert "no convention in common" in found.notes[0]


def test_an_offset_that_was_not_recorded_is_found_from_the_factors(tmp_path: Path) -> None:
    found = compared(tmp_path, original(15.0, offset=1.0), original(15.0, offset=0.1))
    assert [output.score_offset for group in found.groups for output in group.outputs] == [1.0, 0.1]
    assert any("offsets 0.1 and 1" in note for note in found.notes)


def test_the_compiler_of_an_original_s_output_is_in_its_files(tmp_path: Path) -> None:
    files = [{"neuronxcc_version": "neuronxcc-2.18"}, {"status": "error"}]
    nki = {"summary": {"overall_nki_ratio": 0.2}, "per_file_metrics": files}
    found = compared(tmp_path, original(15.0, nki_analysis=nki), original(15.0))
    assert found.groups[0].inputs["neuronxcc"] == "neuronxcc-2.18"
    assert len(found.groups) == 2


def test_a_value_that_is_null_is_left_out_of_the_mean(tmp_path: Path) -> None:
    found = compared(tmp_path, ours(13.0, "2.18"), ours(13.0, "2.18", training_score=None))
    assert found.groups[0].spreads["training_score"].count == 1


def test_files_that_are_no_outputs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    with pytest.raises(UsageError, match="two or more earlier outputs; got 1"):
        read_outputs([str(path)])
    other = str(tmp_path / "b.json")
    with pytest.raises(FormatError, match="no output of erg analyze"):
        read_outputs([str(path), other])
    path.write_text("{")
    with pytest.raises(FormatError, match="can't be read as JSON"):
        read_outputs([str(path), other])
    with pytest.raises(UsageError, match="no such file"):
        read_outputs([other, str(path)])
    with pytest.raises(UsageError, match="is given twice"):
        read_outputs([str(path), str(tmp_path / "." / ".." / tmp_path.name / "a.json")])


def test_on_a_terminal_of_80_columns_every_value_is_whole(tmp_path: Path) -> None:
    mfus = (13.123, 13.456, 13.789)
    found = compared(tmp_path, *(ours(mfu, "2.16") for mfu in mfus), ours(13.4559, "2.18"))
    shown = text_of(found)
    lines = [line.split() for line in shown.splitlines()]
    assert ["mean", "of", "3", "13.456", "1.8258", "0.2", "1.2"] in lines
    assert ["±", "standard", "deviation", "0.33", "0.045", "0", "0"] in lines
    assert ["2.json", "13.789", "1.871", "0.2", "1.2"] in lines
    assert "MFU % +0.0 %" in shown  # a thousandth less
    assert "…" not in shown


@pytest.mark.parametrize("mfu", ["NaN", '"x"', "true"])
def test_an_mfu_that_is_no_number_is_refused(tmp_path: Path, mfu: str) -> None:
    path, other = tmp_path / "a.json", tmp_path / "b.json"
    path.write_text(f'{{"mfu_percent": {mfu}}}')
    other.write_text('{"mfu_percent": 12.0}')
    with pytest.raises(FormatError, match=r"a\.json: mfu_percent must be a number or null; got"):
        read_outputs([str(path), str(other)])
    with pytest.raises(UsageError, match="can't be read: Is a directory"):
        read_outputs([str(tmp_path), str(other)])


def test_a_mean_over_some_of_the_repeats_says_over_how_many(tmp_path: Path) -> None:
    known = ours(13.0, "2.16")
    absent = ours(13.0, "2.16") | {"training_score": None}
    shown = text_of(compared(tmp_path, known, absent))
    (mean,) = (line for line in shown.splitlines() if line.startswith("mean of 2"))
    assert mean.split()[-3:] == ["1.2", "(of", "1)"]


def text_of(found: OutputComparison) -> str:
    console = Console(width=80, file=StringIO())
    show(document(found), console)
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    return shown


def test_a_change_names_its_files_and_says_where_it_lies_against_the_repeats(
    tmp_path: Path,
) -> None:
    repeats = [ours(mfu, "2.16") for mfu in (13.0, 14.0)]  # apart by 0.71
    near, far = (compared(tmp_path, *repeats, ours(mfu, "2.18")) for mfu in (14.0, 18.0))
    said = " ".join(text_of(near).split())
    assert "0.json and 1 more → 2.json: neuronxcc 2.16 → 2.18: MFU % +3.7 % (within the" in said
    assert "MFU % +33.3 % (beyond the spread of the repeats)" in " ".join(text_of(far).split())
    once = compared(tmp_path, ours(13.0, "2.16"), ours(14.0, "2.18"))
    assert "no run was repeated" in once.notes[-1]
    assert "the spread of the repeats" not in text_of(once)


def test_scores_that_are_not_comparable_have_no_mean_and_no_change(tmp_path: Path) -> None:
    same = compared(tmp_path, original(15.0, offset=1.0), original(15.0, offset=0.1))
    assert "training_score" not in same.groups[0].spreads
    found = compared(tmp_path, original(15.0), original(15.0, offset=0.1, batch_size=32))
    assert "score not comparable" in text_of(found)
    assert found.document()["groups"][1]["not_comparable"] == ["training_score"]
    bare = original(15.0, training_score_breakdown={})
    notes = compared(tmp_path, bare, ours(13.0, "2.18")).notes
    assert any("scores hold MFUs under exact and the original's" in note for note in notes)


def test_lora_is_an_object_for_programs_and_a_phrase_for_people(tmp_path: Path) -> None:
    adapters = {"r": 16, "targets": ["q_proj", "v_proj"]}
    found = compared(tmp_path, ours(13.0, "2.18", lora=None), ours(13.0, "2.18", lora=adapters))
    assert found.document()["groups"][1]["changed"] == {"lora": ["none", adapters]}
    assert "lora none → r=16 on q_proj, v_proj: " in " ".join(text_of(found).split())


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
