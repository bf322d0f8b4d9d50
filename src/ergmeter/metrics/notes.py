"""What a reader of the summary must know beside the numbers."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import IMPOSSIBLE, catalogue
from ergmeter.metrics.checks import fitness
from ergmeter.metrics.definitions.throughput import samples
from ergmeter.metrics.definitions.tokens import tokens
from ergmeter.metrics.definitions.training import divergence
from ergmeter.metrics.evidence.clocks import in_words
from ergmeter.metrics.evidence.gpu_use import named
from ergmeter.metrics.evidence.token_ranks import disagreement
from ergmeter.metrics.explain.flop_count import flop_count_contradictions
from ergmeter.metrics.live.alert_rules import noted_alerts
from ergmeter.records import Reading
from ergmeter.runlog.dropped import dropped_steps
from ergmeter.runlog.reader import CUT_OFF
from ergmeter.units import duration

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Device, Result

# A first step this many times the median is a compilation or a cold cache, not a training step.
SLOW_FIRST_STEP = 3.0
OVERLAPPING_FRAC = 0.4  # of the steps, which begin before the one before has ended
FULL_DISK_FRAC = 0.02
SHORT_RUN_S = 3.0  # the program is read every 2 s, the node every 3 s
# Beyond one of these a figure hides a spread that its reader would want to know of.
NOISY_P95 = 2.0  # the 95th percentile of the step time, over its median
NOISY_FRAC = 0.1  # half the interval of a rate, over the rate

_TOLD = {
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


_LOSS_LOST = "loss is not a number"  # how an importer says it
_SAID_ALREADY = ("record", "warm_up", "noise", "flop_count")
# Of these, what the recorder says of printed lines.
_READING_LINES = (
    *("value_refused", "assumed", "output_unrecognised", "output_buffered", "restarted"),
    "several_programs",
)


def notes(evidence: Evidence, readings: dict[str, Result]) -> tuple[str, ...]:
    """The remarks, most serious first."""
    run = evidence.run
    said = []
    if run.status == CUT_OFF:
        said.append(
            "the run was cut off: its process was killed, or could no longer write;"
            " what it had written is here"
        )
    said += [f"damaged file left out: {line}" for line in run.damage]
    said += [f"part of the record is missing: {lost}" for lost in dropped_steps(run)]
    diverged = divergence(readings)
    of_lines = _of_lines(evidence)
    for mark in run.marks:
        if diverged and mark.name == "value_refused" and mark.detail.startswith(_LOSS_LOST):
            continue  # the same with less
        if mark.name in _TOLD and (mark.name, mark.detail) not in of_lines:
            said.append(_TOLD[mark.name].format(mark.detail))
    said += [f"the training {diverged}"] if diverged else []
    said += [f"alert: {one.said}" for one in noted_alerts(run, _ranks_of_writers(evidence))]
    said += _unused(evidence)
    said += _impossible(readings)
    said += _mfu(evidence, readings)
    said += flop_count_contradictions(evidence)
    said += _told_twice(evidence)
    said += _of_the_window(evidence)
    said += _slow_first_step(evidence, readings)
    said += _profiled(evidence)
    said += _noisy(evidence, readings)
    said += [] if evidence.is_imported else _short(evidence)
    said += _ranks(evidence)
    said += in_words(evidence.clocks)
    said += _worst(evidence)
    said += _full_disk(evidence)
    said += _whose_gpus(evidence)
    return tuple(dict.fromkeys(said))


def _ranks_of_writers(evidence: Evidence) -> dict[str, int]:
    """By writer, of those that step."""
    rows = evidence.all_steps
    found = {}
    for lane in rows.lanes if len(rows) else ():
        writers, first = np.unique(lane["writer"], return_index=True)
        for writer, row in zip(writers.tolist(), first.tolist(), strict=True):
            name = evidence.run.writers[int(writer)].directory.name
            found[name] = int(np.nan_to_num(lane["rank"][row]))
    return found


def _of_lines(evidence: Evidence) -> set[tuple[str, str]]:
    """What reading the output took offence at, where somebody inside has told the steps."""
    if evidence.from_output:
        return set()
    recorders = [one for one in evidence.run.writers if one.header.get("source") == "recorder"]
    marks = [mark for one in recorders for mark in one.marks if mark.name in _READING_LINES]
    return {(mark.name, mark.detail) for mark in marks}


def _profiled(evidence: Evidence) -> list[str]:
    """Too late or too few to be left out."""
    if not evidence.has_work:
        return []
    try:
        start_ns, end_ns = evidence.window.start_ns, evidence.window.end_ns
    except NotMeasurable:
        return []
    marks = [mark for mark in evidence.run.marks if mark.name == "profile_unread"]
    if not any(start_ns < mark.t_ns < end_ns for mark in marks):
        return []
    return [
        "profiled steps are in these figures, and take longer than the others: --window or"
        " --warmup-steps leaves them out"
    ]


def _told_twice(evidence: Evidence) -> list[str]:
    """One process makes one step after the other. Printed lines may overlap."""
    if not evidence.trains or evidence.from_output:
        return []
    try:
        lanes = evidence.work.lanes
    except NotMeasurable:
        return []
    for rows in lanes:
        order = np.argsort(rows["start_ns"], kind="stable")
        starts_ns, ends_ns = rows["start_ns"][order], rows["end_ns"][order]
        if len(order) > 1 and float(np.mean(starts_ns[1:] < ends_ns[:-1])) > OVERLAPPING_FRAC:
            return [
                "steps of one process overlap, as if each was recorded twice (by meter.step and by"
                " an integration?): steps and tokens may be double"
            ]
    return []


def _impossible(readings: dict[str, Result]) -> list[str]:
    """Each impossible reading, with the reason; a reason that several share is given once."""
    titles: dict[str, list[str]] = {}
    for key, result in readings.items():
        if isinstance(result, Reading) and result.impossible:
            titles.setdefault(result.impossible, []).append(catalogue()[key].title)
    return [
        f"{', '.join(names)} {IMPOSSIBLE if len(names) == 1 else 'are impossible'}: {why}"
        for why, names in titles.items()
    ]


def _mfu(evidence: Evidence, readings: dict[str, Result]) -> list[str]:
    """Whose count and which peak an MFU rests on; or why a run that knows its FLOPs has none."""
    found = readings.get("utilization.mfu_frac")
    if not evidence.flops and not evidence.run.no_flops:
        return []
    if isinstance(found, Reading):
        count, peak = found.note.split("; of ", 1)
        peak = peak.partition(" device")[0].rpartition("; ")[0]
        return [f"MFU: {count}; of {peak}"]
    return [f"no MFU: {found.reason}"] if found is not None else []


def _unused(evidence: Evidence) -> list[str]:
    """What was declared for a program that says it itself."""
    said = []
    settings = evidence.settings
    for what, declared, found in (
        ("tokens", settings.tokens_per_step, tokens),
        ("samples", settings.samples_per_step, samples),
    ):
        try:
            is_used = declared is None or "declared" in found(evidence)[1]
        except NotMeasurable:
            continue
        if not is_used:
            said.append(
                f"--{what}-per-step {declared} is not used: the program gives its own {what}"
            )
    return said


def _of_the_window(evidence: Evidence) -> list[str]:
    try:
        return list(evidence.window_remarks) if evidence.trains else []
    except NotMeasurable:
        return []


def _slow_first_step(evidence: Evidence, readings: dict[str, Result]) -> list[str]:
    if not evidence.trains:  # requests differ in length
        return []
    try:
        rows = evidence.counted.lanes[0]
    except NotMeasurable:
        return []
    if len(rows) < 5 or rows["start_ns"][0] > evidence.work.lanes[0]["start_ns"][0]:
        return []
    median = readings.get("time.step_median_s")
    if not isinstance(median, Reading):
        return []
    first_s, median_s = float(rows.duration_s[0] / (rows["steps"][0] or 1)), median.value
    if first_s <= SLOW_FIRST_STEP * median_s or evidence.from_output:
        return []
    return [
        f"the first step took {duration(first_s)}, {first_s / median_s:.0f} times the median, and"
        " is counted; --warmup-steps 1 leaves it out"
    ]


def _noisy(evidence: Evidence, readings: dict[str, Result]) -> list[str]:
    said = []
    p95, median = (readings[f"time.step_{which}_s"] for which in ("p95", "median"))
    if isinstance(p95, Reading) and isinstance(median, Reading):
        times = p95.value / median.value if median.value else 0.0
        if times >= NOISY_P95:
            said.append(f"step time's 95th percentile is {times:.1f} times its median")
    rate = readings["throughput.steps_per_s"]
    if isinstance(rate, Reading) and rate.value and rate.low is not None and rate.high is not None:
        half = (rate.high - rate.low) / 2 / rate.value
        if half >= NOISY_FRAC:
            said.append(f"steps/s ± {half * 100:.0f} %")
    elif (
        isinstance(rate, Reading)
        and rate.low is None
        and not evidence.is_whole_run  # which has no interval
        and (rate.basis != "reported" or isinstance(readings["time.step_s"], Reading))
    ):
        return ["fewer than ten steps or printed lines were timed: too few for an interval"]
    return [f"noisy: {'; '.join(said)}"] if said else []


def _short(evidence: Evidence) -> list[str]:
    try:
        lasted_s = evidence.watched.duration_s
    except NotMeasurable:
        return []
    if lasted_s >= SHORT_RUN_S:
        return []
    return [f"just {duration(lasted_s)} long: memory and CPU, read every 2 to 3 s, may be absent"]


def _ranks(evidence: Evidence) -> list[str]:
    try:
        rows = evidence.work
    except NotMeasurable:
        return []
    said = []
    firsts = sum(int(lane["rank"][0] == 0) for lane in rows.lanes)
    if firsts > 1:
        said.append(
            f"{firsts} processes at the same time are rank 0: unrelated trainings in one run, or"
            " ranks without a number; their tokens are added up"
        )
    made = [int(np.nan_to_num(lane["steps"], nan=1.0).sum()) for lane in rows.lanes]
    if max(made) > min(made) + 1 and not dropped_steps(evidence.run):
        said.append(f"ranks made {min(made)} to {max(made)} steps: one began late or ended early")
    with suppress(NotMeasurable):
        said += filter(None, [disagreement(evidence, rows)])
    return said


def _whose_gpus(evidence: Evidence) -> list[str]:
    """GPUs that are left out, and those that count although their use is unknown."""
    said = []
    unused, unknown = evidence.gpus("unused"), evidence.gpus("unknown")
    if unused and evidence.settings.devices is None:
        said.append(
            f"not used by this run, so not in its energy, peak and device count: {named(unused)}"
            " (--devices counts them)"
        )
    by_why: dict[str, list[Device]] = {}
    for device in unknown:
        by_why.setdefault(evidence.gpu_use[device.id].why, []).append(device)
    said += [
        f"whether this run used {named(devices)} is unknown: {why}; counted, and its energy is"
        " derived (--devices or CUDA_VISIBLE_DEVICES says which count)"
        for why, devices in by_why.items()
    ]
    unseen = [id_ for id_, one in evidence.gpu_use.items() if not one.state]
    if len(unseen) > 1:
        said.append(
            f"which of the {len(unseen)} visible GPUs the program used could not be seen: all count"
            " (--devices or CUDA_VISIBLE_DEVICES says which)"
        )
    return said


def _worst(evidence: Evidence) -> list[str]:
    """The worst that `erg check` finds, of what is not said above."""
    for one in fitness(evidence).findings:
        if one.check not in _SAID_ALREADY:
            return [f"{one.seen}: {one.effect} (erg check)"]
    return []


def _full_disk(evidence: Evidence) -> list[str]:
    free = evidence.series("disk_free_bytes")
    said = []
    for device, series in free.items():
        total = evidence.run.devices[device].facts.get("disk_total_bytes")
        if total and float(series.values.min()) < FULL_DISK_FRAC * float(total):
            left = float(series.values.min()) / 1e9
            said.append(
                f"the disk was nearly full: {left:.2f} GB of {total / 1e9:.0f} GB were left"
            )
    return said
