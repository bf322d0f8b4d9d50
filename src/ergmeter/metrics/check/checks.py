"""Is a measurement fit to be compared with another? What disturbed it, and what that did to it.

Two traps shaped it. A verdict without a figure: "throttled" alone says nothing, so each finding has
what was seen and how much of the result hangs on it. And silence that is taken for health: a check
that could not be made is named with its reason, and where a decisive one could not, the
verdict is that nobody knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.check import devices
from ergmeter.metrics.check import window as fitness_window
from ergmeter.metrics.check.flop_count import check_flop_count

if TYPE_CHECKING:
    from ergmeter.metrics.check.finding import Check, CheckFinding
    from ergmeter.metrics.evidence.evidence import Evidence

Verdict = Literal["fit", "not fit", "not known"]

# Without one of these nobody can say "fit": long enough, steady enough, and a clock that nothing
# held down. Each can spoil a comparison by itself, and no other check sees it. Company is none of
# them: a container hides it from every program in it, and what it does shows in the noise.
DECISIVE = ("window", "noise", "throttling")

_CHECK_FAILED = "the check failed"


@dataclass(frozen=True, slots=True)
class Fitness:
    """What all checks came to. `unchecked`: those that could not be made, with the reason."""

    findings: tuple[CheckFinding, ...]
    unchecked: dict[str, str]
    window: str

    @property
    def verdict(self) -> Verdict:
        """Not fit where something serious was found; fit only if every decisive check was made."""
        if any(one.weight == "serious" for one in self.findings):
            return "not fit"
        return "not known" if self.undecided else "fit"

    @property
    def is_fit(self) -> bool:
        """Whether it is known to be fit."""
        return self.verdict == "fit"

    @property
    def undecided(self) -> tuple[str, ...]:
        """The decisive checks that could not be made."""
        return tuple(name for name in DECISIVE if name in self.unchecked)

    @property
    def passed(self) -> tuple[str, ...]:
        """The checks that were made and found nothing."""
        found = {one.check for one in self.findings}
        return tuple(name for name in CHECKS if name not in found | self.unchecked.keys())

    @property
    def said(self) -> str:
        """The verdict, and how many of the checks it rests on."""
        without, whole = len(self.unchecked), len(CHECKS)
        if self.verdict == "not known":
            which = ", ".join(name.replace("_", " ") for name in self.undecided)
            failed = sum(why.startswith(_CHECK_FAILED) for why in self.unchecked.values())
            parts = (
                [f"{without - failed} of {whole} checks could not be made"]
                if without > failed
                else []
            )
            parts += [f"{failed} of {whole} checks failed"] if failed else []
            return f"not known: {' and '.join(parts)}, {which} among them"
        word = "fit to be compared" if self.is_fit else "not fit to be compared"
        return f"{word} ({whole - without} of {whole} checks made)"


def fitness(evidence: Evidence) -> Fitness:
    """Make every check. The serious findings come first."""
    findings: list[CheckFinding] = []
    unchecked: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            findings += check(evidence)
        except NotMeasurable as error:
            unchecked[name] = str(error)
        except Exception as error:  # noqa: BLE001  a card is shown, whatever is wrong with a check
            unchecked[name] = f"{_CHECK_FAILED}: {type(error).__name__}: {error}"
    ordered = sorted(findings, key=lambda one: one.weight != "serious")
    return Fitness(tuple(ordered), unchecked, _window_note(evidence))


def _window_note(evidence: Evidence) -> str:
    try:
        return evidence.window_note
    except NotMeasurable as error:
        return str(error)


_FOUND = {
    **fitness_window.CHECKS,
    **devices.CHECKS,
    "flop_count": check_flop_count,
}
# In the order in which they are told.
CHECKS: dict[str, Check] = {
    name: _FOUND[name]
    for name in (
        *("ranks", "record", "window", "warm_up", "noise", "company", "gaps", "throttling"),
        *(
            "flop_count",
            "counter",
            "clock",
            "temperature",
            "stalls",
            "pauses",
            "stragglers",
            "load",
            "memory",
        ),
    )
}
