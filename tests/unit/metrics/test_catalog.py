"""The catalogue: scopes, names in benches and gates, and how metrics are compared."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pyarrow.parquet as pq
import pytest

from ergmeter import registry
from ergmeter.bench import results, tables
from ergmeter.cli.main import main
from ergmeter.compare.entry import read_side
from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.metrics.catalog import (
    Metric,
    Position,
    bench_columns,
    catalogue,
    every_metric,
    expected_in,
    find,
    in_view,
    positions,
    rule_metric,
    rule_names,
)
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.records import Reading
from ergmeter.runlog.reader import Run
from tests.runs import add_writer, even_steps, make_run, printed_card

RULES = {
    "tokens_per_s": ("real_tokens_per_s", "computed_tokens_per_s"),
    "tokens_per_s_per_device": (
        "real_tokens_per_s_per_device",
        "computed_tokens_per_s_per_device",
    ),
    "real_tokens_per_s": ("real_tokens_per_s",),
    "computed_tokens_per_s": ("computed_tokens_per_s",),
    "samples_per_s": ("samples_per_s",),
    "steps_per_s": ("steps_per_s",),
    "step_time": ("step_median_s",),
    "runtime": ("runtime_s",),
    "loss": ("loss",),
    "eval_loss": ("eval_loss",),
    "peak_memory": (
        *("memory_hf_peak_bytes", "memory_allocator_peak_bytes", "memory_nvidia_peak_bytes"),
        *("memory_nvidia_mean_bytes", "memory_hf_seed_bytes", "memory_device_peak_bytes"),
        "memory_process_peak_bytes",
    ),
    "nvidia_memory": ("memory_nvidia_mean_bytes",),
    "hf_memory": ("memory_hf_peak_bytes",),
    "mfu": ("mfu_frac",),
    "whole_run_tokens_per_s": ("whole_run_tokens_per_s",),
    "whole_run_mfu": ("whole_run_mfu_frac",),
    "whole_run_joules_per_token": ("whole_run_joules_per_token",),
    "joules_per_token": ("joules_per_token",),
    "energy": ("energy_j",),
}


def test_the_catalogue_of_a_run_has_no_metric_of_another_scope() -> None:
    others = set(every_metric()) - set(catalogue())
    assert {"training.eval_loss", "target.time_s", "memory.peak_bytes", "analysis.score"} <= others
    assert {every_metric()[key].scope for key in others} == {
        "comparison",
        "cell",
        "job",
        "analysis",
    }
    assert list(catalogue()) == [key for key in every_metric() if key in catalogue()]


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("training.eval_loss", "only comparisons have this: erg compare"),
        ("memory.hf_peak_bytes", "only bench cells have this: erg bench run"),
        ("analysis.nki_frac", "only Trainium analyses have this: erg analyze"),
    ],
)
def test_a_metric_of_another_scope_is_absent_from_a_run_with_the_reason(key: str, why: str) -> None:
    with pytest.raises(NotMeasurable, match=why):
        every_metric()[key].reading(cast("Evidence", None))


def test_find_knows_other_scopes_only_when_asked() -> None:
    with pytest.raises(UsageError, match=r"no metric 'training\.eval_loss'"):
        find("training.eval_loss")
    assert find("training.eval_loss", every_metric())[0].scope == "comparison"
    assert find("tok_per_s", every_metric())[1] is not None


def test_every_rule_of_a_gate_names_a_metric_with_its_columns() -> None:
    assert set(rule_names()) == set(RULES)
    for name, columns in RULES.items():
        metric = rule_metric(name)
        keys = metric.alternatives or (metric.key,)
        assert tuple(every_metric()[key].column for key in keys) == columns


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("train_tokens_per_second", "throughput.tokens_per_s_per_device"),
        ("train_loss", "training.loss"),
        ("train_runtime", "time.run_s"),
        ("train_samples_per_second", "throughput.samples_per_s"),
        ("tok_per_s", "throughput.tokens_per_s"),
        ("mem_peak_torch_mem_alloc_in_bytes", "memory.hf_peak_bytes"),
        ("mem_nvidia_mem_reserved", "memory.nvidia_mean_bytes"),
        ("timed_s", "time.window_s"),
        ("latency.ttft_p99_s", "latency.ttft_p99_s"),
        ("J_per_token", "energy.joules_per_token"),
    ],
)
def test_a_rule_may_use_an_alias_a_column_or_a_key(name: str, key: str) -> None:
    assert rule_metric(name).key == key


def test_an_unknown_rule_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"no metric 'tokens_pers'; did you mean tokens_per_s\?"):
        rule_metric("tokens_pers")
    with pytest.raises(UsageError, match=r"no metric '%%'; there are tokens_per_s, "):
        rule_metric("%%")


def test_the_columns_of_a_bench_and_the_names_of_rules_are_each_one_metric() -> None:
    metrics = every_metric().values()
    assert len(bench_columns()) == sum(bool(metric.column) for metric in metrics)
    names = [name for metric in metrics for name in (metric.rule, *metric.rule_aliases) if name]
    assert len(names) == len(set(names))
    assert {"padding_frac", "timed_steps", "mean_w", "epoch"} <= set(bench_columns())


def test_alternatives_are_metrics_of_the_same_unit_and_direction() -> None:
    for metric in every_metric().values():
        for key in metric.alternatives:
            other = every_metric()[key]
            assert (other.unit, other.direction) == (metric.unit, metric.direction)


@pytest.mark.parametrize(
    ("key", "noun", "quantity"),
    [
        ("throughput.tokens_per_s", "speed", "speed"),
        ("time.step_s", "step time", "speed"),
        ("time.step_p95_s", "step time, 95th percentile", "time.step_p95_s"),
        ("throughput.whole_run_tokens_per_s", "speed over the whole run", "whole-run speed"),
        ("throughput.whole_run_samples_per_s", "samples/s, whole run", "whole-run speed"),
        ("time.run_s", "run", "whole-run speed"),
        ("energy.joules_per_token", "energy per token", "energy per token"),
        ("energy.whole_run_joules_per_token", "energy per token over the whole run",
         "whole-run energy per token"),
        ("carbon.co2e_per_million_tokens_g", "carbon per million tokens", "energy per token"),
        ("utilization.whole_run_mfu_frac", "MFU over the whole run", "whole-run speed"),
        ("memory.device_peak_bytes", "peak memory", "device memory, peak"),
        ("memory.process_peak_bytes", "host memory", "memory.process_peak_bytes"),
        ("training.loss", "training loss", "training.loss"),
    ],
)  # fmt: skip
def test_name_in_a_sentence_and_tested_quantity(key: str, noun: str, quantity: str) -> None:
    metric = catalogue()[key]
    assert (metric.phrase, metric.tested_quantity) == (noun, quantity)


def test_only_losses_are_compared_by_their_difference() -> None:
    differences = {key for key, metric in every_metric().items() if metric.scale == "difference"}
    assert differences == {"training.loss", "training.eval_loss"}


def test_a_view_has_its_metrics_in_order_with_labels_and_groups() -> None:
    assert list(in_view("list").items()) == [
        ("throughput.tokens_per_s", Position(10, label="tokens/s")),
        ("time.step_s", Position(20, label="step")),
        ("utilization.mfu_frac", Position(25, label="MFU")),
        ("energy.joules_per_token", Position(30, label="J/token")),
        ("time.run_s", Position(40, label="lasted")),
    ]
    groups = list(dict.fromkeys(at.group for at in in_view("card").values()))
    assert groups == [
        *("throughput", "time", "latency", "activity", "compute", "energy", "memory", "load")
    ]
    assert expected_in("report") == [
        *("throughput.tokens_per_s", "time.step_s", "utilization.mfu_frac", "energy.run_j")
    ]
    assert in_view("no such view") == {}


def test_positions_are_read_from_text() -> None:
    assert positions("model card 90 in all steps expected; load 30 as TTFT\nmedian; so far 5") == {
        "model card": Position(90, "all steps", is_expected=True),
        "load": Position(30, label="TTFT\nmedian"),
        "so far": Position(5),
    }
    assert positions("analyze json 40 in % as mfu_percent") == {
        "analyze json": Position(40, "%", "mfu_percent")
    }
    with pytest.raises(ValueError, match="not a position in a view: 'card in energy'"):
        positions("list 5; card in energy")


def test_no_two_metrics_have_the_same_order_in_a_view() -> None:
    for view in {view for metric in every_metric().values() for view in metric.views}:
        orders = [at.order for at in in_view(view).values()]
        assert len(orders) == len(set(orders)), view


CACHES = (
    *(catalogue, every_metric, in_view, bench_columns, rule_names),
    *(tables.columns, tables.schema, tables.reading_columns),
    *(tables._metric_columns, tables._column_kinds, results._run_metrics, results._checksum),
)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    metric = Metric(
        "plugin.answers_per_s",
        "answers per second",
        "answers/s",
        "higher",
        "always 42",
        (),
        lambda _: Reading(42.0, "answers/s", "measured"),
        column="answers_per_s",
        rule="answers",
        views="card 105 in throughput; list 15 as answers",
    )
    names, load = registry.names, registry.load
    monkeypatch.setattr(registry, "names", lambda kind: [*names(kind), "plugin"])
    monkeypatch.setattr(
        registry, "load", lambda kind, name: [metric] if name == "plugin" else load(kind, name)
    )
    for cached in CACHES:
        cached.cache_clear()
    yield
    for cached in CACHES:
        cached.cache_clear()


@pytest.mark.usefixtures("plugin")
def test_the_metric_of_a_plugin_takes_its_place_on_card_and_list_and_in_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "runs" / "run")
    add_writer(run, steps=even_steps(20, tokens_computed=100))
    card = printed_card(Run.open(run), width=100)
    rows = [" ".join(line.split()) for line in card.splitlines()]
    first = next(at for at, row in enumerate(rows) if "throughput tokens/s" in row)
    assert "answers per second 42 answers/s measured" in rows[first + 1]

    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit, match="0"):
        main(["list", str(tmp_path / "runs")])
    head, row = capsys.readouterr().out.splitlines()[:2]
    assert head.split()[-6:] == ["tokens/s", "answers", "step", "MFU", "J/token", "lasted"]
    assert row.split()[4:6] == ["100", "42"]
    assert rule_metric("answers").key == "plugin.answers_per_s"


def test_the_metric_of_a_plugin_is_a_column_of_a_bench(
    tmp_path: Path, erg: Callable[..., tuple[int, str, str]], request: pytest.FixtureRequest
) -> None:
    run = make_run(tmp_path / "exp_0" / "run")
    add_writer(run, steps=even_steps(20, tokens_computed=100))
    for name, content in {"status": {"status": "ok", "attempts": [{}]}, "results": {}}.items():
        (run.parent / f"{name}.json").write_text(json.dumps(content))
    without = results.table(tmp_path).column_names  # and the row is cached beside its cell
    request.getfixturevalue("plugin")
    added = [name for name in results.table(tmp_path).column_names if name not in without]
    parts = ("_low", "_high", "_basis", "_note")
    assert added == [f"answers_per_s{part}" for part in ("", *parts)]
    exports = [tmp_path / "a.csv", tmp_path / "a.parquet"]
    options = [word for path in exports for word in ("--export", path)]
    code, out, _ = erg("bench", "report", tmp_path, "--json", *options)
    with exports[0].open(newline="") as file:
        stored = [*json.loads(out), *csv.DictReader(file), *pq.read_table(exports[1]).to_pylist()]
    assert code == 0
    assert [float(row["answers_per_s"]) for row in stored] == [42.0] * 3
    assert {row["answers_per_s_basis"] for row in stored} == {"measured"}
    for path in (tmp_path, *exports):
        (entry,) = read_side(path, ()).entries
        assert entry.value("plugin.answers_per_s") == 42.0
