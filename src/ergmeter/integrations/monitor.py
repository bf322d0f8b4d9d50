"""The documented path of `ergmeter.compat.training_monitor.functions`: the same module."""

import sys

from ergmeter.compat.training_monitor import functions
from ergmeter.compat.training_monitor.functions import *  # noqa: F403  for type checkers

sys.modules[__name__] = functions
