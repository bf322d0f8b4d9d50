"""The Python way in: `Meter`, the spans it opens, and the thread that hands over to the disk."""

from ergmeter.meter.meter import Meter
from ergmeter.meter.progress import Budget, Progress
from ergmeter.meter.run_plan import Around

__all__ = ["Around", "Budget", "Meter", "Progress"]
