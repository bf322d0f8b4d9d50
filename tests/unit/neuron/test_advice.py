"""What is said of a surprising figure: made from the inputs, with figures that can be checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ergmeter.neuron.advice import about_graphs, about_kernels, about_mfu, about_runs
from ergmeter.neuron.compile_cache import Choice, find_graphs
from ergmeter.neuron.kernels import (
    LOWER_BOUND,
    GraphResult,
    NkiSummary,
    UnreadableConfig,
    summarize,
)
from ergmeter.neuron.mfu import figures, machine
from ergmeter.neuron.training_job import NeuronJob
from tests.unit.neuron.graphs import write
from tests.unit.neuron.test_mfu import LLAMA_8B, job, pace


def mfu_texts(seq_per_s: float, what: NeuronJob) -> list[str]:
    where = machine("trn1", nodes=1, devices=32, lnc=None, dtype="bf16", devices_from="")
    given = pace(seq_per_s)
    found = figures(str(LLAMA_8B), what, where, given, convention="exact")
    return [finding.text for finding in about_mfu(found, what, where, given)]


def test_tokens_given_as_sequences_are_recognised() -> None:
    texts = mfu_texts(8601.6, job(4096))  # 2.1 sequences/s of 4096 tokens
    assert any("are tokens/s, not sequences/s, it is 13.65 %" in text for text in texts)
    assert texts[0] == "MFU 55919 % is above the peak, so an input is wrong"  # 13.652 x 4096


def test_a_throughput_that_was_not_printed_is_not_taken_for_tokens() -> None:
    where = machine("trn1", nodes=1, devices=32, lnc=None, dtype="bf16", devices_from="")
    logged = pace(8601.6)
    found = figures(str(LLAMA_8B), job(4096), where, logged, convention="exact")
    texts = [one.text for one in about_mfu(found, job(4096), where, logged, is_printed=False)]
    assert len(texts) == 2
    assert not any("tokens/s" in text for text in texts)


def test_a_good_mfu_needs_no_advice() -> None:
    assert mfu_texts(2.1 * 3, job(4096)) == []  # 41 %


def test_a_low_mfu_is_explained_by_peak_convention_replicas_and_pipeline() -> None:
    what = replace(job(4096), replicas=4, pipeline_stages=4, micro_batches=12)
    texts = mfu_texts(2.1, what)
    assert any("32 cores of trn1 (1 x 32)" in text for text in texts)
    assert any("neuron counts the most FLOPs and gives 15.48 %" in text for text in texts)
    assert any("one of the 4 replicas, MFU is 54.61 %" in text for text in texts)
    assert any("idle 20 % of the time" in text for text in texts)  # 3 / (12 + 3)


def test_recomputation_shows_as_hfu() -> None:
    texts = mfu_texts(2.1, replace(job(4096), checkpointing="full"))
    assert any("recomputation (full)" in text for text in texts)


def summary(known: int, absent: int, unreadable: int, nki_macs: int) -> NkiSummary:
    calls = {"known": known, "absent": absent, "unreadable": unreadable}
    return replace(
        summarize([], weighted=False), total=3, counted=3, macs=100, nki_macs=nki_macs,
        calls=calls, mark=LOWER_BOUND if absent or unreadable else "",
        unreadable=(UnreadableConfig("x", None, unreadable),) if unreadable else (),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("calls", "macs", "said"),
    [
        ((0, 0, 0), 0, ["no NKI kernel is called in 3 graphs"]),
        ((7, 0, 0), 0, ["7 kernel calls with 0 multiply-adds stated"]),
        ((0, 5, 0), 0, ["NKI ratio 0: 5 kernel calls with no multiply-adds stated"]),
        ((0, 0, 4), 0, ["NKI ratio 0: 4 kernel calls with a configuration that can't be read"]),
        (
            (2, 5, 4),
            50,
            ["a lower bound: 5 kernel calls", "a lower bound: 4 kernel calls"],
        ),
        ((2, 0, 0), 50, []),
    ],
)
def test_a_ratio_of_0_says_which_of_the_reasons_it_is(
    calls: tuple[int, int, int], macs: int, said: list[str]
) -> None:
    texts = list(about_kernels(summary(*calls, macs)))
    assert len(texts) == len(said)
    assert all(part in text for part, text in zip(said, texts, strict=True))


def graph(module: str, macs: int, *, runs: int = 1) -> GraphResult:
    return GraphResult(f"{module}/model.hlo_module.pb", "model", module, "2.18", macs, 0, runs=runs)


def test_graphs_and_a_file_of_their_runs_that_do_not_match_are_said() -> None:
    graphs = [graph("MODULE_1+0", 100, runs=7), graph("MODULE_2+0", 250), graph("MODULE_3+0", 50)]
    runs = {"MODULE_1": 7, "MODULE_typo": 5}
    first, second = about_runs(graphs, runs, "runs.txt")
    assert first == (
        "2 of 3 graphs are not in runs.txt: not counted, with 75 % of the MACs if each graph ran"
        " once"
    )  # 300 of 400
    assert second == "1 module of runs.txt is not among the graphs: MODULE_typo"
    all_of_them = {"MODULE_1": 7, "MODULE_2+0": 1, "MODULE_3": 0}
    assert list(about_runs(graphs, all_of_them, "runs.txt")) == []
    (idle,) = about_runs([graph("MODULE_1+0", 0), graph("MODULE_2", 0)], {"MODULE_2": 1}, "r")
    assert idle == "1 of 2 graphs is not in r: not counted"


def test_where_no_graph_was_found_it_says_where_and_what_would_match(tmp_path: Path) -> None:
    write(tmp_path / "a", b"", name="model.neff")
    found = find_graphs(str(tmp_path), Choice())
    (finding,) = about_graphs(found, str(tmp_path))
    assert f"looked in {tmp_path} and all below it at 1 file" in finding
    assert "*.hlo_module.pb" in finding
    assert "model.neff" in finding
    write(tmp_path / "MODULE_1+00000000", b"", name="wrapped_neff.hlo")
    found = find_graphs(str(tmp_path), Choice())
    (finding,) = about_graphs(found, str(tmp_path))
    assert finding == f"no HLO in {tmp_path} but 1 wrapped_neff.hlo"
    (finding,) = about_graphs(None, "/none", named_in_yaml="/var/tmp/cache")
    assert "/none (the default --compile-dir) does not exist" in finding
    assert "compiler_cache_url is /var/tmp/cache" in finding
