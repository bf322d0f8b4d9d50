"""The four EFFICIENTLLM_* variables, by the original's rules.

One of those is a trap: only "true" enables, so that 1 and yes switch everything off without a word.
The rule stays, and the word is said. A value that is no number is remarked on and not raised.
"""

from __future__ import annotations

import math
import os

from ergmeter.integrations.guard import warn_once

ENABLED = "EFFICIENTLLM_METRICS_ENABLED"


def collection_interval_s() -> float:
    """How often devices are to be read, at the least."""
    return _number("EFFICIENTLLM_COLLECTION_INTERVAL", 1.0)


def history_size() -> int:
    """How many iteration times are kept in memory."""
    return max(1, int(_number("EFFICIENTLLM_HISTORY_SIZE", 1000)))


def log_interval() -> int:
    """Every how many iterations to log. Read anew at each call, as in the original."""
    return max(1, int(_number("EFFICIENTLLM_LOG_INTERVAL", 10)))


def is_enabled() -> bool:
    """Only "true" enables, as in the original; what is neither true nor false is remarked on."""
    value = os.environ.get(ENABLED, "true")
    if value.lower() not in ("true", "false"):
        warn_once(f"{ENABLED}={value} is neither true nor false: taken as false; set it to true")
    return value.lower() == "true"


def _number(name: str, default: float) -> float:
    value = os.environ.get(name, "")
    try:
        number = float(value) if value else default
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        warn_once(f"{name}={value} is no number above 0: taken as {default:g}")
        return default
    return number
