"""The documented path of `ergmeter.compat.efficientllm`: the same module under another name."""

import sys

from ergmeter.compat import efficientllm
from ergmeter.compat.efficientllm import *  # noqa: F403  for type checkers

sys.modules[__name__] = efficientllm
