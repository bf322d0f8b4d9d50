"""The Python API: `Meter`, the spans it opens, and the threads that write to disk."""

from ergmeter.meter.meter import Meter
from ergmeter.meter.run_plan import Around, Budget, Progress

__all__ = ["Around", "Budget", "Meter", "Progress"]
