"""Reasons and cautions in the source of metrics and comparisons, as patterns of their text.

A reason is the text of a ``Missing``, a ``NotMeasurable`` or a subclass: written in the call, or in
a constant or a function of the same module that the call uses. A caution is a sentence of the
notes, of ``erg check`` or of the FLOP count's check. Found by reading the source, so that a new one
without a run in which it is true fails the test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ergmeter

SOURCE = Path(ergmeter.__file__).parent
FOLDERS = (SOURCE / "metrics", SOURCE / "compare", SOURCE / "stats")
CAUTIONS = ("metrics/summarize.py", "metrics/check")
FEWEST_WORDS = 4  # fewer are parts of a sentence: "of warm-up", "on rank"

_CALLS = ("Missing", "NotApplicable", "NotMeasurable", "SingleStep")
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Template:
    """One text of the source; its holes match anything."""

    place: str  # "energy.py:55"
    text: str
    pattern: re.Pattern[str]

    def matches(self, text: str) -> bool:
        return self.pattern.search(text) is not None


def templates(*folders: Path) -> list[Template]:
    """All of them, in the order of the files and lines."""
    paths = [path for folder in folders or FOLDERS for path in sorted(folder.rglob("*.py"))]
    return [one for path in paths for one in _of_module(path)]


def _of_module(path: Path) -> list[Template]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    has_cautions = any(path.is_relative_to(SOURCE / caution) for caution in CAUTIONS)
    roots: list[ast.AST] = [tree] if has_cautions else list(_reasons(tree))
    unread = _not_messages(tree)
    found = {node.lineno: node for root in roots for node in _texts(root, unread)}
    return [_template(path, node) for _, node in sorted(found.items())]


def _reasons(tree: ast.Module) -> Iterator[ast.AST]:
    """The arguments of the calls, and what they name in this module."""
    definitions: dict[str, ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            definitions[node.targets[0].id] = node.value
    calls = [node for node in ast.walk(tree) if _is_reason(node)]
    yield from calls
    names = {
        name.id if isinstance(name, ast.Name) else name.attr
        for call in calls
        for name in ast.walk(call)
        if isinstance(name, (ast.Name, ast.Attribute))
    }
    yield from (definitions[name] for name in sorted(names & definitions.keys()))


def _is_reason(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS


def _not_messages(tree: ast.Module) -> set[int]:
    """Docstrings, and declarations of metrics."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *_Function)) and ast.get_docstring(node):
            skipped.add(id(node.body[0]))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Metric":
            skipped.add(id(node))
    return skipped


def _texts(root: ast.AST, skipped: set[int]) -> Iterator[ast.JoinedStr | ast.Constant]:
    if id(root) in skipped:
        return
    if isinstance(root, ast.JoinedStr) or (
        isinstance(root, ast.Constant) and isinstance(root.value, str)
    ):
        if len(" ".join(_literals(root)).split()) >= FEWEST_WORDS:
            yield root
        return
    for child in ast.iter_child_nodes(root):
        yield from _texts(child, skipped)


def _literals(node: ast.JoinedStr | ast.Constant) -> list[str]:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return [str(part.value) for part in parts if isinstance(part, ast.Constant)]


def _template(path: Path, node: ast.JoinedStr | ast.Constant) -> Template:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    pattern = ""
    for part in parts:
        text = str(part.value) if isinstance(part, ast.Constant) else ""
        # A plain text may itself be filled in by str.format.
        fields = [text] if isinstance(node, ast.JoinedStr) else re.split(r"\{[^{}]*\}", text)
        pattern += ".*".join(map(re.escape, fields)) if text else ".*"
    place = f"{path.relative_to(SOURCE)}:{node.lineno}"
    return Template(place, " … ".join(_literals(node)), re.compile(pattern, re.DOTALL))
