"""What a person sees of `erg explain`: 80 columns, bars that fit, nothing but what was told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ergmeter.views.explain import _bar
from tests.runs import even_steps, run_of
from tests.unit.metrics.test_explain_made import made, waiting
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
    table = out.partition("\n\n")[2].partition("\n\n")[0].splitlines()
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
    assert "nothing can be told apart" in out
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
        (1.07, 1.0, " " * 19 + "|"),
        (-0.1, 0.2, "####"),
    ],
)
def test_a_bar_stays_in_its_cells(low: float, high: float, bar: str) -> None:
    assert _bar(low, high) == bar
