"""Checks the options of sinks, selects the metrics to send, and spells their names for each tool.

A misspelt option is an error: `projekt="llama"` would otherwise send a run to the default project.
Sinks are created later, in their own thread; options and libraries are checked here, at once.

A missing metric must not go out as 0, nor stay on a dashboard at its last value. So `Missing` and
non-finite values are left out here, for all sinks.

| key                       | throughput.tokens_per_s          | at the end of the run     |
| trackers (TensorBoard...) | ergmeter/throughput.tokens_per_s | ergmeter-run/throughput.. |
| Prometheus                | ergmeter_throughput_tokens_per_s | ergmeter_run_throughput.. |
| OpenTelemetry             | ergmeter.throughput.tokens_per_s | ergmeter.run.throughput.. |

The run's final values have their own names: under the same name they would be one more point of the
curve, and a table of runs would compare last windows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeGuard

from ergmeter.errors import PluginError, UsageError, suggestion
from ergmeter.metrics.catalog import catalogue, find
from ergmeter.ports import DeclaredSink, SinkRequest, Update
from ergmeter.records import Missing, Reading, Result
from ergmeter.units import duration, scaled, significant

# -- options ---------------------------------------------------------------------------------------

PREFIX = "ergmeter"
TRACKER: dict[str, Any] = {"metrics": None, "prefix": PREFIX, "devices": True}


def missing_library(sink: type[DeclaredSink]) -> str:
    """Return which library a sink needs and how to install it; empty if it is installed."""
    if not sink.library or find_spec(sink.library) is not None:
        return ""
    return f"{sink.library} is not installed; pip install 'ergmeter[{sink.name}]'"


_TRUTHS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def checked_options(
    sink: type[DeclaredSink],
    options: Mapping[str, Any],
    **defaults: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """Return all options of a sink. UsageError for an unknown one.

    `defaults`: computed default values. Text from a command line is converted to a number or a
    boolean if the default is one.
    """
    allowed = {**sink.options, **defaults}
    for name in options:
        if name not in allowed:
            hint = suggestion(name, allowed, cutoff=0.5)
            wrong = f"the sink {sink.name!r} has no option {name!r}"
            raise UsageError(f"{wrong}; {hint}it takes {', '.join(allowed)}")
    values = {**allowed, **options}
    return {name: _like(allowed[name], value, option=name) for name, value in values.items()}


def choice(value: str, of: tuple[str, ...], *, option: str) -> str:
    """Return the value. UsageError if it is not one of `of`."""
    if value not in of:
        raise UsageError(f"{option} must be one of {', '.join(of)}; got {value!r}")
    return value


def _like(default: Any, value: Any, *, option: str) -> Any:  # noqa: ANN401
    """Convert text to the type of the default."""
    if not isinstance(value, str) or not isinstance(default, int | float):
        return value
    try:
        if isinstance(default, bool):
            return _TRUTHS[value.lower()]
        return type(default)(value)
    except (KeyError, ValueError):
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise UsageError(f"{option} must be {kind}; got {value!r}") from None


# -- values ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SinkValue:
    """A reading with the key of its metric, of the run or of one device."""

    key: str
    reading: Reading
    device: str | None = None

    @property
    def value(self) -> float:
        """The value as a float."""
        return float(self.reading.value)


class Selection:
    """The metrics that a sink sends: all of them, or those named by key or alias."""

    def __init__(self, metrics: Iterable[str] | str | None = None, *, devices: bool = True) -> None:
        if isinstance(metrics, str):
            metrics = metrics.replace(",", " ").split()
        self.keys = None if metrics is None else tuple(find(name)[0].key for name in metrics)
        self._devices = devices

    def columns(self) -> tuple[str, ...]:
        """The keys of the selected metrics, as columns of a table."""
        return tuple(catalogue()) if self.keys is None else self.keys

    def figures(self, update: Update) -> list[SinkValue]:
        """Return the values of an update to send: the run's, then those of each device."""
        summary = update.summary
        values = [SinkValue(key, r) for key, r in self._chosen(summary.readings) if _is_known(r)]
        for device, results in summary.devices.items() if self._devices else ():
            values += [SinkValue(k, r, device) for k, r in self._chosen(results) if _is_known(r)]
        return values

    def missing(self, update: Update) -> dict[str, str]:
        """Return the reasons of the selected metrics without a value, by key."""
        return {
            key: result.reason if isinstance(result, Missing) else f"the value is {result.value}"
            for key, result in self._chosen(update.summary.readings)
            if not _is_known(result)
        }

    def _chosen(self, results: Mapping[str, Result]) -> Iterator[tuple[str, Result]]:
        keys = results if self.keys is None else (key for key in self.keys if key in results)
        return ((key, results[key]) for key in keys)


class SelectingSink(DeclaredSink):
    """Base of the sinks here: checks library and options, selects and names the metrics."""

    def __init__(self, request: SinkRequest, **defaults: Any) -> None:  # noqa: ANN401
        """`defaults`: defaults of declared options that the sink computes at run time."""
        if missing := missing_library(type(self)):
            raise PluginError(missing)
        self._options = options = checked_options(type(self), request.options, **defaults)
        self._run = request.name
        self._names = Names(options.get("prefix", PREFIX))
        self._selection = Selection(options["metrics"], devices=options.get("devices", False))

    def _tagged(self, update: Update) -> dict[str, float]:
        """Return the values of an update under a tracker's names."""
        return self._names.tagged(self._selection.figures(update), is_final=update.is_final)

    def _labels(self, figure: SinkValue, update: Update) -> dict[str, str]:
        """Return a value's labels: basis, device if any, and the window kind if final."""
        labels: dict[str, str] = {"basis": figure.reading.basis}
        if figure.device is not None:
            labels["device"] = figure.device
        if update.is_final:
            labels["window"] = update.window_kind
        return labels

    def close(self) -> None:
        """Do nothing: nothing is buffered."""


def readable(reading: Reading) -> str:
    """Format a value in a readable unit, marked if it is impossible."""
    return _number(reading.value, reading.unit) + reading.mark


def _number(number: float, unit: str) -> str:
    if unit == "s":
        return duration(number)
    if unit == "frac":
        return f"{significant(number * 100, 3)} %"
    if unit == "1":  # a loss is a bare number
        return significant(number)
    if unit in ("B", "B/s", "B/h", "Hz", "J", "g", "FLOP/s", "FLOP/token"):
        return scaled(number, unit)
    return f"{number:,.0f} {unit}" if abs(number) >= 10_000 else f"{significant(number)} {unit}"


def _is_known(result: Result) -> TypeGuard[Reading]:
    return isinstance(result, Reading) and math.isfinite(result.value)


# -- names -----------------------------------------------------------------------------------------

# UCUM has no unit for counted things; an annotation in braces names them (ucum.org, section 6).
_UCUM = {
    "B": "By",
    "C": "Cel",
    "frac": "1",
    "1": "1",
    "Wh": "W.h",
    **{unit: unit for unit in ("s", "h", "J", "W", "Hz", "g")},
    "tokens": "{token}",
    "samples": "{sample}",
    "steps": "{step}",
    "requests": "{request}",
    "cores": "{core}",
    "param": "{parameter}",
}


class Names:
    """Spells a metric's name for trackers, Prometheus and OpenTelemetry, with one prefix."""

    def __init__(self, prefix: str = PREFIX) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", prefix):
            raise UsageError(
                f"prefix must start with a letter, then letters, digits, - and _; got {prefix!r}"
            )
        self._prefix = prefix

    def tag(self, name: str, *, device: str | None = None, is_final: bool = False) -> str:
        """Return a tracker's name for a metric: folder, key, and device if any."""
        folder = f"{self._prefix}-run" if is_final else self._prefix
        # MLflow allows only letters, digits and a few signs in a name.
        of = "" if device is None else "/" + re.sub(r"[^A-Za-z0-9_.-]", "-", device)
        return f"{folder}/{name}{of}"

    def tagged(self, figures: Iterable[SinkValue], *, is_final: bool) -> dict[str, float]:
        """Return values under a tracker's names.

        An impossible value goes under a name of its own: a tracker's scalars carry no mark.
        """
        tagged = {}
        for figure in figures:
            name = f"{figure.key}_impossible" if figure.reading.impossible else figure.key
            tagged[self.tag(name, device=figure.device, is_final=is_final)] = figure.value
        return tagged

    @property
    def window(self) -> str:
        """A tracker's name for the window kind of the final values."""
        return self.tag("window", is_final=True)

    def series(self, name: str, *, is_final: bool = False) -> str:
        """Return Prometheus's name for a metric."""
        return re.sub(r"[^A-Za-z0-9_]", "_", self.instrument(name, is_final=is_final))

    def instrument(self, name: str, *, is_final: bool = False) -> str:
        """Return OpenTelemetry's name for a metric."""
        return f"{self._prefix}.run.{name}" if is_final else f"{self._prefix}.{name}"


def ucum(unit: str) -> str:
    """Return a unit of the catalogue in UCUM spelling: {token}/s for tokens/s."""
    return "/".join(_UCUM.get(part, f"{{{part}}}") for part in unit.split("/"))


def explanation(key: str) -> str:
    """Describe a metric in a line: title, unit, formula."""
    metric = catalogue()[key]
    return f"{metric.title} [{metric.unit}]: {metric.formula}"
