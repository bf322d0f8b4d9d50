"""Carbon intensity of electricity by country or region, from a table with sources.

There is no default region: Poland's intensity is twenty times Norway's. A name matches as a whole,
ignoring case and spaces. An unknown name, or one that two places share (Congo, Georgia), is an
error that lists the closest ones. The world's average has its own name.

All values are location-based: yearly averages of the generation there. Market-based values come
from a contract, so the user passes them. The two sources count different emissions (`scope`), so
their values are not comparable with each other.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ergmeter.errors import UsageError
from ergmeter.hardware.table import fold_name, near_names

_G_PER_KWH_OF_LB_PER_MWH = 0.45359237  # the international pound of 1959, exactly
_MOST_SUGGESTED = 4


@dataclass(frozen=True, slots=True)
class GridSource:
    """A publisher of intensities: its unit and what it counts."""

    title: str
    url: str
    licence: str
    scope: str
    unit: str
    g_per_kwh: float  # of one such unit


SOURCES = {
    "ember": GridSource(
        "Ember, Yearly Electricity Data",
        "https://ember-energy.org/data/yearly-electricity-data/",
        "CC BY 4.0",
        "life cycle of generation, upstream methane included",
        "g/kWh",
        1.0,
    ),
    "egrid": GridSource(
        "US EPA, eGRID2023 rev2, total output emission rates",
        "https://www.epa.gov/system/files/documents/2025-06/summary_tables_rev2.pdf",
        "public domain",
        "CO2, CH4 and N2O of the plants alone",
        "lb/MWh",
        _G_PER_KWH_OF_LB_PER_MWH,
    ),
}


@dataclass(frozen=True, slots=True)
class GridIntensity:
    """One row: a place, the published value and its year."""

    code: str
    also: tuple[str, ...]
    name: str
    published: float  # in its source's unit
    year: int
    source: GridSource

    @property
    def g_per_kwh(self) -> float:
        """Grams of CO2 equivalent for a kilowatt-hour."""
        return self.published * self.source.g_per_kwh

    @property
    def text(self) -> str:
        """The source as text, for the notes of metrics computed from it."""
        return f"{self.name}, location-based, {self.source.title}, {self.year}: {self.source.scope}"

    @property
    def names(self) -> tuple[str, ...]:
        """Its code, its other codes and its name."""
        return (self.code, *self.also, self.name)


@functools.cache
def grids() -> tuple[GridIntensity, ...]:
    """Every row: countries, then regions."""
    text = resources.files("ergmeter.hardware").joinpath("grid.csv").read_text("utf-8")
    return tuple(
        GridIntensity(
            row["code"],
            tuple(filter(None, row["also"].split("|"))),
            row["name"],
            float(row["published"]),
            int(row["year"]),
            SOURCES[row["source"]],
        )
        for row in csv.DictReader(text.splitlines())
    )


def grid_named(name: object) -> GridIntensity:
    """The row of a country or region, by code or name. UsageError lists the closest ones."""
    if not isinstance(name, str):
        raise UsageError(f"grid must be a name, as `erg grid` lists them; got {name!r}")
    row = _by_name().get(fold_name(name))
    if row is None:
        raise UsageError(
            f"no grid is named {name!r}; {_question(name)}`erg grid` lists them, and a figure of"
            " your own is grid_g_per_kwh with grid_source"
        )
    return row


def with_grid(declared: Mapping[str, Any]) -> dict[str, Any]:
    """The declared settings, with `grid` replaced by grid_g_per_kwh and grid_source."""
    rest = {key: value for key, value in declared.items() if key != "grid"}
    name = declared.get("grid")
    if name is None:
        return rest
    for other in ("grid_g_per_kwh", "grid_source"):
        if rest.get(other) is not None:
            raise UsageError(
                f"give grid or {other}, not both: the table has an intensity and its source; got"
                f" grid {name!r} and {other} {rest[other]!r}"
            )
    row = grid_named(name)
    return {**rest, "grid_g_per_kwh": row.g_per_kwh, "grid_source": row.text}


@functools.cache
def _by_name() -> dict[str, GridIntensity]:
    return {fold_name(name): row for row in grids() for name in row.names}


def _question(name: str) -> str:
    """The closest rows as a question for the error message; empty if there is none."""
    names = _by_name()
    near = near_names(fold_name(name), names, least_letters=3, cutoff=0.7)
    rows = dict.fromkeys(names[candidate] for candidate in near)
    suggestions = [f"{row.code} ({row.name})" for row in rows][:_MOST_SUGGESTED]
    return f"did you mean {' or '.join(suggestions)}? " if suggestions else ""
