"""Traces of torch's profiler: one written by hand, and one that torch writes here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ergmeter.errors import FormatError
from ergmeter.importers.importing import ImportRequest, import_log
from ergmeter.importers.torch_trace import events_of, split
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Missing, Reading
from ergmeter.runlog.reader import Run

torch = pytest.importorskip("torch")


def event(cat: str, name: str, start_us: float, end_us: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start_us, "dur": end_us - start_us}


# 0        10        20        30        40        50        60        70        80 us
# gemm-----gemm-----                     nccl alone          copy-----
#      gemm beside---          nccl beside    gemm                          gemm-----
GPU = [
    event("user_annotation", "ProfilerStep#7", -500, -400),
    event("user_annotation", "ProfilerStep#8", -400, -100),
    event("kernel", "sm90_xmma_gemm_bf16", 0, 10),
    event("kernel", "sm90_xmma_gemm_bf16", 10, 20),
    event("kernel", "elementwise", 5, 20),
    event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 15, 20),
    event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 40, 50),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 45, 65),
    event("gpu_memset", "Memset (Device)", 60, 62),
    event("kernel", "sm90_xmma_gemm_bf16", 70, 80),
    event("cpu_op", "aten::mm", -450, -440),
]


def trace(events: list[dict[str, Any]], *, indent: int | None = 1) -> str:
    whole = {
        "schemaVersion": 1,
        "traceEvents": [*events, {"ph": "M", "name": "x"}],
        "traceName": "",
    }
    return json.dumps(whole, indent=indent)


def test_kinds_are_unions_and_what_hides_behind_computation_costs_nothing() -> None:
    found = split(events_of(trace(GPU)))
    us = 1e6
    assert (found.on, found.steps) == ("gpu", 2)
    assert found.window_s * us == pytest.approx(80)
    assert found.compute_s * us == pytest.approx(30)  # 0 to 20 and 70 to 80
    assert found.communication_s * us == pytest.approx(15)
    assert found.communication_alone_s * us == pytest.approx(10)
    assert found.copy_s * us == pytest.approx(20)
    assert found.copy_alone_s * us == pytest.approx(15)  # 50 to 65
    assert found.idle_s * us == pytest.approx(25)  # 20 to 40, 65 to 70
    parts = (found.compute_s, found.communication_alone_s, found.copy_alone_s, found.idle_s)
    assert sum(parts) == pytest.approx(found.window_s)


def test_an_imported_trace_has_its_steps_and_where_their_time_went(tmp_path: Path) -> None:
    log = tmp_path / "trace.json.gz"
    log.write_bytes(gzip.compress(trace(GPU).encode()))
    (made,) = import_log(ImportRequest(log, out=tmp_path / "run")).runs
    assert (made.steps, made.first_step, made.last_step) == (2, 7, 8)
    found = summarize(Run.open(made.path)).readings
    idle, alone = found["profile.idle_frac"], found["profile.communication_alone_frac"]
    assert isinstance(idle, Reading)
    assert isinstance(alone, Reading)
    assert [idle.value, alone.value] == pytest.approx([25 / 80, 10 / 80])
    assert "2 steps under torch's profiler" in idle.note
    step, computation = found["time.in_step_s"], found["profile.computation_s"]
    assert isinstance(step, Reading)
    assert isinstance(computation, Reading)
    assert computation.value == pytest.approx(30 / 80 * step.value)


def test_a_trace_of_this_torch_is_read(tmp_path: Path) -> None:
    profiler = torch.profiler
    layer = torch.nn.Linear(256, 256)
    path = tmp_path / "trace.json"
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU],
        schedule=profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda one: one.export_chrome_trace(str(path)),
    ) as on:
        for _ in range(5):
            layer(torch.ones(512, 256)).sum().backward()
            on.step()
    events = events_of(path.read_text())
    found = split(events)
    assert (found.steps, found.on) == (3, "host")
    # Products of that size are nearly all there is in such a step.
    products = sum(one["dur"] for one in events if one["name"] in ("aten::addmm", "aten::mm"))
    assert products / 1e6 <= found.compute_s <= found.window_s
    assert found.compute_s + found.idle_s == pytest.approx(found.window_s)
    assert found.communication_s == found.copy_s == 0


def test_a_trace_that_names_no_steps_has_where_its_time_went(tmp_path: Path) -> None:
    log = tmp_path / "trace.json"
    log.write_text(trace([one for one in GPU if one["cat"] != "user_annotation"]))
    (made,) = import_log(ImportRequest(log, out=tmp_path / "run")).runs
    assert made.steps == 0
    assert "names no steps" in made.why_no_steps
    found = summarize(Run.open(made.path)).readings
    idle, computation = found["profile.idle_frac"], found["profile.computation_s"]
    assert isinstance(idle, Reading)
    assert idle.value == pytest.approx(25 / 80)
    assert "a trace of torch's profiler that names no steps" in idle.note
    assert isinstance(computation, Missing)
    assert "names no steps" in computation.reason


def test_a_plain_profile_of_the_host_is_read_from_its_first_operator_to_its_last(
    tmp_path: Path,
) -> None:
    ops = [event("cpu_op", "aten::mm", 0, 10), event("cpu_op", "aten::add", 15, 20)]
    found = split(events_of(trace(ops)))
    assert (found.steps, found.on) == (None, "host")
    assert (found.window_s * 1e6, found.idle_s * 1e6) == pytest.approx((20, 5))
    path = tmp_path / "trace.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as on:
        torch.ones(64, 64) @ torch.ones(64, 64)
    on.export_chrome_trace(str(path))
    (made,) = import_log(ImportRequest(path, out=tmp_path / "run")).runs
    assert isinstance(summarize(Run.open(made.path)).readings["profile.idle_frac"], Reading)


KERNEL = '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm", '


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"traceEvents": [\n{"ph": "X", "ts": 1', "truncated"),
        ('{"traceEvents"', "truncated"),
        ('{"traceEvents": []}', "neither kernels"),
        ('{"traceEvents": null}', "traceEvents is null"),
        ('{"traceEvents": {"a": [1]}}', "traceEvents is an object"),
        (KERNEL + '"dur": 5}]}', "gemm has no ts"),
        (KERNEL + '"ts": "12", "dur": 5}]}', 'gemm has ts "12"'),
        (KERNEL + '"ts": NaN, "dur": 5}]}', "gemm has ts NaN"),
        (KERNEL + '"ts": 1, "dur": -5}]}', "neither kernels"),
        (KERNEL + '"ts": 1, "dur": 0}]}', "nothing that lasted"),
        (trace(GPU * 100, indent=None), "line of 64 KiB or more"),
    ],
)
def test_a_trace_that_is_none_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    log = tmp_path / "trace.json"
    log.write_text(text + "\n")
    with pytest.raises(FormatError, match=rf"^[^\n]*{said}[^\n]*$"):
        import_log(ImportRequest(log, out=tmp_path / "run"))
