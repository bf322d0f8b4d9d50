"""What is a metric called elsewhere? Every spelling is made from its key, here.

| key                       | throughput.tokens_per_s          | at the end of the run     |
| trackers (TensorBoard...) | ergmeter/throughput.tokens_per_s | ergmeter-run/throughput.. |
| Prometheus                | ergmeter_throughput_tokens_per_s | ergmeter_run_throughput.. |
| OpenTelemetry             | ergmeter.throughput.tokens_per_s | ergmeter.run.throughput.. |

The trap: the last window and the run under one name. At the end of a run its figures would
be one more point of the curve, and a table of runs would compare last windows. So they have names
of their own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError
from ergmeter.metrics.catalog import catalogue
from ergmeter.sinks.shared.options import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ergmeter.sinks.shared.updates import SinkValue


# UCUM has no word for what is counted; an annotation in braces says it (ucum.org, section 6).
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
    """The spellings of a key for one prefix."""

    def __init__(self, prefix: str = PREFIX) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", prefix):
            raise UsageError(
                f"prefix starts with a letter and has letters, digits, - and _; got {prefix!r}"
            )
        self._prefix = prefix

    def tag(self, name: str, *, device: str | None = None, is_final: bool = False) -> str:
        """A tracker's name for a metric: a folder, the key, and the device where it is of one."""
        folder = f"{self._prefix}-run" if is_final else self._prefix
        # MLflow takes letters, digits and a few signs, and no other in a name.
        of = "" if device is None else "/" + re.sub(r"[^A-Za-z0-9_.-]", "-", device)
        return f"{folder}/{name}{of}"

    def tagged(self, figures: Iterable[SinkValue], *, is_final: bool) -> dict[str, float]:
        """The values of figures under a tracker's names.

        An impossible value goes under a name of its own: a tracker's scalars carry no mark.
        """
        return {
            self.tag(
                f"{one.key}_impossible" if one.reading.impossible else one.key,
                device=one.device,
                is_final=is_final,
            ): one.value
            for one in figures
        }

    @property
    def window(self) -> str:
        """A tracker's name for the kind of window that the final figures are over."""
        return self.tag("window", is_final=True)

    def series(self, name: str, *, is_final: bool = False) -> str:
        """Prometheus's name."""
        whole = f"{self._prefix}.run.{name}" if is_final else f"{self._prefix}.{name}"
        return re.sub(r"[^A-Za-z0-9_]", "_", whole)

    def instrument(self, name: str, *, is_final: bool = False) -> str:
        """OpenTelemetry's name."""
        return f"{self._prefix}.run.{name}" if is_final else f"{self._prefix}.{name}"


def ucum(unit: str) -> str:
    """A unit of the catalogue as UCUM writes it: tokens/s is {token}/s."""
    return "/".join(_UCUM.get(part, f"{{{part}}}") for part in unit.split("/"))


def explanation(key: str) -> str:
    """What a metric is, in a line: title, unit, formula."""
    metric = catalogue()[key]
    return f"{metric.title} [{metric.unit}]: {metric.formula}"
