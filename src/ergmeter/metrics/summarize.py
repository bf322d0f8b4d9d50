"""Summary of a run: for every metric a reading or why there is none, and notes on the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import IMPOSSIBLE, Metric, catalogue, every_metric
from ergmeter.metrics.checks import fitness, flop_count_contradictions
from ergmeter.metrics.definitions.throughput import samples
from ergmeter.metrics.definitions.tokens import tokens
from ergmeter.metrics.definitions.training import divergence
from ergmeter.metrics.device_energy import boundary
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.gpu_use import gpu_names
from ergmeter.metrics.evidence.ranks import clock_notes, disagreement, ranks_by_writer
from ergmeter.metrics.evidence.samples import device_questions, visit
from ergmeter.metrics.live.alert_rules import noted_alerts
from ergmeter.records import Flops, Missing, Reading, Result, Summary, or_none
from ergmeter.runlog.format import dropped_steps
from ergmeter.runlog.reader import CUT_OFF, Run
from ergmeter.runlog.settings import WARMUP, Settings
from ergmeter.units import duration, grouped

# A first step this many times the median includes compilation or a cold cache.
SLOW_FIRST_STEP = 3.0
OVERLAPPING_FRAC = 0.4  # of the steps begin before the previous step has ended
FULL_DISK_FRAC = 0.02
SHORT_RUN_S = 3.0  # the program is read every 2 s, the node every 3 s
# Beyond these limits a note warns of noise.
NOISY_P95 = 2.0  # the 95th percentile of the step time, over its median
NOISY_FRAC = 0.1  # half the interval of a rate, over the rate

_NOTE_OF_MARK = {
    "probe_failed": "a probe stopped during the run: {}",
    "device_shared": "other programs computed on a GPU of this run: {}",
    "device_lost": "a device was lost during the run: {}",
    "step_clock_failed": "{}",
    "activity_failed": "hardware counters could no longer be read: {}",
    "rows_dropped": "part of the record is missing: {}",
    "samples_dropped": "part of the record is missing: {}",
    "steps_merged": "{}; totals and rates are exact, the time of a step is the mean of its row",
    "value_refused": "{}",
    "assumed": "assumed: {}",
    "output_unrecognised": "{}",
    "output_buffered": "{}",
    "importer_failed": "{}",
    "restarted": "the output starts over: {}",
    "several_programs": "{}",
    "handover_failed": "part of the record is missing: {}",
    "alert_failed": "an alert was not delivered: {}",
    "alert_unjudged": "an alert was not judged: {}",
    "alarm_failed": "alerts may be missing: {}",
    "stop_asked": "the run was asked to stop: {}",
    "sink_failed": "a sink failed: {}",
    "sink_recovered": "a sink recovered: {}",
    "integration_failed": "ergmeter stopped measuring inside the program: {}",
}


_LOSS_LOST = "loss is not a number"  # begins an importer's remark
NOTED_CHECKS = ("record", "warm_up", "noise", "flop_count")
# Marks that the recorder writes about printed lines.
_READING_LINES = (
    *("value_refused", "assumed", "output_unrecognised", "output_buffered", "restarted"),
    "several_programs",
)


def notes(evidence: Evidence, readings: dict[str, Result]) -> tuple[str, ...]:
    """The notes on a run, most serious first."""
    run = evidence.run
    remarks = []
    if run.status == CUT_OFF:
        remarks.append(
            "the run was cut off: its process was killed, or could no longer write;"
            " what it had written is here"
        )
    remarks += [f"damaged file left out: {line}" for line in run.damage]
    remarks += [f"part of the record is missing: {lost}" for lost in dropped_steps(run)]
    diverged = divergence(readings)
    of_lines = _of_lines(evidence)
    for mark in run.marks:
        if diverged and mark.name == "value_refused" and mark.detail.startswith(_LOSS_LOST):
            continue  # the note on divergence says more
        if mark.name in _NOTE_OF_MARK and (mark.name, mark.detail) not in of_lines:
            remarks.append(_NOTE_OF_MARK[mark.name].format(mark.detail))
    remarks += [f"the training {diverged}"] if diverged else []
    remarks += [
        f"alert: {alert.with_ranks}" for alert in noted_alerts(run, _ranks_of_writers(evidence))
    ]
    remarks += _unused(evidence)
    remarks += _impossible(readings)
    remarks += _mfu(evidence, readings)
    remarks += flop_count_contradictions(evidence)
    remarks += or_none(_told_twice, evidence) or []
    of_window = (or_none(lambda: evidence.window_remarks) or ()) if evidence.trains else ()
    remarks += of_window or or_none(_slow_first_step, evidence, readings) or []
    remarks += or_none(_profiled, evidence) or []
    remarks += _noisy(evidence, readings)
    remarks += [] if evidence.is_imported else or_none(_short, evidence) or []
    remarks += or_none(_ranks, evidence) or []
    remarks += clock_notes(evidence.clocks)
    remarks += _worst(evidence)
    remarks += _full_disk(evidence)
    remarks += _whose_gpus(evidence)
    return tuple(dict.fromkeys(remarks))


def _ranks_of_writers(evidence: Evidence) -> dict[str, int]:
    """The rank of each writer that recorded steps, by name."""
    writers = evidence.run.writers
    ranks = ranks_by_writer(evidence)
    return {writers[number].directory.name: rank for number, rank in ranks.items()}


def _of_lines(evidence: Evidence) -> set[tuple[str, str]]:
    """Marks about printed lines, which do not matter if a Meter recorded the steps."""
    if evidence.from_output:
        return set()
    recorders = [
        writer for writer in evidence.run.writers if writer.header.get("source") == "recorder"
    ]
    marks = [mark for writer in recorders for mark in writer.marks if mark.name in _READING_LINES]
    return {(mark.name, mark.detail) for mark in marks}


def _profiled(evidence: Evidence) -> list[str]:
    """A note if profiled steps are in the window."""
    if not evidence.has_work:
        return []
    start_ns, end_ns = evidence.window.start_ns, evidence.window.end_ns
    marks = [mark for mark in evidence.run.marks if mark.name == "profile_unread"]
    if not any(start_ns < mark.t_ns < end_ns for mark in marks):
        return []
    return [
        "profiled steps, which are slower, are in the window: --window or --warmup-steps leaves"
        " them out"
    ]


def _told_twice(evidence: Evidence) -> list[str]:
    """A note if steps of one process overlap, as if recorded twice."""
    if not evidence.trains or evidence.from_output:
        return []
    for rows in evidence.work.lanes:
        order = np.argsort(rows["start_ns"], kind="stable")
        starts_ns, ends_ns = rows["start_ns"][order], rows["end_ns"][order]
        if len(order) > 1 and float(np.mean(starts_ns[1:] < ends_ns[:-1])) > OVERLAPPING_FRAC:
            return [
                "steps of one process overlap, as if each was recorded twice (by meter.step and by"
                " an integration?): steps and tokens may be double"
            ]
    return []


def _impossible(readings: dict[str, Result]) -> list[str]:
    """A note for each reason why readings are impossible, with the metrics that it concerns."""
    titles = grouped(
        (result.impossible, every_metric()[key].title)
        for key, result in readings.items()
        if isinstance(result, Reading) and result.impossible
    )
    return [
        f"{', '.join(names)} {IMPOSSIBLE if len(names) == 1 else 'are impossible'}: {why}"
        for why, names in titles.items()
    ]


def _mfu(evidence: Evidence, readings: dict[str, Result]) -> list[str]:
    """A note on the FLOP count and the peak behind the MFU, or on why there is no MFU."""
    mfu = readings.get("utilization.mfu_frac")
    if not evidence.flops and not evidence.run.no_flops:
        return []
    if isinstance(mfu, Reading):
        count, _, rest = mfu.note.partition("; of ")
        peak = rest.partition(" device")[0].rpartition("; ")[0]
        return [f"MFU: {count}; of {peak}" if peak else f"MFU: {mfu.note or mfu.basis}"]
    return [f"no MFU: {mfu.reason}"] if mfu is not None else []


def _unused(evidence: Evidence) -> Iterator[str]:
    """Notes on declared token or sample counts that are ignored, as the program reports its own."""
    settings = evidence.settings
    for what, declared, counts in (
        ("tokens", settings.tokens_per_step, tokens),
        ("samples", settings.samples_per_step, samples),
    ):
        counted = None if declared is None else or_none(counts, evidence)
        if counted is not None and "declared" not in counted[1]:
            yield f"--{what}-per-step {declared} is not used: the program reports its own {what}"


def _slow_first_step(evidence: Evidence, readings: dict[str, Result]) -> list[str]:
    if not evidence.trains:  # requests differ in length
        return []
    rows = evidence.counted.lanes[0]
    if len(rows) < 5 or rows["start_ns"][0] > evidence.work.lanes[0]["start_ns"][0]:
        return []
    median = readings.get("time.step_median_s")
    if not isinstance(median, Reading):
        return []
    first_s, median_s = float(rows.duration_s[0] / (rows["steps"][0] or 1)), median.value
    if first_s <= SLOW_FIRST_STEP * median_s or evidence.from_output:
        return []
    found = [finding for finding in fitness(evidence).findings if finding.check == "warm_up"]
    return [f"{finding.seen}: {finding.effect} (erg check)" for finding in found] or [
        f"the first step took {duration(first_s)}, {first_s / median_s:.0f} times the median, and"
        " is counted; --warmup-steps 1 leaves it out"
    ]


def _noisy(evidence: Evidence, readings: dict[str, Result]) -> list[str]:
    remarks = []
    p95, median = (readings[f"time.step_{which}_s"] for which in ("p95", "median"))
    if isinstance(p95, Reading) and isinstance(median, Reading):
        times = p95.value / median.value if median.value else 0.0
        if times >= NOISY_P95:
            remarks.append(f"step time's 95th percentile is {times:.1f} times its median")
    rate = readings["throughput.steps_per_s"]
    if isinstance(rate, Reading) and rate.value and rate.low is not None and rate.high is not None:
        half = (rate.high - rate.low) / 2 / rate.value
        if half >= NOISY_FRAC:
            remarks.append(f"steps/s ± {half * 100:.0f} %")
    elif (
        isinstance(rate, Reading)
        and rate.low is None
        and not evidence.is_whole_run  # which has no interval
        and (rate.basis != "reported" or isinstance(readings["time.step_s"], Reading))
    ):
        return ["fewer than ten steps or printed lines were timed: too few for an interval"]
    return [f"noisy: {'; '.join(remarks)}"] if remarks else []


def _short(evidence: Evidence) -> list[str]:
    lasted_s = evidence.watched.duration_s
    if lasted_s >= SHORT_RUN_S:
        return []
    return [f"just {duration(lasted_s)} long: memory and CPU, read every 2 to 3 s, may be absent"]


def _ranks(evidence: Evidence) -> list[str]:
    rows, remarks = evidence.work, []
    firsts = sum(int(lane["rank"][0] == 0) for lane in rows.lanes)
    if firsts > 1:
        remarks.append(
            f"{firsts} processes at the same time are rank 0: unrelated trainings in one run, or"
            " ranks without a number; their tokens are added up"
        )
    made = [int(lane.step_counts.sum()) for lane in rows.lanes]
    if max(made) > min(made) + 1 and not any(dropped_steps(evidence.run)):
        remarks.append(
            f"ranks made {min(made)} to {max(made)} steps: one began late or ended early"
        )
    remarks += filter(None, [or_none(disagreement, evidence, rows)])
    return remarks


def _whose_gpus(evidence: Evidence) -> Iterator[str]:
    """Notes on GPUs that are left out, and on GPUs counted although their use is unknown."""
    unused, unknown = evidence.gpus("unused"), evidence.gpus("unknown")
    if unused and evidence.settings.devices is None:
        yield (
            "not used by this run, so not in its energy, peak and device count:"
            f" {gpu_names(unused)} (--devices counts them)"
        )
    by_why = grouped((evidence.gpu_use[gpu.id].why, gpu_names([gpu])) for gpu in unknown)
    yield from (
        f"whether this run used {', '.join(names)} is unknown: {why}; counted, and its energy is"
        " derived (--devices or CUDA_VISIBLE_DEVICES says which count)"
        for why, names in by_why.items()
    )
    unseen = [id_ for id_, use in evidence.gpu_use.items() if not use.state]
    if len(unseen) > 1:
        yield (
            f"which of the {len(unseen)} visible GPUs the program used could not be seen: all count"
            " (--devices or CUDA_VISIBLE_DEVICES says which)"
        )


def _worst(evidence: Evidence) -> list[str]:
    """A note with the worst finding of `erg check` that no other note covers."""
    for finding in fitness(evidence).findings:
        if finding.check not in NOTED_CHECKS:
            return [f"{finding.seen}: {finding.effect} (erg check)"]
    return []


def _full_disk(evidence: Evidence) -> Iterator[str]:
    for device, series in evidence.series("disk_free_bytes").items():
        total = evidence.run.devices[device].facts.get("disk_total_bytes")
        if total and float(series.values.min()) < FULL_DISK_FRAC * float(total):
            left = float(series.values.min()) / 1e9
            yield f"the disk was nearly full: {left:.2f} GB of {total / 1e9:.0f} GB were left"


def summarize(
    run: Run, overrides: Settings | None = None, *, flops: Sequence[Flops] = ()
) -> Summary:
    """Summarise a run under its stored settings, which `overrides` replace."""
    return summary_of(evidence_of(run, overrides, flops=flops))


def summary_of(evidence: Evidence) -> Summary:
    """Summarise a run from its evidence, which the caller may use further without reading again."""
    of_devices = {key: metric for key, metric in catalogue().items() if metric.per_device}
    devices = _by_device(evidence, of_devices)
    run, keys = evidence.run, dict.fromkeys((*catalogue(), *analysed(evidence)))
    readings = readings_of(evidence, keys)
    remarks = notes(evidence, readings)
    window = evidence.window_facts()
    return Summary(run.name, run.status, readings, devices, remarks, window, evidence.again)


def summaries(
    run: Run, overrides: Settings | None = None, *, flops: Sequence[Flops] = ()
) -> list[tuple[Evidence, Summary]]:
    """The run with its summary, or its trainings where there are several."""
    count = len(run.trainings)
    trainings = [run.training(number + 1) for number in range(count)] if count > 1 else [run]
    evidences = [evidence_of(training, overrides, flops=flops) for training in trainings]
    return [(evidence, summary_of(evidence)) for evidence in evidences]


def readings_of(evidence: Evidence, keys: Iterable[str]) -> dict[str, Result]:
    """Results of these metrics, by key. Data that only other metrics need is not read."""
    stored = analysed(evidence)
    return {key: stored.get(key) or _result(catalogue()[key].reading, evidence) for key in keys}


def analysed(evidence: Evidence) -> dict[str, Result]:
    """The results of `erg analyze` that are stored in a run, by metric.

    If settings or FLOPs are overridden, or only a part of the run is chosen, stored results of
    metrics that can be computed from the run's steps are left out.
    """
    run = evidence.run
    stored = {key: result for key, result in run.analysis.items() if key in every_metric()}
    is_same = run.between is None and evidence.flops == run.flops
    if not stored or (is_same and evidence.settings == settings_of(run)):
        return stored
    return {key: result for key, result in stored.items() if key not in catalogue()}


def ask_devices(evidence: Evidence) -> None:
    """Compute and cache, device by device, everything that checks and metrics need."""
    _by_device(evidence, {})


def _by_device(evidence: Evidence, metrics: dict[str, Metric]) -> dict[str, dict[str, Result]]:
    """Results per device, one device after the other, so that few samples are in memory.

    What checks and metrics of the run need of a device is computed on the same visit.
    """
    results: dict[str, dict[str, Result]] = {}
    for metric in metrics.values():
        results |= {device.id: {} for device in evidence.devices(*metric.kinds)}
    kinds = {kind for metric in metrics.values() for kind in metric.kinds}
    in_boundary = _boundary_ids(evidence)
    for device in evidence.devices(*kinds, *device_questions):
        for key, metric in metrics.items():
            if device.kind in metric.kinds:
                results[device.id][key] = _result(metric.device_reading, evidence, device)
        visit(evidence, device, is_in_boundary=device.id in in_boundary)
    return results


def _boundary_ids(evidence: Evidence) -> set[str]:
    """The ids of the devices whose energy counts as the run's; empty if there are none."""
    try:
        return {device.id for device in boundary(evidence)}
    except Exception:  # noqa: BLE001  the metrics of energy report why; the others are shown
        return set()


def evidence_of(
    run: Run, overrides: Settings | None = None, *, flops: Sequence[Flops] = ()
) -> Evidence:
    """The evidence of a run under its settings and the overrides."""
    now = overrides.as_json() if overrides else {}
    heed_marks = not any(name in now for name in WARMUP)
    return Evidence(run, settings_of(run, overrides), heed_marks=heed_marks, flops=flops)


def settings_of(run: Run, overrides: Settings | None = None) -> Settings:
    """The settings stored in the run, replaced by the overrides."""
    stored = {name: value for name, value in run.settings.items() if name in Settings.__slots__}
    now = overrides.as_json() if overrides else {}
    if any(name in now for name in WARMUP):
        stored = {name: value for name, value in stored.items() if name not in WARMUP}
    return replace(Settings(), **{**stored, **now})


def _result(compute: Callable[..., Reading], *arguments: object) -> Result:
    try:
        return compute(*arguments)
    except NotMeasurable as error:
        return Missing(str(error))
    except Exception as error:  # noqa: BLE001  a plugin's metric may fail; the others are shown
        return Missing(f"the metric failed: {type(error).__name__}: {error}")
