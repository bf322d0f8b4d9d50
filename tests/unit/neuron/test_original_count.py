"""What is shown as the original's figure is what the original prints, for whatever it is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ergmeter.compat.nki_llama import analyze_compat, compat_document
from ergmeter.neuron.analysis import AnalysisRequest, analyze
from ergmeter.neuron.document import document
from ergmeter.neuron.earlier_output import compare_outputs, comparison_keys, read_outputs
from ergmeter.views.calculate.analyze import console_document
from tests.unit.views.test_four_forms import forms_of

DATA = Path(__file__).parents[2] / "data"
YAML = DATA / "neuron" / "llama3_8b_sft.yaml"
LORA = DATA / "neuron" / "llama3_8b_lora.yaml"


def asked(model: str, **more: Any) -> AnalysisRequest:
    options: dict[str, Any] = {"config": str(YAML), "throughput": 2.1} | more
    options["compile_dir"] = str(DATA / "neuron")  # no graphs
    return AnalysisRequest(model_config=str(DATA / "configs" / model), **options)


def both(model: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our document, and the original's, of the same job."""
    request = asked(model, **more)
    theirs = compat_document(analyze_compat(request, lambda *_: None))
    return document(analyze(request, lambda *_: None)), theirs


@pytest.fixture
def four_nodes(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(YAML.read_text().replace("num_nodes: 1", "num_nodes: 4"))
    return str(path)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("llama-3.1-8b.json", {}),
        ("mixtral-8x7b.json", {}),
        ("deepseek-v3.json", {}),
        ("gpt2-xl.json", {}),  # whose names of sizes it does not know: those of LlamaConfig
        ("llama-3.1-8b.json", {"hw_backend": "trn2", "throughput": 8.0}),
        ("llama-3.1-8b.json", {"num_nodes": 2}),
        ("llama-3.1-8b.json", {"config": str(LORA)}),
    ],
)
def test_the_original_s_count_is_what_compat_gives(model: str, more: dict[str, Any]) -> None:
    ours, theirs = both(model, **more)
    shown = ours["original_count"]
    assert shown["mfu_percent"] == theirs["mfu_percent"]
    assert shown["tflop_per_sequence"] == theirs["tflops_per_second"]
    extra = sum(shown["over_exact_tflop_per_sequence"].values())
    exact = ours["conventions"]["exact"]["tflop_per_sequence"]
    assert shown["tflop_per_sequence"] == pytest.approx(exact + extra)


def test_nodes_of_the_yaml_are_unknown_to_the_original(four_nodes: str) -> None:
    ours, theirs = both("llama-3.1-8b.json", config=four_nodes)
    assert ours["num_nodes"] == 4
    assert ours["original_count"]["mfu_percent"] == theirs["mfu_percent"]
    assert theirs["mfu_percent"] == pytest.approx(15.477, abs=5e-4)
    assert ours["original_count"]["num_nodes"] == 1


def test_a_mixture_of_experts_is_a_dense_llama_to_it() -> None:
    # 32 layers of 4096, 8 of 32 heads for keys, one feed-forward of 14336: no experts.
    ours, _ = both("mixtral-8x7b.json")
    assert ours["original_count"]["tflop_per_sequence"] == pytest.approx(204.66, abs=5e-3)
    assert ours["original_count"]["mfu_percent"] == pytest.approx(14.14, abs=5e-3)
    analysis = analyze(asked("mixtral-8x7b.json"), lambda *_: None)
    shown = forms_of(console_document(analysis, per_file=False))["terminal"]
    assert "By the original's count: MFU 14.138%, 429.8 TFLOP/s, 204.66 TFLOP per" in shown
    assert "a dense Llama of config.json's sizes counted instead of this model" in shown


def test_hardware_that_it_does_not_know_has_no_mfu_of_its(tmp_path: Path) -> None:
    request = AnalysisRequest(
        config=str(YAML), model_config=str(DATA / "configs" / "llama-3.1-8b.json"),
        compile_dir=str(tmp_path), throughput=2.1, hw_backend="inf2", devices=24,
    )  # fmt: skip
    found = document(analyze(request, lambda *_: None))
    assert found["original_count"]["mfu_percent"] is None
    assert found["original_count"]["tflop_per_sequence"] == pytest.approx(224.04, abs=5e-3)
    assert "of trn1 and trn2 only" in found["missing"]["original_count.mfu_percent"]


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("mixtral-8x7b.json", {}),
        ("llama-3.1-8b.json", {"hw_backend": "trn2", "throughput": 8.0}),
        ("llama-3.1-8b.json", {"config": str(LORA)}),
    ],
)
def test_compared_with_compat_the_same_job_has_the_same_mfu_and_the_counts_differ(
    tmp_path: Path, model: str, more: dict[str, Any]
) -> None:
    paths = []
    for name, content in zip(("a.json", "b.json"), both(model, **more), strict=True):
        (tmp_path / name).write_text(json.dumps(content))
        paths.append(str(tmp_path / name))
    outputs = read_outputs(paths)
    found = compare_outputs(outputs)
    keys = comparison_keys(found, outputs)
    first, second = (group["metrics"]["mfu_percent"]["mean"] for group in keys["groups"])
    assert first == second
    assert keys["convention"] == "the original's"
    changed = keys["groups"][1]["changed"]
    assert changed["counted by"] == ["erg analyze", "the original"]
    said = " ".join(found.notes)
    assert "a dense Llama" in said
    assert ("LoRA" in said) is ("config" in more)
    assert ("peak_tflops_per_second" in changed) is ("hw_backend" in more)
