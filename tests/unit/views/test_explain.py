"""What a person sees of `erg explain`: 80 columns, bars that fit, nothing but what was told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ergmeter.metrics.explain.time import LossBlock
from ergmeter.metrics.explain.waterfall import explain
from ergmeter.metrics.summarize import evidence_of
from ergmeter.runlog.reader import Run
from ergmeter.views.render.terminal import bar as terminal_bar
from ergmeter.views.run.explain import GAINED, LEFT, LOST, ONE_BLOCK, share, waterfall_chart
from tests.runs import even_steps, run_of
from tests.unit.metrics.test_explain_made import FAST, made, waiting
from tests.unit.metrics.test_h200 import replayed

Erg = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def narrow(erg: Erg, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns, after what the fixture of the command sets."""
    monkeypatch.setenv("COLUMNS", "80")


def test_the_page_fits_80_columns_and_its_bars_are_ascii(erg: Erg, tmp_path: Path) -> None:
    run = made(tmp_path / "run", waiting("data"))
    code, out, _ = erg("explain", run.path)
    assert code == 0
    lines = out.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert any("#" in line for line in lines)
    assert "waiting for data" in out
    assert "100.0 %" in out
    assert "most worth trying" in out


def test_the_waterfall_goes_from_the_peak_down_to_what_was_achieved(
    erg: Erg, tmp_path: Path
) -> None:
    _, out, _ = erg("explain", made(tmp_path / "run").path)
    title, *table = out.partition("\n\n")[2].partition("\n\n")[0].splitlines()
    assert title == "the waterfall"
    assert table[0].startswith("peak")
    assert table[-1].startswith("the model's FLOPs (MFU)")
    shown = [float(line.partition(" %")[0].split()[-1].lstrip("+")) for line in table]
    assert sum(shown[1:]) == pytest.approx(100.0, abs=0.3)
    assert shown[-1] == 40.0


def test_json_has_the_same_and_adds_up(erg: Erg, tmp_path: Path) -> None:
    code, out, _ = erg("explain", made(tmp_path / "run").path, "--json")
    assert code == 0
    found = json.loads(out)
    whole = [*found["blocks"], found["achieved"]]
    assert sum(one["share_frac"] for one in whole) == pytest.approx(1.0, abs=1e-12)
    assert sum(one["joules"] for one in whole) == pytest.approx(found["energy"]["value"])
    assert {fact["key"] for one in whole for fact in one["facts"]} >= {
        "activity.sm_frac",
        "activity.tensor_frac",
        "utilization.mfu_frac",
    }


def test_a_recording_and_the_options_of_a_model_give_a_waterfall(erg: Erg, tmp_path: Path) -> None:
    """The recorded Llama: 22 layers of 2048, 32 heads on 4, 1.1 B."""
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22,
                "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4,
                "vocab_size": 32000, "tie_word_embeddings": False,
            }
        )
    )  # fmt: skip
    run = replayed(tmp_path / "run", "lora_bf16_1b")
    model = ("--model-config", config, "--seq-len", 2048, "--batch-size", 8, "--dtype", "bf16")
    adapters = ("--lora", "r=16,targets=q_proj,k_proj,v_proj,o_proj", "--warmup-steps", 2)
    code, out, _ = erg("explain", run.path, *model, *adapters, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["achieved"]["share_frac"] == pytest.approx(0.250, abs=0.002)
    assert any("no gradients of them" in one for one in found["remarks"])


def test_where_nothing_can_be_told_apart_there_is_no_waterfall_but_what_to_record(
    erg: Erg, tmp_path: Path
) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(20, tokens_computed=10), stream="output")
    code, out, _ = erg("explain", run.path)
    assert code == 0
    assert "nothing can be attributed" in out
    assert "#" not in out
    assert "100 %" not in out
    assert "to record next time" in out
    found = json.loads(erg("explain", run.path, "--json")[1])
    assert found["achieved"] is None
    assert found["blocks"] == []


def test_a_run_that_is_not_there_is_one_line(erg: Erg, tmp_path: Path) -> None:
    code, out, err = erg("explain", tmp_path / "nothing")
    assert code == 1
    assert out == ""
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("low", "high", "bar"),
    [
        (0.0, 1.0, "#" * 20),
        (0.5, 1.0, " " * 10 + "#" * 10),
        (0.5, 0.501, " " * 10 + "|"),
        (1.0, 1.0, " " * 19 + "|"),
        (1.0, 1.07, " " * 19 + "|"),
        (-0.1, 0.2, "####"),
    ],
)
def test_a_bar_stays_in_its_cells(low: float, high: float, bar: str) -> None:
    assert terminal_bar(low, high) == bar


@pytest.mark.parametrize(
    ("frac", "said"),
    [
        (0.2564, "25.6 %"),
        (0.0002, "0.02 %"),
        (4e-6, "< 0.01 %"),
        (-0.073, "+7.3 %"),
        (0.0, "0.0 %"),
    ],
)
def test_a_share_is_given_to_what_fits_its_column(frac: float, said: str) -> None:
    assert share(LossBlock("clock", "clock", frac, "derived")) == said
    assert len(said) <= 8


def layers(run: Run) -> dict[str, list[dict[str, Any]]]:
    """What the waterfall of a run is drawn from, by its name."""
    spec = waterfall_chart(explain(evidence_of(run))).spec
    assert spec is not None
    held = (layer["data"] for layer in spec["layer"])
    return {one["name"]: one["values"] for one in held if "values" in one}


def test_the_drawing_has_a_bar_for_each_block_where_it_was_lost(tmp_path: Path) -> None:
    """The same run as in the tests of the metric, whose rungs are 0.9, 0.81, 0.72, 0.45, 0.42."""
    rows = layers(made(tmp_path / "run"))["points"]
    assert [(row["name"], row["kind"]) for row in rows[:2]] == [
        ("peak", "peak"),
        ("idle inside steps", LOST),
    ]
    lows = [row["low"] for row in rows[1:]]
    assert lows == pytest.approx([0.9, 0.81, 0.72, 0.45, 0.42, 0.4, 0.0])
    assert [row["high"] for row in rows[1:]] == pytest.approx([1.0, *lows[:-1]])
    assert (rows[-1]["kind"], rows[-1]["said"]) == (LEFT, "the model's FLOPs (MFU) · 40.0 % · 2 kJ")


def test_a_gain_is_drawn_upwards_and_has_drawn_nothing(tmp_path: Path) -> None:
    rows = layers(made(tmp_path / "run", **FAST))["points"]
    (clock,) = [row for row in rows if row["kind"] == GAINED]
    assert (clock["low"], clock["high"]) == pytest.approx((0.9, 0.99))
    assert clock["said"] == "clock above the peak's: gain · +9.0 %"


def test_what_is_not_told_apart_is_striped_and_nothing_else(tmp_path: Path) -> None:
    found = layers(made(tmp_path / "run", graphics_frac=0.9))
    (one,) = [row for row in found["points"] if row["kind"] == ONE_BLOCK]
    assert one["name"] == "kernels, unattributed"
    assert len(found["stripes"]) == pytest.approx(100 * one["v"], abs=1)
    for stripe in found["stripes"]:
        assert stripe["at"] == one["at"]
        assert one["low"] <= stripe["low"] < stripe["high"] <= one["high"]
    assert layers(made(tmp_path / "told"))["stripes"] == []


def test_markdown_has_the_figures_of_the_json_and_no_markup_of_the_runs(
    erg: Erg, tmp_path: Path
) -> None:
    run = made(tmp_path / "run")
    header = run.path / "run.json"
    header.write_text(header.read_text().replace('"test"', '"<b>a|b</b>"'))
    code, out, _ = erg("explain", run.path, "--markdown")
    assert code == 0
    assert out.startswith(
        "## &lt;b&gt;a\\|b&lt;/b&gt;: where the rest of the peak went, over 40 steps"
    )
    assert "| idle inside steps | 10.0 % | 500 J | derived |\n" in out
    assert "| the model's FLOPs (MFU) | 40.0 % | 2 kJ | reported |\n" in out
    assert "### Most worth trying" in out


def test_two_forms_at_once_are_misuse(erg: Erg, tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    code, out, err = erg("explain", run.path, "--markdown", "--json")
    assert (code, out, err) == (2, "", "erg: --json and --md are two forms; give one\n")


def test_the_page_comes_beside_what_is_printed(erg: Erg, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    run = made(tmp_path / "run")
    code, out, err = erg("explain", run.path, "--json", "--html", tmp_path / "page.html")
    assert (code, json.loads(out)["achieved"]["key"]) == (0, "achieved")
    assert err.startswith(f"{tmp_path}/page.html (")
    page = (tmp_path / "page.html").read_text()
    cells = ("the model&#39;s FLOPs (MFU)", "40.0 %", "2 kJ")
    assert "".join(f'<td class="short">{one}</td>' for one in cells) in page
