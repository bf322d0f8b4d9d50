"""EfficientLLM's module under our name: its calls, its variables, its block; and right figures."""

from __future__ import annotations

import inspect
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ergmeter.compat import efficientllm
from ergmeter.compat.efficientllm import (
    EfficientLLMCollector,
    EfficientLLMMetrics,
    MetricsCollector,
    finalize_efficientllm_metrics,
    get_efficientllm_collector,
    get_metrics_collector,
    initialize_efficientllm_metrics,
    model_compression_ratio,
    should_log_metrics,
)
from ergmeter.errors import UsageError
from ergmeter.importers.torch_trace import TraceTimes
from ergmeter.integrations import guard
from ergmeter.meter import Meter
from ergmeter.metrics.live.totals import Totals
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Missing, Reading
from ergmeter.runlog.reader import Run
from tests.runs import ALL_STEPS

PARAMETERS = 1_000_000


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in (
        *("METRICS_ENABLED", "COLLECTION_INTERVAL", "HISTORY_SIZE", "LOG_INTERVAL"),
        "PROFILE_STEPS",
    ):
        monkeypatch.delenv(f"EFFICIENTLLM_{name}", raising=False)
    monkeypatch.setattr(efficientllm, "_collector", None)
    monkeypatch.setattr(guard, "_warned", set())
    yield
    get_metrics_collector().stop_collection()


class Timed:
    """Iterations, with bounds on how long they can have taken."""

    def __init__(self, collector: MetricsCollector) -> None:
        self._collector = collector
        self.least_s = self.most_s = 0.0

    def iterate(self, seconds: float, tokens: int, samples: int) -> None:
        before_s = time.perf_counter()
        self._collector.record_iteration_start()
        began_s = time.perf_counter()
        time.sleep(seconds)
        self.least_s += time.perf_counter() - began_s
        self._collector.record_iteration_end(tokens, samples)
        self.most_s += time.perf_counter() - before_s


def value(run: Path, key: str) -> float:
    found = summarize(Run.open(run), ALL_STEPS).readings[key]
    assert isinstance(found, Reading), found
    return found.value


def test_figures_are_the_documented_sums_over_the_time_inside_iterations() -> None:
    collector = initialize_efficientllm_metrics(PARAMETERS)
    timed = Timed(collector)
    for number in range(20):
        timed.iterate(0.02 if number % 5 == 0 else 0.002, tokens=100 + number, samples=4)
        time.sleep(0.003)  # what lies between iterations is no iteration's time
    found = collector.get_all_metrics()
    tokens = sum(100 + number for number in range(20))
    per_token = found["tt_tokens_per_param_per_sec"] * PARAMETERS / tokens
    assert 1 / timed.most_s <= per_token <= 1 / timed.least_s
    per_sample = found["st_samples_per_param_per_sec"] * PARAMETERS / 80
    assert per_sample == pytest.approx(per_token)
    assert timed.least_s <= 20 * found["al_seconds"] <= timed.most_s
    # By their own formulas: tokens of an iteration = TT x parameters x AL.
    per_iteration = found["tt_tokens_per_param_per_sec"] * PARAMETERS * found["al_seconds"]
    assert per_iteration == pytest.approx(tokens / 20)


def test_a_history_of_100_does_not_inflate_3000_iterations() -> None:
    collector = MetricsCollector(1.0, 100)
    collector.set_model_parameters(PARAMETERS)
    timed = Timed(collector)
    for number in range(3000):
        timed.iterate(0.0, tokens=10, samples=2)
        if number % 500 == 499:
            collector.get_all_metrics()
    found = collector.get_all_metrics()
    assert 30_000 / timed.most_s <= found["tt_tokens_per_param_per_sec"] * PARAMETERS
    assert found["tt_tokens_per_param_per_sec"] * PARAMETERS <= 30_000 / timed.least_s
    assert timed.least_s <= 3000 * found["al_seconds"] <= timed.most_s
    assert len(collector.latency_history) == 100
    assert collector.run_path is not None
    collector.stop_collection()
    assert value(collector.run_path, "tokens.total") == 30_000
    assert value(collector.run_path, "steps.count") == 3000
    assert collector.get_all_metrics() == pytest.approx(found, nan_ok=True)


def test_the_history_size_changes_no_figure() -> None:
    found = []
    for size in (1, 10_000):
        collector = MetricsCollector(1.0, size)
        collector.set_model_parameters(10)
        for _ in range(50):
            collector.record_iteration_start()
            time.sleep(0.001)
            collector.record_iteration_end(7, 1)
        figures = collector.get_all_metrics()
        found.append(figures["tt_tokens_per_param_per_sec"] * 10 * figures["al_seconds"])
        collector.stop_collection()
    assert found == pytest.approx([7.0, 7.0])


def test_the_block_is_as_documented_and_absent_is_said_not_zero(
    capsys: pytest.CaptureFixture[str],
) -> None:
    collector = initialize_efficientllm_metrics(PARAMETERS)
    Timed(collector).iterate(0.01, 100, 4)
    capsys.readouterr()
    collector.log_metrics(100, 3.245678, None)
    lines = capsys.readouterr().out.splitlines()
    figures = collector.get_all_metrics()
    assert lines[0] == "[EfficientLLM Metrics] Iteration 100:"
    assert lines[1] == "  Loss: 3.245678"
    labels = ["AMU (GB)", "PCU (Ratio)", "AL (Seconds)", "TT (Tokens/Param/Sec)"]
    labels += ["ST (Samples/Param/Sec)", "AEC (Watts)", "Energy (J)"]
    labels += ["AL computation (Seconds)", "AL communication (Seconds)"]
    assert [line.split(":")[0].strip() for line in lines[2:]] == labels
    assert lines[4] == f"  AL (Seconds): {figures['al_seconds']:.4f}"
    assert lines[5] == f"  TT (Tokens/Param/Sec): {figures['tt_tokens_per_param_per_sec']:.2e}"
    if math.isnan(figures["amu_gb"]):  # a machine without a GPU
        assert lines[2] == "  AMU (GB): - (no accelerator)"
        assert "no accelerator" in collector.why_missing()["amu_gb"]


# As the guide shows it.
BLOCK = """[EfficientLLM Metrics] Iteration 100:
  Loss: 3.245678
  AMU (GB): 45.23
  PCU (Ratio): 0.987
  AL (Seconds): 0.1234
  TT (Tokens/Param/Sec): 1.23e-06
  ST (Samples/Param/Sec): 4.56e-09
  AEC (Watts): 342.5
"""


def test_the_guides_block_is_printed_line_by_line() -> None:
    """AEC has the two decimals that the original's module prints, as docs/from-efficientllm.md
    has it; three lines follow."""
    names = [name for name, _, _ in efficientllm.LINES]
    values = [45.23, 0.987, 0.1234, 1.23e-06, 4.56e-09, 342.5, 34250.0, 0.1, 0.02]
    block = efficientllm.block("Iteration 100", 3.245678, dict(zip(names, values, strict=True)))
    documented = BLOCK.replace("342.5", "342.50")
    assert block.startswith(documented)
    assert [line.partition(":")[0] for line in block[len(documented) :].splitlines()] == [
        "  Energy (J)", "  AL computation (Seconds)", "  AL communication (Seconds)",
    ]  # fmt: skip
    tags = [f"efficientllm/{name}" for name in names[:6]]
    written = efficientllm.scalars(dict(zip(names, values, strict=True)))
    assert written == dict(zip(tags, values[:6], strict=True))


def test_the_calls_have_the_documented_arguments_and_defaults() -> None:
    collector = inspect.signature(MetricsCollector).parameters
    defaults = {name: collector[name].default for name in ("collection_interval", "history_size")}
    assert list(collector)[:2] == list(defaults)
    assert defaults == {"collection_interval": 1.0, "history_size": 1000}
    assert list(inspect.signature(initialize_efficientllm_metrics).parameters) == [
        "model_parameters", "collection_interval", "sequence_length", "batch_size",
    ]  # fmt: skip
    made = MetricsCollector(collection_interval=0.5, history_size=2)
    assert (made.enabled, made.collection_interval, made.history_size) == (True, 0.5, 2)
    assert made.latency_history.maxlen == 2
    # What is in the original modules and not in their guide, by the names of their arguments.
    assert EfficientLLMCollector is MetricsCollector  # LLaMA-Factory's
    arguments = {
        "set_model_parameters": ["num_parameters"],
        "set_batch_config": ["sequence_length", "batch_size"],
        "record_step_end": ["tokens_processed", "samples_processed"],
        "calculate_it": ["tokens_generated", "total_inference_time"],
        "log_metrics": ["iteration", "loss", "writer"],
        **{f"calculate_{name}": [] for name in ("amu", "pcu", "al", "tt", "st", "aec")},
    }
    for name, names in arguments.items():
        assert list(inspect.signature(getattr(made, name)).parameters) == names, name


def test_what_the_original_returns_is_returned_with_the_same_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    collector = get_metrics_collector()
    collector.set_model_parameters(PARAMETERS)
    collector.set_batch_config(512, 4)
    for _ in range(3):
        collector.record_step_start()
        time.sleep(0.001)
        collector.record_step_end()
    metrics = collector.get_all_metrics()
    assert isinstance(metrics, EfficientLLMMetrics)
    attributes = dict(
        zip(("amu", "pcu", "al", "tt", "st", "aec", "it"), efficientllm.ORIGINAL, strict=True)
    )
    assert vars(metrics) == pytest.approx(
        {attribute: metrics[name] for attribute, name in attributes.items()}, nan_ok=True
    )
    assert (
        json.loads(json.dumps(metrics)).keys()
        == metrics.keys()
        == {
            *efficientllm.ORIGINAL,
            *("energy_joules", "al_computation_seconds", "al_communication_seconds"),
        }
    )
    # 2048 tokens and 4 samples an iteration, by hand.
    tokens, samples = (getattr(metrics, name) * PARAMETERS for name in ("tt", "st"))
    assert [tokens * metrics["al_seconds"], samples * metrics["al_seconds"]] == pytest.approx(
        [2048, 4]
    )
    del attributes["it"]
    for attribute, name in attributes.items():
        calculated = getattr(collector, f"calculate_{attribute}")()
        assert calculated == pytest.approx(metrics[name], nan_ok=True), attribute
    capsys.readouterr()
    written = Written()
    logged = collector.log_metrics(7, 1.0, written)
    assert list(logged) == [f"efficientllm/{name}" for name in attributes.values()]
    assert list(logged.values()) == pytest.approx(
        [metrics[name] for name in attributes.values()], nan_ok=True
    )
    points = {tag: value for tag, value, _ in written.scalars}
    assert points == {tag: value for tag, value in logged.items() if not math.isnan(value)}


class Written:
    """A writer as TensorBoard's, in memory."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))


def test_tensorboard_gets_no_point_for_what_is_missing() -> None:
    collector = get_metrics_collector()  # nobody said how many parameters
    Timed(collector).iterate(0.01, 100, 4)
    writer = Written()
    collector.log_metrics(7, 1.0, writer)
    tags = {tag for tag, _, _ in writer.scalars}
    assert "efficientllm/al_seconds" in tags
    assert "efficientllm/tt_tokens_per_param_per_sec" not in tags
    assert all(step == 7 and value > 0 for _, value, step in writer.scalars)
    assert "was not given" in collector.why_missing()["tt_tokens_per_param_per_sec"]


def test_the_loss_reaches_its_iteration_in_the_run() -> None:
    collector = initialize_efficientllm_metrics(PARAMETERS)
    for number in range(3):
        Timed(collector).iterate(0.001, 1, 1)
        if number == 1:
            collector.log_metrics(number, 2.5)
    finalize_efficientllm_metrics()
    assert collector.run_path is not None
    losses = Run.open(collector.run_path).steps()["loss"]
    assert [None if math.isnan(loss) else loss for loss in losses] == [None, 2.5, None]


def test_disabled_every_call_does_nothing_and_one_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EFFICIENTLLM_METRICS_ENABLED", "False")
    initialize_efficientllm_metrics(PARAMETERS)
    collector = get_metrics_collector()
    collector.record_iteration_start()
    collector.record_iteration_end(1, 1)
    collector.log_metrics(10, 1.0, Written())
    collector.reset()
    assert not should_log_metrics(10)
    assert not collector.should_log_metrics(10)
    assert all(math.isnan(one) for one in collector.get_all_metrics().values())
    finalize_efficientllm_metrics()
    said = capsys.readouterr()
    disabled = "[EfficientLLM] Metrics collection disabled via EFFICIENTLLM_METRICS_ENABLED=false\n"
    assert said.out == disabled
    assert said.err == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["1", "yes", "on"])
def test_only_true_enables_and_what_is_neither_true_nor_false_gets_one_line(
    value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFFICIENTLLM_METRICS_ENABLED", value)
    assert not any(should_log_metrics(number) for number in range(20))
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"EFFICIENTLLM_METRICS_ENABLED={value} is neither true nor false" in said


def test_the_log_interval_is_read_at_every_call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [number for number in range(25) if should_log_metrics(number)] == [0, 10, 20]
    monkeypatch.setenv("EFFICIENTLLM_LOG_INTERVAL", "4")
    assert [number for number in range(10) if should_log_metrics(number)] == [0, 4, 8]
    monkeypatch.setenv("EFFICIENTLLM_LOG_INTERVAL", "often")
    assert [number for number in range(25) if should_log_metrics(number)] == [0, 10, 20]
    assert "EFFICIENTLLM_LOG_INTERVAL=often is not a number" in capsys.readouterr().err


def test_the_variables_are_said_where_they_are_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFFICIENTLLM_COLLECTION_INTERVAL", "0.5")
    monkeypatch.setenv("EFFICIENTLLM_HISTORY_SIZE", "20")
    collector = initialize_efficientllm_metrics(7_000_000)
    said = capsys.readouterr().out.splitlines()
    expected = "[EfficientLLM] Metrics collection initialized for model with 7,000,000 parameters"
    assert said == [expected, "[EfficientLLM] Collection interval: 0.5s, History size: 20"]
    assert collector.latency_history.maxlen == 20
    assert get_efficientllm_collector() is get_metrics_collector() is collector


def test_a_step_without_tokens_is_sequence_length_times_batch_size() -> None:
    collector = initialize_efficientllm_metrics(PARAMETERS, None, 512, 4)
    for tokens in (None, 100):
        collector.record_step_start()
        time.sleep(0.001)
        collector.record_step_end(tokens)
    finalize_efficientllm_metrics()
    assert collector.run_path is not None
    assert value(collector.run_path, "tokens.total") == 512 * 4 + 100


def test_after_a_reset_figures_are_of_what_comes_after() -> None:
    collector = initialize_efficientllm_metrics(PARAMETERS)
    timed = Timed(collector)
    timed.iterate(0.05, 1000, 1)
    collector.get_all_metrics()
    collector.reset()
    assert math.isnan(collector.get_all_metrics()["al_seconds"])
    timed = Timed(collector)
    timed.iterate(0.005, 10, 1)
    found = collector.get_all_metrics()
    assert timed.least_s <= found["al_seconds"] <= timed.most_s
    finalize_efficientllm_metrics()
    assert collector.run_path is not None
    assert value(collector.run_path, "tokens.total") == 1010


def test_blocks_cost_no_more_than_their_share_of_the_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(efficientllm, "_LOOK_S", 0.0)
    monkeypatch.setattr(efficientllm, "_LOOK_FRAC", 0.0)
    collector = initialize_efficientllm_metrics(PARAMETERS)
    timed = Timed(collector)
    for number in range(3):
        timed.iterate(0.002 * 10**number, 10, 1)
        collector.log_metrics(number, 1.0)
    said = capsys.readouterr().out.splitlines()
    latencies = [line for line in said if "AL (Seconds)" in line]
    assert len(latencies) == 3
    assert len(set(latencies)) == 1  # of the first look
    assert collector.get_all_metrics()["al_seconds"] * 3 >= timed.least_s  # asked for, looked at


def test_it_is_tokens_over_time_of_all_generations() -> None:
    collector = get_metrics_collector()
    assert collector.calculate_it(100, 2.0) == 50
    assert collector.calculate_it(500, 2.0) == 250
    assert collector.get_all_metrics()["it_tokens_per_sec"] == 150
    assert math.isnan(collector.calculate_it(5, 0.0))


def test_a_generation_of_tokens_below_0_is_refused_once_and_not_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    collector = get_metrics_collector()
    assert collector.calculate_it(100, 2.0) == 50
    assert math.isnan(collector.calculate_it(-10, 1))
    assert math.isnan(collector.calculate_it(-20, 1))
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "-10 tokens in 1 s is not valid" in error
    assert collector.get_all_metrics()["it_tokens_per_sec"] == 50


@pytest.mark.parametrize(
    ("tokens", "seconds"), [("a", 2), (5, None), ([1], 2), (5, math.nan), (math.inf, 1)]
)
def test_a_generation_of_what_is_no_number_is_refused_with_one_line(
    tokens: Any, seconds: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    collector = get_metrics_collector()
    assert math.isnan(collector.calculate_it(tokens, seconds))
    error = capsys.readouterr().err
    line = f"calculate_it: {tokens!r} tokens in {seconds!r} s is not valid and not counted"
    assert error == f"ergmeter: {line}\n"
    assert collector.calculate_it("100", 2.0) == 50  # type: ignore[arg-type]
    assert collector.get_all_metrics()["it_tokens_per_sec"] == 50


def test_finalized_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        collector = initialize_efficientllm_metrics(PARAMETERS)
        Timed(collector).iterate(0.001, 1, 1)
        capsys.readouterr()
        finalize_efficientllm_metrics()
        finalize_efficientllm_metrics()
        lines = capsys.readouterr().out.splitlines()
        assert lines == [
            "[EfficientLLM] Metrics collection finalized",
            f"[EfficientLLM] erg report {collector.run_path}",
        ]


def parts(collector: MetricsCollector) -> list[float]:
    """AL and its two parts."""
    names = ("al_seconds", "al_computation_seconds", "al_communication_seconds")
    return [collector.get_all_metrics()[name] for name in names]


def test_without_a_profile_als_parts_are_absent_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    collector = initialize_efficientllm_metrics(PARAMETERS)
    Timed(collector).iterate(0.001, 1, 1)
    if math.isnan(collector.get_all_metrics()["pcu_ratio"]):  # a machine without a GPU
        assert [math.isnan(part) for part in parts(collector)] == [False, True, True]
        collector.log_metrics(1, 1.0)
        reason = "- (no steps were profiled: set EFFICIENTLLM_PROFILE_STEPS=3)"
        assert f"  AL computation (Seconds): {reason}" in capsys.readouterr().out


def test_als_parts_are_the_shares_that_a_profile_in_the_run_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    collector = initialize_efficientllm_metrics(PARAMETERS)
    Timed(collector).iterate(0.01, 100, 4)
    assert collector._meter is not None
    for computing_s, communicating_s in ((0.6, 0.3), (0.8, 0.1)):  # of two ranks
        shares = TraceTimes(3, "gpu", 1.0, computing_s, communicating_s, 0.05, 0.0, 0.0, 0.05)
        collector._meter.record(shares.mark(time.monotonic_ns()))
    latency_s, computation_s, communication_s = parts(collector)
    assert computation_s == pytest.approx(0.7 * latency_s)
    assert communication_s == pytest.approx(0.2 * latency_s)
    capsys.readouterr()
    collector.log_metrics(1, 1.0)
    *_, computation, communication = capsys.readouterr().out.splitlines()
    assert computation == f"  AL computation (Seconds): {computation_s:.4f}"
    assert communication == f"  AL communication (Seconds): {communication_s:.4f}"


def test_profiled_iterations_give_als_parts_in_the_next_block_and_in_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EFFICIENTLLM_PROFILE_STEPS", "2")
    collector = initialize_efficientllm_metrics(PARAMETERS)
    weight = torch.randn(200, 200)

    def iterate(times: int) -> None:
        for _ in range(times):
            collector.record_iteration_start()
            for _ in range(20):
                weight @ weight
            collector.record_iteration_end(10, 1)

    iterate(3)
    waiting = "steps are profiled after the first 11"
    assert collector.why_missing()["al_computation_seconds"] == waiting
    iterate(12)
    latency_s, computation_s, communication_s = parts(collector)
    assert 0 < computation_s <= latency_s
    assert communication_s == 0
    iterate(10)
    finalize_efficientllm_metrics()
    assert collector.run_path is not None
    run = collector.run_path
    share = computation_s / latency_s
    assert value(run, "profile.computation_s") == pytest.approx(
        share * value(run, "time.in_step_s"), rel=1e-6
    )
    # The window begins after the trace was read: its note has for how long all of it took.
    marks = {mark.name: mark for mark in Run.open(run).marks}
    warmup_ns = marks["profile_unread"].t_ns
    profile = json.loads(marks["profiled"].detail)
    assert warmup_ns >= marks["profiled"].t_ns
    assert profile["held_s"] > 0
    starts = Run.open(run).steps()["start_ns"]
    assert (starts[13] >= warmup_ns).all()


@pytest.mark.parametrize("asked", ["0", "-1", "often"])
def test_a_number_of_profiled_steps_that_is_none_profiles_nothing(
    asked: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFFICIENTLLM_PROFILE_STEPS", asked)
    collector = initialize_efficientllm_metrics(PARAMETERS)
    Timed(collector).iterate(0.001, 1, 1)
    assert collector._profile is None
    assert collector.get_all_metrics()["al_seconds"] > 0
    warning = f"EFFICIENTLLM_PROFILE_STEPS={asked} is not a number above 0"
    assert (warning in capsys.readouterr().err) == (asked != "0")


def totals(**amounts: Any) -> Totals:
    """A run of 100 iterations of 0.1 s in a window of 10.2 s, on a GPU that is busy for 8.16 s."""
    known = {"tokens": 1000.0, "samples": 10.0, "energy_j": 1.0, "memory_byte_s": 1.0}
    return Totals(**{
        "start_ns": 0, "end_ns": 10_200_000_000, "steps": 100, "in_steps_s": 10.0,
        **known, "busy_s": 8.16, **amounts,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("world", "gpus", "amounts", "expected"),
    [
        (1, 1, {}, (0.08, 0.0)),  # PCU is 0.8: 80 ms of the 100 ms of an iteration
        (1, 2, {}, None),  # one process with two GPUs copies between them
        (2, 1, {}, None),  # the kernels of collectives are kernels too
        (
            1,
            1,
            {"in_steps_s": 5.0},
            None,
        ),  # half of the time is evaluation, with kernels of its own
        (1, 1, {"busy_s": Missing("no accelerator")}, None),
    ],
)
def test_one_rank_on_one_gpu_needs_no_profile(
    world: int,
    gpus: int,
    amounts: dict[str, Any],
    expected: tuple[float, float] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collector = initialize_efficientllm_metrics(PARAMETERS)
    Timed(collector).iterate(0.001, 1, 1)
    monkeypatch.setattr(efficientllm, "world_size", lambda: world)
    monkeypatch.setattr(efficientllm, "_own_gpus", lambda: {f"GPU-{n}" for n in range(gpus)})
    monkeypatch.setattr(collector._running, "totals", lambda *_, **__: totals(**amounts))
    _, *shares = parts(collector)
    assert (
        all(map(math.isnan, shares))
        if expected is None
        else (shares == pytest.approx(list(expected)))
    )


def test_mcr_is_the_papers() -> None:
    """Table 9 of arXiv 2505.13840: int4 of DeepSeek-R1-Distill-Qwen-14B, scores 0.4719 and 0.4361.

    A quarter of the size and 92.4 % of the score.
    """
    found = model_compression_ratio(
        28e9, 7e9, original_performance=0.4719, compressed_performance=0.4361
    )
    assert found == pytest.approx(3.6965, abs=1e-4)
    assert model_compression_ratio(30, 10) == 3
    with pytest.raises(UsageError):
        model_compression_ratio(30, 0)


def test_a_writer_that_raises_and_a_loss_that_is_none_do_not_reach_the_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Broken:
        def add_scalar(self, *_: Any) -> None:
            raise OSError("disk full")

    collector = initialize_efficientllm_metrics(PARAMETERS)
    Timed(collector).iterate(0.001, 1, 1)
    collector.log_metrics(1, {"lm loss": 2.0}, Broken())
    collector.log_metrics(2, None, Broken())
    said = capsys.readouterr()
    assert "Loss: - (the loss is a dict, not a number" in said.out
    assert said.err.count("disk full") == 1
    assert collector.get_all_metrics()["al_seconds"] > 0


def test_where_no_run_can_be_made_the_loop_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "runs").write_text("a file where runs should be")
    collector = initialize_efficientllm_metrics(PARAMETERS)
    Timed(collector).iterate(0.001, 1, 1)
    collector.log_metrics(1, 1.0)
    finalize_efficientllm_metrics()
    said = capsys.readouterr()
    assert said.err.count("MetricsCollector stopped") == 1
    assert "initialized" not in said.out
    assert math.isnan(collector.get_all_metrics()["al_seconds"])


def test_a_meter_that_measures_already_is_used(tmp_path: Path) -> None:
    with Meter(tmp_path / "run", probes=["process"]) as meter:
        collector = initialize_efficientllm_metrics(PARAMETERS)
        Timed(collector).iterate(0.001, 5, 1)
        finalize_efficientllm_metrics()
        assert collector.run_path == tmp_path / "run"
        with meter.step(tokens=3):  # it is not ours to close
            time.sleep(0.001)
    assert value(tmp_path / "run", "tokens.total") == 8


def test_calls_out_of_order_are_taken_as_they_come() -> None:
    collector = initialize_efficientllm_metrics(PARAMETERS)
    collector.record_iteration_end(5, 5)  # nothing had begun
    assert math.isnan(collector.get_all_metrics()["al_seconds"])
    collector.record_iteration_start()
    collector.record_iteration_start()
    collector.record_iteration_end(5, 5)
    assert collector.get_all_metrics()["al_seconds"] > 0
    finalize_efficientllm_metrics()
    collector.record_iteration_start()
    collector.record_iteration_end(5, 5)
    assert collector.failed == ""


def test_a_ranks_devices_are_those_that_it_holds_memory_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Properties:
        uuid = "5b1c0000-0000-0000-0000-00000000000a"

    assert efficientllm._own_gpus() == set() or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 1 << 20 if index == 2 else 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: Properties() if index == 2 else None
    )
    assert efficientllm._own_gpus() == {f"GPU-{Properties.uuid}"}
