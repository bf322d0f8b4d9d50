"""What `erg doctor` found, on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ergmeter.doctor import ProbeFinding


def page(findings: list[ProbeFinding]) -> RenderableType:
    """Works first, then what does not and why."""
    parts: list[RenderableType] = []
    for finding in findings:
        sign = ("yes ", "green") if finding.works else ("no  ", "yellow")
        parts.append(Text.assemble(sign, (finding.probe, "bold")))
        if finding.reason:
            parts.append(Padding(Text(finding.reason), (0, 0, 0, 6)))
        for device in finding.devices:
            reads = ", ".join(finding.reads.get(device.id, [])) or "nothing"
            line = Text.assemble((device.name, ""), (f"  [{device.id}]  ", "dim"), f"reads {reads}")
            parts.append(Padding(line, (0, 0, 0, 6)))
        parts += [
            Padding(Text.assemble(("! ", "yellow"), warning), (0, 0, 0, 6))
            for warning in finding.warnings
        ]
    parts.append(_energy(findings))
    return Group(*parts)


def _energy(findings: list[ProbeFinding]) -> Text:
    sources = [
        f"{device.name} ({finding.probe})"
        for finding in findings
        for device in finding.devices
        if {"energy", "power"} & set(finding.reads.get(device.id, []))
    ]
    if sources:
        return Text.assemble("\nenergy can be measured: ", ", ".join(sources))
    return Text(
        "\nenergy can't be measured here: no GPU or CPU sensor answers. Figures that need it are"
        " absent, with this reason; ergmeter does not estimate them."
    )
