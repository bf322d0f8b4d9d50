"""The Python way in: `Meter`, the spans it opens, and the thread that hands over to the disk."""

from ergmeter.meter.meter import Meter
from ergmeter.meter.opening import Around
from ergmeter.meter.progress import Budget, Progress

__all__ = ["Around", "Budget", "Meter", "Progress"]
