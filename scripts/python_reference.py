"""`python scripts/python_reference.py`: prints docs/python-api.md, from signatures and docstrings.

The source is parsed and not imported: torch, JAX and Lightning need not be installed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import ergmeter

PACKAGE = Path(__file__).parents[1] / "src" / "ergmeter"
WIDTH = 88
# Beside `ergmeter.__all__`: the documented names of other modules. None: every public member.
MODULES: dict[str, dict[str, tuple[str, ...] | None]] = {
    "": {
        "Meter": (
            *("__init__", "start", "close", "step", "step_begin", "step_end", "phase", "mark"),
            *("workload", "continue_from", "describe", "progress", "summary", "path"),
            "should_stop",
        ),
        "Budget": (),
        "Run": (
            *("open", "part", "training", "steps", "series", "reported", "table", "count"),
            *("name", "status", "settings", "flops", "workload", "devices", "marks", "trainings"),
        ),
        "summarize": None,
        "Settings": (),
    },
    "integrations.huggingface": {"ErgmeterCallback": ("__init__", "path", "summary")},
    "integrations.lightning": {"ErgmeterCallback": ("__init__", "path", "summary")},
    "integrations.torch_loop": {
        "watch": None,
        "Watched": ("logged", "mark", "path", "summary", "close"),
    },
    "integrations.jax": {
        "JaxTraining": (
            *("__init__", "__call__", "step", "phase", "logged"),
            *("mark", "path", "summary", "close"),
        )
    },
    "integrations.generate": {"measure": None, "Measured": ("remove",)},
    "integrations.profiling": {"Profile": ("step", "close")},
    "importers.log": {"read_log": None},
}
NOTES = {
    "": "How to: [by hand, in any loop](tutorial-training.md#by-hand).",
    "integrations.huggingface": "How to: [Hugging Face](integrations/trainers.md#hugging-face).",
    "integrations.lightning": "How to: [Lightning](integrations/trainers.md#lightning).",
    "integrations.torch_loop": "How to: [any torch loop](integrations/torch.md).",
    "integrations.jax": "How to: [JAX](integrations/jax.md).",
    "integrations.generate": "How to: [inference](inference.md).",
    "integrations.profiling": "How to: [a few profiled steps](activity.md#a-few-profiled-steps).",
    "importers.log": "How to: [importing logs](importing.md#from-python).",
}
_HEAD = """\
# Python API

This page is made from signatures and docstrings by `./dev docs`; a test keeps it up to date.

`import ergmeter` alone loads next to nothing: each name loads what it needs when it is first used.
"""
_OTHERS = """\
## Others

`ergmeter.integrations.efficientllm` and `ergmeter.integrations.monitor` have the names of the
modules that they replace: [from EfficientLLM](from-efficientllm.md),
[from TrainingMonitor](from-training-monitor.md).

The protocols of plugins (probes, importers, sinks) are in `ergmeter.ports`:
[adding something](architecture.md#adding-something).
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A parsed module."""

    name: str  # below ergmeter
    source: str
    tree: ast.Module

    def text(self, node: ast.AST) -> str:
        """The source of an expression, on one line and without quotes around annotations."""
        return " ".join((ast.get_source_segment(self.source, node) or "").split())

    def comment(self, line: int) -> str:
        """The comment at the end of a line."""
        _, _, comment = self.source.splitlines()[line - 1].partition("  # ")
        return "" if comment.startswith(("noqa", "type:")) else comment


@cache
def module(name: str) -> Module:
    """A module of ergmeter; the empty name is the package."""
    base = PACKAGE.joinpath(*name.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    source = path.read_text()
    return Module(name, source, ast.parse(source))


def find(where: Module, name: str) -> tuple[Module, ast.ClassDef | Function] | None:
    """A class or function, where it is defined; None if it is not ergmeter's."""
    for node in ast.walk(where.tree):
        if isinstance(node, ast.ClassDef | Function) and node.name == name:
            return where, node
    for node in ast.walk(where.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ergmeter."):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    inner = (node.module or "").removeprefix("ergmeter.")
                    return find(module(inner), alias.name)
    return None


def _members(where: Module, node: ast.ClassDef) -> dict[str, tuple[Module, Function]]:
    """Functions of a class and of its bases, the class's own first."""
    members = {inner.name: (where, inner) for inner in node.body if isinstance(inner, Function)}
    for base in node.bases:
        origin = find(where, base.id) if isinstance(base, ast.Name) else None
        if origin and isinstance(origin[1], ast.ClassDef):
            members = {**_members(origin[0], origin[1]), **members}
    return members


def _decorators(node: ast.ClassDef | Function) -> set[str]:
    return {ast.unparse(one).partition("(")[0] for one in node.decorator_list}


def _arguments(where: Module, arguments: ast.arguments) -> Iterator[str]:
    """Each argument as it is written, without self."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    for argument, default in zip(positional, defaults, strict=True):
        if argument.arg not in ("self", "cls"):
            yield _argument(where, argument, default)
    if arguments.vararg:
        yield f"*{_argument(where, arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(where, argument, default)
    if arguments.kwarg:
        yield f"**{_argument(where, arguments.kwarg, None)}"


def _argument(where: Module, argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    if argument.annotation:
        text += f": {where.text(argument.annotation)}"
    if default is None:
        return text
    return text + (" = " if argument.annotation else "=") + _value(where, default)


def _value(where: Module, default: ast.expr) -> str:
    """A default as it is written; of a constant of the module, its value."""
    if isinstance(default, ast.Name):
        for node in where.tree.body:
            if isinstance(node, ast.Assign) and default.id in map(ast.unparse, node.targets):
                return where.text(node.value)
    return where.text(default)


def _fields(where: Module, node: ast.ClassDef) -> list[tuple[str, str, str, str]]:
    """Name, type, default and comment of a dataclass's public fields."""
    rows = []
    for inner in node.body:
        if not isinstance(inner, ast.AnnAssign) or not isinstance(inner.target, ast.Name):
            continue
        if not inner.target.id.startswith("_"):
            default = where.text(inner.value) if inner.value else ""
            comment = where.comment(inner.end_lineno or inner.lineno)
            rows.append((inner.target.id, where.text(inner.annotation), default, comment))
    return rows


def _signature(name: str, arguments: list[str], returns: str = "") -> str:
    arrow = f" -> {returns}" if returns else ""
    line = f"{name}({', '.join(arguments)}){arrow}"
    if len(line) > WIDTH:
        rows = "".join(f"    {one},\n" for one in arguments)
        line = f"{name}(\n{rows}){arrow}"
    return f"```python\n{line}\n```"


def _text(node: ast.ClassDef | Function) -> str:
    return ast.get_docstring(node) or ""


def _call(where: Module, node: Function, name: str) -> str:
    returns = where.text(node.returns) if node.returns and node.name != "__init__" else ""
    return _signature(name, list(_arguments(where, node.args)), returns)


def _constructor(where: Module, node: ast.ClassDef, name: str) -> list[str]:
    """The signature of a class and what its __init__ says."""
    members = _members(where, node)
    if "__init__" in members:
        owner, init = members["__init__"]
        return [_call(owner, init, name), _text(node), _text(init)]
    rows = _fields(where, node)
    if not rows or "dataclass" not in _decorators(node):
        return [_text(node)]
    if {"path", "writers"} <= {row[0] for row in rows}:  # Run.open makes it
        return [_text(node), _table(rows)]
    arguments = [
        f"{field}: {kind}" + (f" = {default}" if default else "")
        for field, kind, default, _ in rows
    ]
    comments = [row for row in rows if row[3]]
    return [_signature(name, arguments), _text(node), _table(comments)]


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    if not rows:
        return ""
    lines = [_row(name, kind, comment) for name, kind, _, comment in rows]
    return "\n".join(["| field | type | |", "| --- | --- | --- |", *lines])


def _row(name: str, kind: str, text: str) -> str:
    escaped = kind.replace("|", "\\|")
    return f"| `{name}` | `{escaped}` | {' '.join(text.split())} |"


def _class(where: Module, node: ast.ClassDef, members: tuple[str, ...] | None) -> Iterator[str]:
    yield f"### {node.name}"
    yield from filter(None, _constructor(where, node, node.name))
    attributes, methods = [], []
    for name, (owner, function) in _members(where, node).items():
        is_listed = not name.startswith("_") if members is None else name in members
        if not is_listed or name == "__init__" or not _text(function):
            continue
        if _decorators(function) & {"property", "cached_property"}:
            kind = owner.text(function.returns) if function.returns else ""
            attributes.append(_row(name, kind, _text(function)))
        else:
            shown = "training" if name == "__call__" else f"{node.name}.{name}"
            methods += [f"#### {node.name}.{name}", _call(owner, function, shown), _text(function)]
    if attributes:
        yield "\n".join(["| attribute | type | |", "| --- | --- | --- |", *attributes])
    yield from methods


def _entry(where: Module, name: str, members: tuple[str, ...] | None) -> Iterator[str]:
    origin = find(where, name)
    assert origin, f"{name} is not in {where.name}"
    owner, node = origin
    if isinstance(node, ast.ClassDef):
        yield from _class(owner, node, members)
    else:
        yield from (f"### {name}", _call(owner, node, name), _text(node))


def page() -> str:
    """The page docs/python-api.md."""
    rest = sorted({*ergmeter.__all__} - {"__version__", *MODULES[""]})
    parts = [_HEAD.rstrip()]
    for path, listed in MODULES.items():
        names = listed if path else {**listed, **dict.fromkeys(rest)}
        parts += [f"## ergmeter{path and '.'}{path}", NOTES[path]]
        for name, members in names.items():
            parts += _entry(module(path), name, members)
    return "\n\n".join([*parts, _OTHERS])


if __name__ == "__main__":
    sys.stdout.write(page())
