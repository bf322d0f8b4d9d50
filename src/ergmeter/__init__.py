"""ergmeter: what an LLM training or inference run gets out of its hardware.

    from ergmeter import Meter

    with Meter(warmup_steps=3) as meter:
        for batch in loader:
            with meter.step(tokens=batch.numel()):
                train(batch)
    print(meter.summary().readings["throughput.tokens_per_s"])

The names below are loaded on first use, so `import ergmeter` alone loads almost nothing.
"""

from __future__ import annotations

from ergmeter.version import __version__

TYPE_CHECKING = False  # as type checkers know it; importing typing would cost more than the rest

if TYPE_CHECKING:
    from ergmeter.errors import ErgmeterError, FormatError, NotMeasurable, PluginError, UsageError
    from ergmeter.meter import Budget, Meter
    from ergmeter.metrics.summarize import summarize
    from ergmeter.records import Flops, Missing, Reading, Summary, Window
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.settings import Settings

_HOMES = {
    **dict.fromkeys(("Meter", "Budget"), "meter"),
    "Run": "runlog.reader",
    "Settings": "runlog.settings",
    "summarize": "metrics.summarize",
    **dict.fromkeys(("Flops", "Missing", "Reading", "Summary", "Window"), "records"),
    **dict.fromkeys(
        ("ErgmeterError", "FormatError", "NotMeasurable", "PluginError", "UsageError"), "errors"
    ),
}

__all__ = [
    "Budget", "ErgmeterError", "Flops", "FormatError", "Meter", "Missing", "NotMeasurable",
    "PluginError", "Reading", "Run", "Settings", "Summary", "UsageError", "Window",
    "__version__", "summarize",
]  # fmt: skip


def load_ipython_extension(ipython: object) -> None:
    """Add `%%erg` to a notebook: `%load_ext ergmeter`."""
    from ergmeter.cli.notebook import load  # noqa: PLC0415

    load(ipython)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ergmeter' has no attribute {name!r}")
    import importlib  # noqa: PLC0415

    return getattr(importlib.import_module(f"ergmeter.{_HOMES[name]}"), name)
