"""A model card's section, read by the Hub's own library; a badge, read as XML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree as ET

import pytest
from huggingface_hub import ModelCard

from ergmeter.metrics.summarize import summarize
from ergmeter.records import Device, Mark, Missing, Reading, Step
from ergmeter.views.run.model_card import badge, width
from tests.runs import even_steps, run_of
from tests.unit.metrics.test_explain_made import H200, made, read
from tests.unit.metrics.test_h200_run import unpacked

Erg = Callable[..., tuple[int, str, str]]
S = 10**9
SVG = "{http://www.w3.org/2000/svg}"


def metadata(card: ModelCard) -> dict[str, Any]:
    return cast("dict[str, Any]", card.data.to_dict())  # type: ignore[no-untyped-call]


def emissions(text: str) -> dict[str, Any]:
    return cast("dict[str, Any]", metadata(ModelCard(text))["co2_eq_emissions"])


def test_the_hubs_library_reads_the_emissions_in_grams(erg: Erg, tmp_path: Path) -> None:
    """All 40 steps: 5000 J at 100 g/kWh are 0.1389 g."""
    run = made(tmp_path / "run")
    code, out, _ = erg(
        "card", run.path, "--grid-g-per-kwh", 100, "--grid-source", "operator: 2026",
        "--location", "Quebec, Canada", "--training-type", "pre-training",
    )  # fmt: skip
    assert code == 0
    told = emissions(out)
    assert told["emissions"] == pytest.approx(5000 / 3.6e6 * 100, rel=1e-3)
    assert isinstance(told["emissions"], float)
    assert told["training_type"] == "pre-training"
    assert told["geographical_location"] == "Quebec, Canada"
    assert told["hardware_used"] == "1 x NVIDIA H200"
    assert (
        ": 5 kJ x 100 g/kWh (operator: 2026); the building's overhead is not in it"
        in told["source"]
    )
    assert set(told) == {
        *("emissions", "source", "training_type", "geographical_location", "hardware_used")
    }


def test_without_a_grid_there_is_no_metadata_and_the_reason_is_said(
    erg: Erg, tmp_path: Path
) -> None:
    code, out, _ = erg("card", made(tmp_path / "run").path)
    assert code == 0
    assert not out.startswith("---")
    assert "co2_eq_emissions" not in out
    assert "carbon: no grid intensity was given" in out


def test_without_energy_there_are_no_emissions_whatever_the_grid(erg: Erg, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(20, tokens_computed=100))
    code, out, _ = erg("card", run.path, "--grid", "FR")
    assert code == 0
    assert "co2_eq_emissions" not in out
    assert "energy per token: no energy sensor" in out


def test_a_grid_by_name_is_a_place_and_adapters_are_fine_tuning(erg: Erg, tmp_path: Path) -> None:
    run = unpacked("mfu_lora", tmp_path)
    _, out, _ = erg("card", run.path, "--grid", "FR")
    told = emissions(out)
    assert told["geographical_location"] == "France"
    assert told["training_type"] == "fine-tuning"


def test_emissions_are_of_all_steps_and_rates_of_those_after_the_warm_up(
    erg: Erg, tmp_path: Path
) -> None:
    run = made(tmp_path / "run")
    _, out, _ = erg("card", run.path, "--warmup-steps", 20, "--grid-g-per-kwh", 100)
    told = emissions(out)
    assert told["emissions"] == pytest.approx(5000 / 3.6e6 * 100, rel=1e-3)
    assert "over 20 steps in 5 s, after 20 steps of warm-up" in out
    assert "All steps: over 40 steps in 10 s" in out


def test_figures_stand_in_a_table_with_basis_and_window(erg: Erg, tmp_path: Path) -> None:
    _, out, _ = erg("card", made(tmp_path / "run").path)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in out.splitlines()
        if line.startswith("|")
    ]
    by_name = {row[0]: row[1:] for row in rows}
    assert {len(row) for row in rows} == {5}
    assert by_name["tokens/s"][0] == "400 tokens/s"
    assert by_name["tokens/s"][2:] == ["measured", "the window"]
    assert by_name["MFU"][0] == "40 %"
    assert by_name["energy per token"][0] == "1.25 J/token"  # 500 W at 400 tokens/s


def test_names_from_outside_are_no_markup(erg: Erg, tmp_path: Path) -> None:
    evil = replace(H200, name="<img src=x onerror=alert(1)> | `a`\n---\nlicense: mit")
    samples = [replace(one, device=evil.id) for one in read(10.0)]
    run = run_of(
        tmp_path / "run",
        steps=even_steps(40, seconds=0.25, tokens_computed=100),
        samples=samples,
        devices=[Device(evil.id, "gpu", evil.name, "nvml", {})],
    )
    _, out, _ = erg("card", run.path, "--grid-g-per-kwh", 100)
    card = ModelCard(out)
    assert list(metadata(card)) == ["co2_eq_emissions"]
    assert "<img" not in card.text
    assert "\nlicense" not in card.text
    rows = [line for line in card.text.splitlines() if line.startswith("| hardware")]
    assert len(rows) == 1
    assert rows[0].replace("\\|", "").count("|") == 6


def test_a_file_that_exists_is_kept_unless_forced(erg: Erg, tmp_path: Path) -> None:
    run, target = made(tmp_path / "run"), tmp_path / "README.md"
    target.write_text("mine")
    code, _, err = erg("card", run.path, "-o", target)
    assert code == 2
    assert "README.md is there already" in err
    assert target.read_text() == "mine"
    code, _, _ = erg("card", run.path, "-o", target, "--force")
    assert code == 0
    assert "## Training efficiency" in target.read_text()


def test_a_run_that_was_cut_off_says_so(erg: Erg, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(20, tokens_computed=100), closed=False)
    _, out, _ = erg("card", run.path)
    assert f"The run did not end normally, or is still running: {run.status}." in out
    whole = run_of(tmp_path / "whole", steps=even_steps(20, tokens_computed=100))
    assert "did not end" not in erg("card", whole.path)[1]


def test_a_run_that_was_stopped_says_by_which_alert(erg: Erg, tmp_path: Path) -> None:
    asked = "energy > 1 kJ: 1.2 kJ used"
    marks = [
        *(Mark(3 * S, "alert", one) for one in ("loss nan: loss of step 3", asked)),
        Mark(3 * S, "stop_asked", asked),
        Mark(4 * S, "ended", "killed by SIGTERM"),
    ]
    run = run_of(tmp_path / "run", steps=even_steps(20, tokens_computed=100), marks=marks)
    _, out, _ = erg("card", run.path)
    assert "still running: killed by SIGTERM. It was asked to stop by an alert: energy" in out
    assert "1.2 kJ used. Alerts: loss nan: loss of step 3.\n" in out


def test_inference_is_not_called_a_training(erg: Erg, tmp_path: Path) -> None:
    steps = [
        step
        for n in range(20)
        for step in (
            Step(n * S, n * S + S // 10, phase="prefill", tokens_computed=100),
            Step(n * S + S // 10, (n + 1) * S, phase="decode", tokens_computed=20),
        )
    ]
    _, out, _ = erg("card", made(tmp_path / "run", steps, flops=None).path)
    assert "This run was measured" in out
    assert "raining" not in out
    # The Hub's field is of the training: what a load test emitted stands in the section only.
    _, out, _ = erg("card", tmp_path / "run", "--grid-g-per-kwh", 100, "--grid-source", "x")
    assert "co2_eq_emissions" not in out
    assert "of CO2e (assumed) at 100 g/kWh" in out


def test_of_several_devices_those_count_that_were_used(erg: Erg, tmp_path: Path) -> None:
    """Two GPUs were read, and one did the work whose energy it is."""
    idle = replace(H200, id="GPU-idle")
    samples = [replace(one, device=d.id) for one in read(10.0) for d in (H200, idle)]
    run = run_of(
        tmp_path / "run",
        steps=even_steps(40, seconds=0.25, tokens_computed=100),
        samples=samples,
        devices=[H200, idle],
        marks=[Mark(0, "device_used", H200.id)],
    )
    _, out, _ = erg("card", run.path, "--grid-g-per-kwh", 100, "--grid-source", "x")
    assert emissions(out)["hardware_used"] == "1 x NVIDIA H200"
    assert "2 x NVIDIA H200" not in out
    assert "1 x NVIDIA H200 on" in erg("report", run.path, "--long")[1]


def test_the_sentence_has_all_that_its_grams_rest_on(erg: Erg, tmp_path: Path) -> None:
    """5000 J at 100 g/kWh and 1.5: 0.2083 g."""
    _, out, _ = erg(
        "card", made(tmp_path / "run").path, "--grid-g-per-kwh", 100, "--grid-source", "x",
        "--pue", 1.5,
    )  # fmt: skip
    assert "0.2083 g of CO2e (assumed) at 100 g/kWh and a PUE of 1.5" in out


# -- the badge ----------------------------------------------------------------------------------


def texts(svg: str) -> list[str]:
    return [str(one.text) for one in ET.fromstring(svg).iter(f"{SVG}text")]


def test_a_badge_is_not_written_into_what_is_called_a_picture(erg: Erg, tmp_path: Path) -> None:
    target = tmp_path / "badge.png"
    code, out, err = erg("card", made(tmp_path / "run").path, "--badge", target)
    assert (code, out) == (2, "")
    assert "badge.png does not end in .svg" in err
    assert not target.exists()


def test_a_badge_has_the_figure_of_the_section(erg: Erg, tmp_path: Path) -> None:
    """Energy and carbon are of all steps, those of the warm-up too."""
    target = tmp_path / "badge.svg"
    run = made(tmp_path / "run").path
    args = ("card", run, "--warmup-steps", 20, "--badge", target, "--metric", "energy.run_j")
    _, out, _ = erg(*args)
    assert texts(target.read_text())[1] == "5 kJ, measured"
    assert "| 5 kJ |" in out


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("j_per_token", ["energy per token", "1.25 J/token, measured"]),
        ("mfu", ["MFU", "40 %, reported"]),
        ("tokens_per_s", ["throughput", "400 tokens/s, measured"]),
        ("energy.mean_w", ["mean power", "500 W, measured"]),
    ],
)
def test_a_badge_shows_a_figure_with_its_basis(
    erg: Erg, tmp_path: Path, name: str, shown: list[str]
) -> None:
    target = tmp_path / "badge.svg"
    code, out, err = erg("card", made(tmp_path / "run").path, "--badge", target, "--metric", name)
    assert code == 0
    assert "badge.svg" not in out  # which may be piped into a file
    assert "badge.svg" in err
    assert texts(target.read_text()) == shown


def test_an_absent_figure_is_not_measured_and_no_zero(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(20, tokens_computed=100))
    found = summarize(run).readings["energy.joules_per_token"]
    assert isinstance(found, Missing)
    svg = badge("energy.joules_per_token", found)
    assert texts(svg) == ["energy per token", "not measured"]
    assert "no energy sensor" in str(ET.fromstring(svg).findtext(f"{SVG}title"))


def test_what_is_in_a_badge_is_escaped(tmp_path: Path) -> None:
    svg = badge("utilization.mfu_frac", Missing('<script>alert("&")</script>\x00\x1b'))
    assert "<script" not in svg
    assert 'alert("&")' in str(ET.fromstring(svg).findtext(f"{SVG}title"))


def test_a_unit_of_somebodys_own_metric_is_no_control_character() -> None:
    svg = badge("utilization.mfu_frac", Reading(2.5, "frogs\x1b[31m\n/s", "measured"))
    _, said = (one.text for one in ET.fromstring(svg).iter(f"{SVG}text"))
    assert said == "2.5 frogs [31m /s, measured"


@pytest.mark.parametrize("value", [1e-9, 0.0123456, 53_972.3, 1.23e12])
def test_texts_stay_inside_their_boxes(value: float) -> None:
    svg = ET.fromstring(badge("throughput.tokens_per_s", Reading(value, "tokens/s", "measured")))
    boxes, shown = list(svg.iter(f"{SVG}rect")), list(svg.iter(f"{SVG}text"))
    assert int(svg.attrib["width"]) == sum(int(box.attrib["width"]) for box in boxes)
    for box, text in zip(boxes, shown, strict=True):
        left, right = int(box.attrib.get("x", 0)), int(text.attrib["x"])
        assert left < right
        assert right + int(text.attrib["textLength"]) < left + int(box.attrib["width"])
    # Verdana's digits of 11 pixels are 7 wide; a text is neither squeezed nor torn apart.
    for text in shown:
        assert 4.2 <= int(text.attrib["textLength"]) / len(str(text.text)) <= 8.5


def test_wide_letters_are_given_more_room_than_narrow_ones() -> None:
    assert width("mmmm") > width("aaaa") > width("iiii")
