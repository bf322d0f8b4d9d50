"""Everything the golden outputs import from ergmeter and from the other tests.

A module that moves changes this file and no other file of the golden outputs.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ergmeter
from ergmeter import Flops, Meter, Missing, Reading, Run, Settings, Summary, Window, summarize
from ergmeter.bench.tables import as_table
from ergmeter.records import Device, Mark, Reported, Sample, Step
from tests.runs import add_writer, even_steps, make_run
from tests.unit.bench.rows import repeats as bench_repeats
from tests.unit.bench.rows import write_table
from tests.unit.flops.family_cases import CASES as FAMILIES
from tests.unit.metrics.test_achievable import calibrated
from tests.unit.neuron import graphs as neuron_graphs

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = [
    "DATA",
    "FAMILIES",
    "ROOT",
    "Device",
    "Flops",
    "Mark",
    "Meter",
    "Missing",
    "Reading",
    "Reported",
    "Run",
    "Sample",
    "Settings",
    "Step",
    "Summary",
    "Window",
    "add_writer",
    "as_table",
    "bench_repeats",
    "calibrated",
    "ergmeter",
    "even_steps",
    "gallery",
    "make_run",
    "neuron_graphs",
    "program",
    "reason_cases",
    "summarize",
    "web_client",
    "write_table",
]

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


def program(name: str) -> Callable[[], None]:
    """A command by the name it is installed under. It reads `sys.argv`."""
    (found,) = entry_points(group="console_scripts", name=name)
    loaded: Callable[[], None] = found.load()
    return loaded


def gallery() -> ModuleType:
    """`scripts/gallery.py`, which turns the H200 recording into runs."""
    name = "golden_gallery"
    if name not in sys.modules:
        spec = spec_from_file_location(name, ROOT / "scripts" / "gallery.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def reason_cases() -> dict[str, list[Any]]:
    """The runs in which a metric is absent or carries a caution, by the file that lists them."""
    package = importlib.import_module("tests.unit.metrics.reasons")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return {
        name.removeprefix("cases_"): list(
            importlib.import_module(f"{package.__name__}.{name}").CASES
        )
        for name in names
        if name.startswith("cases_")
    }


def web_client(root: Path) -> Any:
    """The app of `erg serve` over a directory, called in this process."""
    return importlib.import_module("tests.unit.views.serving").client(root)
