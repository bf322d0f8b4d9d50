"""The catalogue is the only list of metrics: no other module spells a collection of their keys."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ergmeter.metrics.catalog import every_metric, positions

PACKAGE = Path(__file__).parents[2] / "src" / "ergmeter"
FEWEST = 3  # keys that make a list
COLLECTIONS = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.BinOp, ast.Constant, ast.Call)
ALLOWED = ("metrics/catalog.py", "metrics/definitions/", "compat/")
# Lists that are to go; each file leaves this set with its last one.
LEFT: set[str] = set()


def constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names that a module or its classes bind to texts, also by unpacking or with a type."""
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in (*tree.body, *(statement for each in classes for statement in each.body)):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            values: list[ast.expr] = [node.value]
            targets = [target]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                targets, values = target.elts, node.value.elts
            for bound, value in zip(targets, values, strict=False):
                if isinstance(bound, ast.Name) and isinstance(value, ast.Constant):
                    yield bound.id, str(value.value)


def texts(node: ast.expr | ast.keyword | None, names: Mapping[str, str]) -> Iterator[str]:
    """The texts in a literal collection, nested and starred ones included."""
    match node:
        case ast.Constant(str(text)):
            yield from text.split() if "." in text else ()
        case ast.Name(name) | ast.Attribute(attr=name) if name in names:
            yield names[name]
        case ast.Starred(value) | ast.keyword(value=value):
            yield from texts(value, names)
        case (
            ast.Tuple(items)
            | ast.List(items)
            | ast.Set(items)
            | ast.Call(ast.Name("dict"), [], items)
        ):
            for item in items:
                yield from texts(item, names)
        case ast.Dict(keys, values):
            for part in (*keys, *values):
                yield from texts(part, names)
        case ast.BinOp(left, ast.Add() | ast.BitOr(), right):
            yield from texts(left, names)
            yield from texts(right, names)


def lists_of_keys(source: str, names: Mapping[str, str] | None = None) -> list[int]:
    """The lines of a module where a literal collection has several keys of the catalogue."""
    tree = ast.parse(source)
    names = {**(names or {}), **dict(constants(tree))}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, COLLECTIONS)
        if len(set(texts(node, names)) & every_metric().keys()) >= FEWEST
    ]


def test_only_the_catalogue_lists_metrics() -> None:
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    bound = [pair for source in sources.values() for pair in constants(ast.parse(source))]
    names = {name: text for name, text in bound if text in every_metric()}
    lists = {
        file: lines
        for path, source in sources.items()
        if not (file := path.relative_to(PACKAGE).as_posix()).startswith(ALLOWED)
        if (lines := lists_of_keys(source, names))
    }
    assert {file: lines for file, lines in lists.items() if file not in LEFT} == {}
    assert lists.keys() >= LEFT, "take files without a list of metrics out of LEFT"


def keys_in_script(source: str) -> set[str]:
    """The keys of the catalogue that a script has as texts of their own."""
    return (
        set(re.findall(r"(?<=[\"'`])[a-z_]+\.[a-z0-9_]+(?=[\"'`])", source)) & every_metric().keys()
    )


def test_no_script_lists_metrics() -> None:
    scripts = sorted(PACKAGE.rglob("*.js"))
    assert len(scripts) > 3
    lists = {path.name: keys for path in scripts if (keys := keys_in_script(path.read_text()))}
    assert {name: keys for name, keys in lists.items() if len(keys) >= FEWEST} == {}
    assert len(keys_in_script("x = {\"time.step_s\": 1, 'time.run_s': `training.loss`}")) == FEWEST


def test_the_page_names_every_view() -> None:
    page = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text()
    listed = page.partition("The names of views: ")[2].partition("A test fails")[0]
    declared = {view for metric in every_metric().values() for view in positions(metric.views)}
    assert set(re.findall(r"`([^`]+)`", listed)) == declared


A, B, C = '"time.step_s"', '"time.run_s"', '"training.loss"'


@pytest.mark.parametrize(
    "source",
    [
        f"X = ({A}, {B}, {C})",
        f"X = [{A}, 'other', {B}, {C}]",
        f"def f():\n    return {{{A}, {B}, {C}}}",
        f"X = {{{A}: 1, {B}: 2, {C}: 3}}",
        f"X = {{'a': {A}, 'b': {B}, 'c': {C}}}",
        f"X = (*({A}, {B}), {C})",
        f"X = {{'group': ({A}, {B}), 'other': [{C}]}}",
        f"X, Y, Z = {A}, {B}, {C}",
        f"X = {A}\nY = {B}\nZ = (X, Y, {C})",
        f"X = ({A}, {B}) + ({C},)",
        f"X: str = {A}\nY: Final = {B}\ndef f(key):\n    return key in (X, Y, {C})",
        f"class X:\n    Y = {A}\n    Z: str = {B}\nW = (X.Y, X.Z, {C})",
        f"X = dict(a={A}, b={B}, c={C})",
        "X = 'time.step_s time.run_s training.loss'.split()",
        f"f({A}, [{B}, {C}, 'throughput.steps_per_s'])",
    ],
)
def test_a_list_of_keys_is_found(source: str) -> None:
    assert lists_of_keys(source)


@pytest.mark.parametrize(
    "source",
    [
        f"X = ({A}, {B})",
        f"X = ({A}, {A}, {B})",
        f"X = {A}\nY = {B}\nZ = {C}",
        "X = ('time', 'run', 'loss')",
        f"def f():\n    '''{A} {B}'''\n    return g({A}), g({B}), g({C})",
    ],
)
def test_what_is_no_list_of_keys_is_not_found(source: str) -> None:
    assert lists_of_keys(source) == []
