"""Earlier outputs of `erg analyze` side by side, in parts: for the page and for Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.version import __version__
from ergmeter.views.analyze_blocks import Grid, Items, Part, Words
from ergmeter.views.analyze_compare import changes, heads, input_shown, names_of, rows

if TYPE_CHECKING:
    from ergmeter.neuron.compare import Comparison


def comparison_parts(found: Comparison) -> list[Part]:
    """Every part, in the order in which they are read."""
    said = tuple(changes(found))
    one = Words("All outputs have the same inputs: they are repeats of one run.")
    notes = Items(found.notes) if found.notes else Words("Nothing to note.")
    return [
        Part("outputs", "Outputs", (Grid("outputs", heads(found), tuple(rows(found))),)),
        Part("changes", "What changed", (Items(said) if said else one,)),
        Part("notes", "To be noted", (notes,)),
        Part("inputs", "Inputs", (_inputs(found),)),
        Part("cite", "How to cite", (Words(_citation(found), is_to_copy=True),)),
    ]


def title(found: Comparison) -> str:
    """How many outputs of how many kinds."""
    outputs = sum(len(group.outputs) for group in found.groups)
    kinds = len(found.groups)
    same = "with the same inputs" if kinds == 1 else f"in {kinds} groups, each of the same inputs"
    return f"{outputs} outputs of erg analyze, {same}"


def _inputs(found: Comparison) -> Grid:
    """What makes outputs repeats of one run, a column for each group."""
    called = names_of(found)
    groups = [f"{called[group.outputs[0].path]} ({len(group.outputs)})" for group in found.groups]
    names = found.groups[0].inputs
    lines = tuple(
        (
            name.replace("_", " "),
            *(
                "-" if (value := group.inputs[name]) is None else input_shown(value)
                for group in found.groups
            ),
        )
        for name in names
    )
    return Grid("inputs of each group", ("input", *groups), lines)


def _citation(found: Comparison) -> str:
    under = f", MFU under {found.convention}" if found.convention else ""
    said = "; ".join(changes(found)) or "repeats of one run"
    return f"ergmeter {__version__}: {title(found)}{under}: {said}."
