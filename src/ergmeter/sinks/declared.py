"""What each of our sinks takes and needs, known without loading it.

The trap: a misspelt option or a library that isn't installed, told when ten hours of training are
over. Sinks load in a thread of their own, later and heavily; what can be wrong with them is here.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

PREFIX = "ergmeter"
_TRACKER: dict[str, Any] = {"metrics": None, "prefix": PREFIX, "devices": True}
# Options by name, with their defaults; None stands for what the sink finds out itself.
OPTIONS: dict[str, dict[str, Any]] = {
    "console": {"metrics": None, "style": "line", "every_s": 60.0, "stream": "stderr"},
    "csv": {"metrics": None, "path": None, "rows": "updates", "ledger": False, "columns": None},
    "jsonl": {"metrics": None, "devices": True, "path": None},
    "tensorboard": {**_TRACKER, "path": None},
    "wandb": {**_TRACKER, "project": None, "run_name": None},
    "mlflow": {
        **_TRACKER, "tracking_uri": None, "experiment": None, "run_id": None, "run_name": None,
    },
    "trackio": {**_TRACKER, "project": None, "run_name": None},
    "prometheus": {
        **_TRACKER, "port": 9478, "address": "127.0.0.1", "push": None, "job": PREFIX,
    },
    "otel": {
        **_TRACKER, "endpoint": None, "headers": None, "timeout_s": 10.0, "exporter": None,
        "reader": None, "hardware_names": True,
    },
}  # fmt: skip
_NEEDS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "prometheus": "prometheus_client",
    "otel": "opentelemetry",
}


def lacks(sink: str) -> str:
    """What a sink of ours needs that isn't here, with the cure; else nothing."""
    needed = _NEEDS.get(sink)
    if needed is None or find_spec(needed) is not None:
        return ""
    return f"{needed} is not installed; pip install 'ergmeter[{sink}]'"
