"""The gate's verdict for CI systems: JUnit XML, SARIF, and GitHub's annotations.

Inconclusive is a verdict of its own: skipped in JUnit, a note in SARIF, a warning on GitHub.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from xml.etree import ElementTree

from ergmeter.units import printable
from ergmeter.version import __version__
from ergmeter.views.gate import gate_rows, gate_title

if TYPE_CHECKING:
    from pathlib import Path

    from ergmeter.compare.gate import Gate

_REMARK = "remark"
_SARIF_LEVELS: dict[str, str] = {
    "error": "error",
    "worse": "error",
    "inconclusive": "note",
    "absent": "none",
}
_GITHUB_LEVELS: dict[str, str] = {
    "error": "error",
    "worse": "error",
    "inconclusive": "warning",
    "absent": "notice",
}


def _problem(gate: Gate) -> list[tuple[str, str, str, str]]:
    """Why the gate exits with 2 or 3, as a row; empty if it does not."""
    if gate.exit_code == 3:
        return [("error", "erg gate", "", f"not comparable: {gate.not_comparable[0]}")]
    return [("error", "erg gate", "", gate.why_useless)] if gate.exit_code == 2 else []


def junit(gate: Gate) -> str:
    """Return JUnit XML: a test case for each verdict and remark."""
    cases = [*_problem(gate), *gate_rows(gate)]
    failures, skipped = (
        sum(case[0] in states for case in cases)
        for states in (("worse",), ("inconclusive", "absent"))
    )
    suite = ElementTree.Element(
        "testsuite", name="erg gate", tests=str(len(cases)), failures=str(failures),
        skipped=str(skipped), errors=str(len(_problem(gate))),
    )  # fmt: skip
    for state, name, rule, words in cases:
        case = ElementTree.SubElement(
            suite, "testcase", classname=printable(name), name=printable(rule or _REMARK)
        )
        if state == "error":
            ElementTree.SubElement(case, "error", message=printable(words))
        elif state == "worse":
            ElementTree.SubElement(case, "failure", message=printable(words))
        elif state in ("inconclusive", "absent"):
            ElementTree.SubElement(case, "skipped", message=printable(f"{state}: {words}"))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def sarif(gate: Gate, *, new: Path) -> str:
    """Return SARIF 2.1.0: a result for each verdict that is not a pass, located at NEW."""
    names = dict.fromkeys((*map(str, gate.rules), _REMARK))
    rules = [{"id": name, "shortDescription": {"text": name}} for name in names]
    artifact = {"artifactLocation": {"uri": quote(new.as_posix())}, "region": {"startLine": 1}}
    results: list[dict[str, Any]] = [
        {
            "ruleId": rule or _REMARK,
            "level": _SARIF_LEVELS[state],
            "message": {"text": f"{name}: {words}"},
            "locations": [{"physicalLocation": artifact}],
        }
        for state, name, rule, words in (*_problem(gate), *gate_rows(gate))
        if state in _SARIF_LEVELS
    ]
    driver = {"name": "erg gate", "version": __version__, "rules": rules}
    body = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(body, indent=1) + "\n"


def github(gate: Gate) -> str:
    """Return workflow commands that GitHub Actions shows as annotations."""
    title = _escaped(gate_title(gate))
    level = "error" if _problem(gate) else _GITHUB_LEVELS.get(gate.state, "notice")
    lines = [f"::{level} title=erg gate::{title}"]
    lines += [
        f"::{_GITHUB_LEVELS[state]} title=erg gate::{_escaped(': '.join(filter(None, rest)))}"
        for state, *rest in (*_problem(gate), *gate_rows(gate))
        if state in _GITHUB_LEVELS
    ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
