"""What `erg check` found, on the terminal and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from ergmeter.metrics.checks import CHECKS, DECISIVE

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ergmeter.metrics.checks import Fitness
    from ergmeter.runlog.reader import Run

_SIGNS = {"serious": ("!!", "red"), "minor": ("! ", "yellow")}
_COLOURS = {"fit": "green", "not fit": "red", "not known": "yellow"}


def page(run: Run, found: Fitness, *, is_alone: bool = True) -> RenderableType:
    """The verdict, then what speaks against it, then what could not be looked at.

    Of several runs each is told by its directory: those of one script share a name."""
    name = run.name if is_alone else run.path.resolve().name
    verdict = (found.said, _COLOURS[found.verdict])
    parts: list[RenderableType] = [
        Text.assemble((name, "bold"), ": ", verdict, (f"  {found.window}", "dim"))
    ]
    for one in found.findings:
        parts.append(Padding(Text.assemble(_SIGNS[one.weight], " ", one.seen), (0, 0, 0, 2)))
        parts.append(Padding(Text(one.effect, "dim"), (0, 0, 0, 5)))
    if found.passed:
        words = ", ".join(name.replace("_", " ") for name in found.passed)
        parts.append(Padding(Text.assemble(("ok ", "green"), words), (0, 0, 0, 2)))
    by_reason: dict[str, list[str]] = {}
    for name, reason in found.unchecked.items():
        by_reason.setdefault(reason, []).append(name.replace("_", " "))
    for reason, names in by_reason.items():
        line = Text.assemble((f"-  {', '.join(names)} not checked: ", "dim"), reason)
        parts.append(Padding(line, (0, 0, 0, 2)))
    return Group(*parts)


def document(run: Run, found: Fitness) -> dict[str, Any]:
    """The same, for programs."""
    return {
        "run": str(run.path),
        "is_fit": found.is_fit,
        "verdict": found.verdict,
        "said": found.said,
        "checks": {
            "all": len(CHECKS),
            "made": len(CHECKS) - len(found.unchecked),
            "decisive": list(DECISIVE),
            "undecided": list(found.undecided),
        },
        "window": found.window,
        "findings": [asdict(one) for one in found.findings],
        "unchecked": found.unchecked,
        "passed": list(found.passed),
    }
