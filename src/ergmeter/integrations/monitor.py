"""The documented path of `ergmeter.compat.training_monitor`: the same module."""

import sys

from ergmeter.compat import training_monitor
from ergmeter.compat.training_monitor import *  # noqa: F403  for type checkers

sys.modules[__name__] = training_monitor
