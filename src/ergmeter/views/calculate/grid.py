"""The table of grids, in rows and one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ergmeter.units import significant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.hardware.grid import GridIntensity


def listing(rows: Sequence[GridIntensity]) -> RenderableType:
    """A table for each source, with what it counts."""
    parts: list[RenderableType] = []
    for source in dict.fromkeys(row.source for row in rows):
        table = Table(box=None, pad_edge=False)
        table.add_column("code", no_wrap=True)
        table.add_column("name")
        table.add_column("g CO2e/kWh", justify="right", no_wrap=True)
        table.add_column("year", justify="right")
        for row in rows:
            if row.source == source:
                table.add_row(row.code, row.name, f"{row.g_per_kwh:.0f}", str(row.year))
        parts += [Text(f"{source.title} ({source.licence}): {source.scope}", "bold"), table]
        parts.append(Text())
    parts.append(Text("erg grid NAME   one with its source and other names", "dim"))
    return Group(*parts)


def entry(row: GridIntensity) -> list[str]:
    """One grid in words."""
    source = row.source
    lines = {
        "intensity": f"{significant(row.g_per_kwh)} g CO2e/kWh, location-based",
        "published as": f"{row.published:g} {source.unit}, average of {row.year}",
        "counts": source.scope,
        "also called": ", ".join(row.also) or "-",
        "source": f"{source.title} ({source.licence})",
        "address": source.url,
    }
    return [
        f"{row.name}  ({row.code})",
        *(f"  {title:<13} {said}" for title, said in lines.items()),
    ]


def document(row: GridIntensity) -> dict[str, Any]:
    """One grid as JSON."""
    source = row.source
    return {
        "code": row.code,
        "name": row.name,
        "also": list(row.also),
        "g_per_kwh": row.g_per_kwh,
        "method": "location-based",
        "published": row.published,
        "published_unit": source.unit,
        "year": row.year,
        "source": source.title,
        "scope": source.scope,
        "licence": source.licence,
        "address": source.url,
    }
