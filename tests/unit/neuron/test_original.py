"""The original's numbers: the known answer, hand calculations, and its quirks one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ergmeter.compat.nki_llama import (
    OriginalCount,
    analyze_compat,
    original_count,
    original_files,
    original_summary,
    read_original_log,
)
from ergmeter.errors import FormatError, UsageError
from ergmeter.neuron.analysis import AnalysisRequest
from ergmeter.neuron.kernels import GraphResult
from ergmeter.neuron.mfu import OriginalEstimate, original_estimate, sequence_flops
from ergmeter.neuron.training_log import LogTimes, LossStatistics, Statistics, StepNumbers
from tests.unit.neuron.graphs import Computation, config, module, one_dot, packed, piece, write

LLAMA_8B = str(Path(__file__).parents[2] / "data" / "configs" / "llama-3.1-8b.json")


def estimate(seq_per_s: float, *, nodes: int = 1, backend: str = "trn1") -> OriginalEstimate:
    flops = sequence_flops(LLAMA_8B, 4096)
    return original_estimate(flops, seq_per_s, nodes=nodes, backend=backend, over_exact={})


def test_the_known_answer_is_met() -> None:
    found = estimate(2.1)
    assert found.mfu_percent == pytest.approx(15.477, abs=5e-4)
    assert found.tflop_per_sequence == pytest.approx(224.04, abs=5e-3)
    assert found.tflops_per_second == pytest.approx(470.5, abs=5e-2)
    half = estimate(2.1, nodes=2, backend="trn2")
    assert half.mfu_percent == pytest.approx((found.mfu_percent or 0) / 2 * 3040 / 10672)


def test_its_default_throughput_reads_737_percent() -> None:
    assert estimate(100.0).mfu_percent == pytest.approx(737, abs=0.5)


def test_its_flops_are_those_of_a_hand_calculation(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 10}
    path.write_text(json.dumps(sizes))
    layer = 512 + 512 + 512 + 256 + 256 + 192 + 3072  # q, o, k and v, both products, softmax, mlp
    assert sequence_flops(str(path), 4) == 3 * (layer + 2 * 640)
    path.write_text(json.dumps(sizes | {"head_dim": 64}))  # which it does not look at
    assert sequence_flops(str(path), 4) == 3 * (layer + 2 * 640)


def test_what_it_can_t_do_is_refused(tmp_path: Path) -> None:
    yaml = Path(__file__).parents[2] / "data" / "neuron" / "llama3_8b_sft.yaml"
    request = AnalysisRequest(str(yaml), LLAMA_8B, throughput=1.0, hw_backend="inf2")
    with pytest.raises(UsageError, match="--compat knows --hw-backend trn1 and trn2"):
        analyze_compat(request, lambda *_: None)
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": "wide"}')
    with pytest.raises(FormatError, match="hidden_size must be a whole number"):
        sequence_flops(str(path), 4)


def test_it_opens_files_pattern_by_pattern_stubs_included(tmp_path: Path) -> None:
    names = ("a/model.hlo_module.pb", "a/wrapped_neff.hlo", "b/graph.hlo", "b/model.hlo.pb")
    for name in names:
        write(tmp_path / Path(name).parent, b"", name=Path(name).name)
    found = [str(Path(path).relative_to(tmp_path)) for path in original_files(str(tmp_path))]
    assert found[0] == "a/model.hlo_module.pb"
    assert sorted(found[1:]) == ["a/wrapped_neff.hlo", "b/graph.hlo"]
    assert original_files(str(tmp_path / "none")) == []


def test_ratios_at_0_are_in_no_average_and_errors_in_no_sum() -> None:
    sizes = ((100, 50, None), (300, 30, None), (400, 0, None), (0, 0, "cut"))
    graphs = [GraphResult("", "", None, None, *size) for size in sizes]
    found = original_summary(graphs, 0)
    assert (found.total, found.successful) == (4, 3)
    assert found.overall_ratio == 0.1  # 80 / 800
    assert found.average_ratio == pytest.approx(0.3)
    assert (found.least_ratio, found.most_ratio) == (0.1, 0.5)
    assert original_summary([], 0).overall_ratio == 0.0


def test_dots_of_every_computation_count_once_whoever_calls_them(tmp_path: Path) -> None:
    main, called, unused = Computation(1), Computation(2, "body", 10), Computation(3, "never", 20)
    main.dot(main.parameter(3, 5), main.parameter(5, 7), 3, 7)  # 105
    main.call(2)
    main.call(2)
    called.dot(called.parameter(2, 4), called.parameter(4, 6), 2, 6)  # 48
    unused.dot(unused.parameter(1, 11), unused.parameter(11, 1), 1, 1)  # 11
    path = write(tmp_path, module(main, called, unused))
    assert original_count(str(path)) == OriginalCount(105 + 48 + 11, 0, 0)


def test_a_batched_dot_counts_its_batch_once(tmp_path: Path) -> None:
    main = Computation(1)
    left, right = main.parameter(2, 3, 5), main.parameter(2, 5, 7)
    numbers = packed(1, (2,)) + packed(2, (1,)) + packed(3, (0,)) + packed(4, (0,))
    main.add("dot", b"", piece(30, numbers), packed(36, (left, right)))
    path = write(tmp_path, module(main))
    assert original_count(str(path)).macs == 2 * 3 * 5 * 7


def test_a_kernel_counts_what_it_states_else_0(tmp_path: Path) -> None:
    kernels = (config(1000), config(None), config(0), b"not base64 of JSON", b"")
    path = write(tmp_path, one_dot(3, 5, 7, *kernels))
    assert original_count(str(path)) == OriginalCount(1105, 1000, 2)


def test_a_file_it_can_t_parse_is_an_error_and_an_empty_one_is_empty(tmp_path: Path) -> None:
    assert original_count(str(write(tmp_path, b""))) == OriginalCount(0, 0, 0)
    for content in (one_dot(3, 5, 7)[:-3], piece(1, b"\xff\xfe"), b"\x1f\x8b\x08\x00"):
        with pytest.raises(ValueError, match="not an HloModuleProto"):
            original_count(str(write(tmp_path, content)))


BAR = (
    "Epoch 0:   5%|█▌  | {step}/62 [02:59<58:44, v_num=8, reduced_train_loss={loss},"
    " lr=2.73e-5, parameter_norm=1.95e+3, global_step={step}.000, consumed_samples=32.00,"
    " throughput={rate}, throughput_peak=0.0677, gradient_norm=8.600]"
)


def log_of(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_equal_neighbours_count_once_in_its_mean(tmp_path: Path) -> None:
    rates = ("1.0", "2.0", "2.0", "2.0", "1.0")
    lines = [BAR.format(step=i, loss="6.9e-1", rate=rate) for i, rate in enumerate(rates)]
    log = read_original_log(log_of(tmp_path, *lines))
    assert log.throughput.count == 3
    assert log.throughput.average == pytest.approx(4 / 3)
    assert log.steps == StepNumbers(5, 0, 4)
    losses = LossStatistics(6.9, 6.9, 6.9, 1, first=6.9, last=6.9)
    assert log.losses == losses  # the exponent is lost


def test_a_bar_it_does_not_know_is_read_name_by_name(tmp_path: Path) -> None:
    line = (
        "Epoch 3:   5%|▍         | 3/62 [02:59<58:44, reduced_train_loss=6.930, lr=1e-5,"
        " gradient_norm=8.6, global_step=7.000, throughput=0.108]\rmore"
    )
    log = read_original_log(log_of(tmp_path, line))
    assert (log.throughput.average, log.losses.average) == (0.108, 6.93)
    assert log.steps == StepNumbers(1, 7, 7)


def test_what_the_guide_documents_it_does_not_read_but_for_step_times(tmp_path: Path) -> None:
    lines = ("step_time: 1.5", "throughput: 150.5", "seq/s: 150.5", "loss: 2.345", "step_time: 1.5")
    found = read_original_log(log_of(tmp_path, *lines))
    assert found.throughput.average is None
    assert found.losses.count == 0
    assert found.step_times == Statistics(1.5, 1.5, 1.5, 2)


def test_the_last_time_is_the_last_new_one_and_without_any_it_is_the_file_s(tmp_path: Path) -> None:
    lines = (
        "[2025-06-10 09:37:36.116: x",
        "[2025-06-10 09:37:40,288] y",
        "[2025-06-10 09:37:36.2: z",
    )
    stamps = read_original_log(log_of(tmp_path, *lines)).timestamps
    assert stamps == LogTimes("2025-06-10 09:37:36", "2025-06-10 09:37:40", None)
    stamps = read_original_log(log_of(tmp_path, "no time")).timestamps
    assert stamps.file_modification is not None
