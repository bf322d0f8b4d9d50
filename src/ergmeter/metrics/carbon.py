"""Carbon: energy x grid intensity x PUE, with both factors shown. Neither has a default.

The trap: a figure that looks measured and rests on a guess. CodeCarbon without a network places
the machine in Canada; carbontracker multiplies by a PUE nobody stated. Here a factor comes from the
user with its source, and without a grid intensity there is no carbon figure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.energy import run_j
from ergmeter.records import Reading
from ergmeter.units import J_PER_KWH

if TYPE_CHECKING:
    from ergmeter.metrics.evidence import Evidence


def co2e_g(evidence: Evidence) -> Reading:
    """Grams of CO2 equivalent for the energy of the window."""
    settings = evidence.settings
    if settings.grid_g_per_kwh is None:
        raise NotMeasurable(
            "no grid intensity was given: --grid-g-per-kwh with --grid-source (your grid operator"
            " or supplier publishes it)"
        )
    energy = run_j(evidence)
    pue = 1.0 if settings.pue is None else settings.pue
    factor = settings.grid_g_per_kwh * pue / J_PER_KWH
    grid = f"{settings.grid_g_per_kwh:g} g/kWh ({settings.grid_source or 'source not stated'})"
    building = (
        "the building's overhead is not in it (no PUE was given)"
        if settings.pue is None
        else f"PUE {pue:g} ({settings.pue_source or 'source not stated'})"
    )
    low, high = (None if bound is None else bound * factor for bound in (energy.low, energy.high))
    note = f"{energy.value:.4g} J x {grid} x {building}; interval is the energy's alone"
    return Reading(energy.value * factor, "g", "assumed", low, high, note)


METRICS = [
    Metric(
        "carbon.co2e_g",
        "carbon",
        "g",
        "lower",
        "energy.run_j / 3.6e6 x grid intensity x PUE",
        ("energy", "a grid intensity"),
        co2e_g,
    ),
]
