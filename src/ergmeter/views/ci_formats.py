"""The gate's verdict for CI systems: JUnit XML, SARIF, and GitHub's annotations.

Inconclusive is a verdict of its own: skipped in JUnit, a note in SARIF, a warning on GitHub.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from ergmeter.units import printable
from ergmeter.version import __version__
from ergmeter.views.gate import gate_rows, gate_title

if TYPE_CHECKING:
    from ergmeter.compare.gate import Gate

_SARIF_LEVELS: dict[str, str] = {"worse": "error", "inconclusive": "note", "absent": "none"}
_GITHUB_LEVELS: dict[str, str] = {"worse": "error", "inconclusive": "warning", "absent": "notice"}


def junit(gate: Gate) -> str:
    """Return JUnit XML: a test case for each verdict and remark."""
    cases = gate_rows(gate)
    failures, skipped = (
        sum(case[0] in states for case in cases)
        for states in (("worse",), ("inconclusive", "absent"))
    )
    suite = ElementTree.Element(
        "testsuite", name="erg gate", tests=str(len(cases)), failures=str(failures),
        skipped=str(skipped), errors="0",
    )  # fmt: skip
    for state, name, rule, words in cases:
        case = ElementTree.SubElement(
            suite, "testcase", classname=printable(name), name=printable(rule or "remark")
        )
        if state == "worse":
            ElementTree.SubElement(case, "failure", message=printable(words))
        elif state in ("inconclusive", "absent"):
            ElementTree.SubElement(case, "skipped", message=printable(f"{state}: {words}"))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def sarif(gate: Gate) -> str:
    """Return SARIF 2.1.0: a result for each verdict that is not a pass."""
    rules = [{"id": str(rule), "shortDescription": {"text": str(rule)}} for rule in gate.rules]
    results: list[dict[str, Any]] = [
        {
            "ruleId": rule or "remark",
            "level": _SARIF_LEVELS[state],
            "message": {"text": f"{name}: {words}"},
        }
        for state, name, rule, words in gate_rows(gate)
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
    level = _GITHUB_LEVELS.get(gate.state, "notice")
    lines = [f"::{level} title=erg gate::{title}"]
    lines += [
        f"::{_GITHUB_LEVELS[state]} title=erg gate::{_escaped(': '.join(filter(None, rest)))}"
        for state, *rest in gate_rows(gate)
        if state in _GITHUB_LEVELS
    ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
