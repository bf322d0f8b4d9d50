"""Every metric of a run: readings where the run supports them, reasons where it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.energy.device_energy import boundary
from ergmeter.metrics.evidence.device_cache import asked, visit
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.notes import notes
from ergmeter.records import Missing, Summary
from ergmeter.runlog.settings import WARMUP, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ergmeter.records import Flops, Reading, Result
    from ergmeter.runlog.reader import Run


def summarize(
    run: Run, overrides: Settings | None = None, *, flops: Sequence[Flops] = ()
) -> Summary:
    """Summarise a run under what its user declared, or under what the reader declares now."""
    return summary_of(evidence_of(run, overrides, flops=flops))


def summary_of(evidence: Evidence) -> Summary:
    """The same of an evidence, for who goes on to ask more of it: nothing is read twice."""
    devices = _by_device(evidence)
    run, readings = evidence.run, readings_of(evidence, catalogue())
    said = notes(evidence, readings)
    return Summary(run.name, run.status, readings, devices, said, evidence.window_facts())


def readings_of(evidence: Evidence, keys: Iterable[str]) -> dict[str, Result]:
    """Some metrics, by key. What only the others need is not read."""
    return {key: _result(catalogue()[key].reading, evidence) for key in keys}


def ask_devices(evidence: Evidence) -> None:
    """Have the devices asked one after the other what checks and metrics ask of each, for who goes
    on to some of both."""
    drawing = _drawing(evidence)
    for device in evidence.devices(*asked):
        visit(evidence, device, is_in_boundary=device.id in drawing)


def _by_device(evidence: Evidence) -> dict[str, dict[str, Result]]:
    """Device by device, all of one before the next: what was read of few is in memory at a time.

    With it goes what the metrics of the run and the checks ask of each device.
    """
    metrics = {key: one for key, one in catalogue().items() if one.per_device}
    found: dict[str, dict[str, Result]] = {}
    for one in metrics.values():
        found |= {device.id: {} for device in evidence.devices(*one.kinds)}
    kinds = {kind for one in metrics.values() for kind in one.kinds}
    drawing = _drawing(evidence)
    for device in evidence.devices(*kinds, *asked):
        for key, one in metrics.items():
            if device.kind in one.kinds:
                found[device.id][key] = _result(one.device_reading, evidence, device)
        visit(evidence, device, is_in_boundary=device.id in drawing)
    return found


def _drawing(evidence: Evidence) -> set[str]:
    try:
        return {device.id for device in boundary(evidence)}
    except Exception:  # noqa: BLE001  the metrics of energy say why
        return set()


def evidence_of(
    run: Run, overrides: Settings | None = None, *, flops: Sequence[Flops] = ()
) -> Evidence:
    """The run as it is to be looked at."""
    now = overrides.as_json() if overrides else {}
    heed_marks = not any(name in now for name in WARMUP)
    return Evidence(run, settings_of(run, overrides), heed_marks=heed_marks, flops=flops)


def settings_of(run: Run, overrides: Settings | None = None) -> Settings:
    """What was declared when the run was made, with what is declared now in its place."""
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
    except Exception as error:  # noqa: BLE001  a metric may be anybody's; the others are shown
        return Missing(f"the metric failed: {type(error).__name__}: {error}")
