"""The documented path of `ergmeter.compat.training_monitor.monitor`: the same module."""

import sys

from ergmeter.compat.training_monitor import monitor
from ergmeter.compat.training_monitor.monitor import *  # noqa: F403  for type checkers

sys.modules[__name__] = monitor
