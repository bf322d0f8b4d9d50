"""The NKI share of graphs, counted by the real reader, with every state a kernel can be in."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.hlo import count_files
from ergmeter.neuron.compile_cache import graph_file
from ergmeter.neuron.kernels import (
    LOWER_BOUND,
    UNCERTAIN,
    GraphResult,
    by_work,
    graph_result,
    summarize,
)
from tests.unit.neuron.graphs import Computation, config, module, one_dot, write


def results(tmp_path: Path, *graphs: bytes, runs: tuple[int, ...] = ()) -> list[GraphResult]:
    paths = [
        write(tmp_path / "neuronxcc-2.18" / f"MODULE_{number}+00000000", graph)
        for number, graph in enumerate(graphs)
    ]
    weights = runs or (1,) * len(paths)
    return [
        graph_result(counted, graph_file(str(counted.path)), runs=number)
        for counted, number in zip(count_files(paths), weights, strict=True)
    ]


def test_a_graph_has_the_names_of_its_path_and_its_share(tmp_path: Path) -> None:
    (one,) = results(tmp_path, one_dot(3, 5, 7, config(1000), config(1000)))
    assert (one.name, one.module, one.compiler) == (
        "model.hlo_module.pb", "MODULE_0+00000000", "neuronxcc-2.18"
    )  # fmt: skip
    assert (one.macs, one.nki_macs) == (2105, 2000)
    assert one.nki_ratio == 2000 / 2105


def test_statistics_hold_the_zeros_and_leave_out_what_multiplies_nothing(tmp_path: Path) -> None:
    empty = Computation(1)
    empty.parameter(4)
    graphs = (one_dot(3, 5, 7, config(315)), one_dot(3, 5, 7), module(empty))
    found = summarize(results(tmp_path, *graphs), weighted=False)
    assert found.overall_ratio == 315 / 525
    assert (found.average_ratio, found.least_ratio, found.most_ratio) == (0.375, 0.0, 0.75)
    counts = (found.graphs_with_nki, found.graphs_without_nki, found.graphs_without_macs)
    assert counts == (1, 1, 1)


def test_graphs_weigh_as_often_as_they_ran(tmp_path: Path) -> None:
    graphs = (one_dot(3, 5, 7, config(315)), one_dot(3, 5, 7), one_dot(9, 9, 9))
    found = summarize(results(tmp_path, *graphs, runs=(10, 20, 0)), weighted=True)
    assert found.overall_ratio == 3150 / (4200 + 2100)
    assert found.weighting == "each graph as often as it ran"
    assert found.average_ratio == pytest.approx((10 * 0.75 + 20 * 0.0) / 30)
    assert (found.graphs_with_nki, found.graphs_without_nki) == (1, 1)  # the third did not run
    assert (found.total, found.successful) == (3, 3)


def test_kernels_of_a_graph_that_did_not_run_leave_a_weighted_ratio_alone(tmp_path: Path) -> None:
    graphs = results(tmp_path, one_dot(3, 5, 7, config(None)), one_dot(3, 5, 7), runs=(0, 1))
    assert [one.mark for one in graphs] == [LOWER_BOUND, ""]
    assert summarize(graphs, weighted=True).mark == ""


def test_kernels_are_told_apart_by_what_they_state(tmp_path: Path) -> None:
    kernels = (config(1000), config(None), b"???", config(0, name="rms_norm"), b"???")
    (one,) = results(tmp_path, one_dot(3, 5, 7, *kernels))
    found = summarize([one], weighted=False)
    assert found.calls == {"known": 2, "absent": 1, "unreadable": 2}
    assert found.mark == LOWER_BOUND
    assert [(row.calls, row.file_path) for row in found.unreadable] == [(2, one.path)]
    rows = {(row.function, row.macs_state): row.macs for row in found.kernels}
    assert rows == {
        ("flash_fwd", "known"): 1000, ("flash_fwd", "absent"): None,
        (None, "unreadable"): None, ("rms_norm", "known"): 0,
    }  # fmt: skip


def test_a_file_that_can_t_be_read_is_an_error_and_no_zero(tmp_path: Path) -> None:
    good, bad = results(tmp_path, one_dot(3, 5, 7, config(105)), b"\x00 no module")
    assert bad.error
    found = summarize([good, bad], weighted=False)
    assert (found.total, found.successful, found.average_ratio) == (2, 1, 0.5)
    none = summarize([bad], weighted=False)
    assert (none.overall_ratio, none.macs) == (None, None)


def test_what_the_count_can_t_know_is_carried_along(tmp_path: Path) -> None:
    main = Computation(1)
    main.dot(main.parameter(3, 5), main.parameter(5, 7), 3, 7)
    main.kernel(b"", target="AwsNeuronCustomOp")
    (one,) = results(tmp_path, module(main))
    doubts = {"calls of AwsNeuronCustomOp, whose work is not known": 1}
    assert summarize([one], weighted=False).doubts == doubts


def test_a_ratio_beside_loops_of_unknown_length_is_no_lower_bound(tmp_path: Path) -> None:
    data = Path(__file__).parents[2] / "data" / "hlo" / "while_dynamic.opt.hlo_module.pb"
    graphs = results(tmp_path, one_dot(3, 5, 7, config(None)), data.read_bytes())
    assert [one.mark for one in graphs] == [LOWER_BOUND, UNCERTAIN]
    assert summarize(graphs[:1], weighted=False).mark == LOWER_BOUND
    assert summarize(graphs, weighted=False).mark == UNCERTAIN


def test_operations_that_are_no_products_are_listed_with_their_calls(tmp_path: Path) -> None:
    data = Path(__file__).parents[2] / "data" / "hlo" / "cholesky_native.unopt.hlo_module.pb"
    found = summarize(results(tmp_path, data.read_bytes()), weighted=False)
    assert found.macs == 1800
    assert found.doubts == {
        "calls of cholesky, which is no matrix product and not counted": 1,
        "calls of triangular-solve, which is no matrix product and not counted": 1,
    }


def test_a_graph_that_ran_often_comes_before_a_larger_one() -> None:
    def graph(name: str, macs: int, runs: int, error: str | None = None) -> GraphResult:
        return GraphResult(name, name, None, None, macs, 0, error, runs)

    graphs = [graph("a", 100, 1), graph("b", 10, 30), graph("c", 100, 0), graph("d", 0, 1, "cut")]
    found = [(graph.path, frac) for graph, frac in by_work(graphs)]
    assert found == [("b", 0.75), ("a", 0.25), ("c", 0.0)]
    assert by_work(graphs[2:3]) == [(graphs[2], None)]
