"""`python scripts/house.py`: measures src/ergmeter and compares it with the limits of the design.

`--check` exits with 1 if a checked limit is broken. Checked are the first six measures, and any
measure named by `--limit modules=400`. `--list` lists the offenders of each measure. `--map` writes
the folders and modules into docs/architecture.md.

Importers of a module are found in the source: `import` statements anywhere in a file, type checking
included. A module loaded by name (an entry point in pyproject.toml, a string with its dotted path,
or an f-string such as f"ergmeter.cli.{name}") has an importer outside its folder.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]

MODULES_PER_FOLDER = 15  # __init__ not counted
VAGUE_PERCENT = 1  # of all bound names; must stay under it
SPLINTER_LINES = 60  # a module shorter than this, with one importer beside it, is a splinter
MODULES = 400
CODE_LINES = 67_147

# One name by intent: each framework's callback has the name that its users look for.
SHARED_CLASSES = frozenset({"ErgmeterCallback"})
# Identifiers that name nothing.
VAGUE = frozenset(
    {"one", "found", "said", "told", "kept", "held", "seen", "whole", "known", "shown", "given"}
    | {"place", "lately", "spent", "ahead", "drawn"}
)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
BLIND = frozenset({"Exception", "BaseException"})
TRAP = re.compile(r"The\s+trap:")

_NOT_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    | {tokenize.ENDMARKER}
)
_NOQA = re.compile(r"noqa(:[A-Z0-9, ]+)?")
_ENTRY_POINT = re.compile(r'^[^#\n]*=\s*"(ergmeter[\w.]*):[\w.]+"', re.MULTILINE)


@dataclass(frozen=True)
class Module:
    """A Python file of the package, with its dotted name."""

    name: str
    path: Path
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of its syntax tree."""
        return list(ast.walk(ast.parse(self.text)))

    @property
    def is_package(self) -> bool:
        """True for an `__init__.py`."""
        return self.path.name == "__init__.py"

    @property
    def package(self) -> str:
        """The package that its relative imports start from."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def lines(self) -> int:
        """Lines of the file, of any kind."""
        return len(self.text.splitlines())

    def docstrings(self) -> Iterator[ast.Constant]:
        """Strings that are statements: docstrings of modules, classes, functions and fields."""
        for node in self.nodes:
            text = node.value if isinstance(node, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text

    def code_lines(self) -> int:
        """Lines that are not blank, comments or docstrings."""
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _NOT_CODE:
                code.update(range(token.start[0], token.end[0] + 1))
        for text in self.docstrings():
            code.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
        blank = {n for n, line in enumerate(self.text.splitlines(), 1) if not line.strip()}
        return len(code - blank)

    def at(self, node: ast.stmt | ast.expr | ast.excepthandler | ast.arg) -> str:
        """Its name and a line number."""
        return f"{self.name}:{node.lineno}"


@dataclass(frozen=True)
class Measure:
    """A measured value, and the largest value allowed; None where any is."""

    key: str
    title: str
    value: int
    limit: int | None = None
    is_checked: bool = False
    detail: str = ""
    offenders: Sequence[str] = ()

    @property
    def is_broken(self) -> bool:
        """True if there is a limit and the value is above it."""
        return self.limit is not None and self.value > self.limit


def read_modules(package: Path) -> dict[str, Module]:
    """All Python files of a package directory, by dotted name."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path, path.read_text(encoding="utf-8"))
    return modules


def measures(root: Path) -> list[Measure]:
    """All measures of the package under `root`/src, the checked ones first."""
    modules = read_modules(root / "src" / "ergmeter")
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    files = list(modules.values())
    return [
        crowded_folders(files),
        shared_classes(files),
        vague_definitions(files),
        vague_bindings(files),
        unexplained_excepts(files),
        code_lines(files),
        module_count(files),
        splinters(modules, set(_ENTRY_POINT.findall(project))),
        blind_excepts(files),
        traps(files),
    ]


# -- measures -------------------------------------------------------------------------------------


def crowded_folders(files: Sequence[Module]) -> Measure:
    """Folders with more modules than one can take in at a glance."""
    sizes = Counter(module.package for module in files if not module.is_package)
    crowded = [(size, name) for name, size in sizes.items() if size > MODULES_PER_FOLDER]
    listed = [f"{size} {name}" for size, name in sorted(crowded, reverse=True)]
    return Measure(
        "folders", f"folders with more than {MODULES_PER_FOLDER} modules", len(crowded), 0, True,
        detail=f"{len(sizes)} folders; largest {max(sizes.values(), default=0)}",
        offenders=listed,
    )  # fmt: skip


def shared_classes(files: Sequence[Module]) -> Measure:
    """Public class names that two or more modules define."""
    homes: dict[str, set[str]] = defaultdict(set)
    for module in files:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(module.name)
    shared = {
        name: definers
        for name, definers in homes.items()
        if len(definers) > 1 and name not in SHARED_CLASSES
    }
    listed = sorted(shared.items(), key=lambda item: (-len(item[1]), item[0]))
    return Measure(
        "classes", "public class names in two or more modules", len(shared), 0, True,
        detail=f"{len(homes)} public class names",
        offenders=[f"{name}: {', '.join(sorted(definers))}" for name, definers in listed],
    )  # fmt: skip


def vague_definitions(files: Sequence[Module]) -> Measure:
    """Modules, packages, classes and functions with a vague name."""
    listed = []
    for module in files:
        if is_vague(module.name.rpartition(".")[2]):
            listed.append(f"{module.name}: module")
        for node in module.nodes:
            if isinstance(node, DEFINITIONS) and is_vague(node.name):
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                listed.append(f"{module.at(node)} {node.name}: {kind}")
    kinds = Counter(line.rpartition(" ")[2] for line in listed)
    return Measure(
        "vague-names", "vague names of modules, classes, functions", len(listed), 0, True,
        detail=", ".join(f"{kinds[kind]} {kind}" for kind in ("module", "class", "function")),
        offenders=listed,
    )  # fmt: skip


def vague_bindings(files: Sequence[Module]) -> Measure:
    """Bound names that are vague: stored names, arguments, functions and classes."""
    total = 0
    counts: Counter[str] = Counter()
    homes: dict[str, Counter[str]] = defaultdict(Counter)
    for module in files:
        for name in map(_plain, bound_names(module)):
            total += 1
            if name in VAGUE:
                counts[name] += 1
                homes[name][module.name] += 1
    vague = counts.total()
    return Measure(
        "vague-share", "vague names among all bound names", vague,
        max(0, -(-total * VAGUE_PERCENT // 100) - 1), True,
        detail=f"{100 * vague / max(total, 1):.2f} % of {total:,}; limit: under {VAGUE_PERCENT} %",
        offenders=[
            f"{number} {name}: "
            + ", ".join(f"{home} {times}" for home, times in homes[name].most_common(5))
            for name, number in counts.most_common()
        ],
    )  # fmt: skip


def module_count(files: Sequence[Module]) -> Measure:
    """All Python files, `__init__.py` included."""
    packages = sum(module.is_package for module in files)
    sizes = sorted(module.lines for module in files)
    middle = sizes[len(sizes) // 2] if sizes else 0
    return Measure(
        "modules", "modules", len(files), MODULES,
        detail=f"{packages} of them __init__; {sum(sizes):,} lines of any kind, median {middle}",
    )  # fmt: skip


def splinters(modules: Mapping[str, Module], entry_points: set[str]) -> Measure:
    """Short modules with exactly one importer, which sits in the same folder."""
    importers = importers_of(modules)
    single = []
    for name, module in modules.items():
        if module.is_package or name in entry_points or len(importers[name]) != 1:
            continue
        (importer,) = importers[name]
        if importer in modules and modules[importer].path.parent == module.path.parent:
            single.append((module, importer))
    short = [(module, importer) for module, importer in single if module.lines < SPLINTER_LINES]
    return Measure(
        "splinters", f"one importer, same folder, under {SPLINTER_LINES} lines", len(short), 0,
        detail=f"{len(single)} of any length, {sum(m.lines for m, _ in single):,} lines",
        offenders=[f"{m.name}: {m.lines} lines, imported by {importer}" for m, importer in short],
    )  # fmt: skip


def code_lines(files: Sequence[Module]) -> Measure:
    """Lines of code, the same however much is explained."""
    sizes = {module.name: module.code_lines() for module in files}
    folders: Counter[str] = Counter()
    for name, size in sizes.items():
        folders[".".join(name.split(".")[:2])] += size
    return Measure(
        "code-lines", "code lines (no blanks, comments, docstrings)", sum(sizes.values()),
        CODE_LINES, True,
        offenders=[f"{size:,} {name}" for name, size in folders.most_common()],
    )  # fmt: skip


def blind_excepts(files: Sequence[Module]) -> Measure:
    """Handlers that catch anything: `except Exception`, bare ones, `suppress(Exception)`."""
    blind = [(module, node) for module in files for node in _blind(module)]
    suppressed = [node for _, node in blind if isinstance(node, ast.Call)]
    return Measure(
        "blind-excepts", "blind excepts", len(blind),
        detail=f"{len(blind) - len(suppressed)} except, {len(suppressed)} suppress",
        offenders=[module.at(node) for module, node in blind],
    )  # fmt: skip


def unexplained_excepts(files: Sequence[Module]) -> Measure:
    """Blind excepts without a comment, on their line or the line above, that says why."""
    listed = [
        module.at(node)
        for module in files
        for node in _blind(module)
        if not any(map(_says_why, module.text.splitlines()[max(0, node.lineno - 2) : node.lineno]))
    ]
    return Measure(
        "unexplained-excepts", "blind excepts without a reason beside them", len(listed), 0, True,
        offenders=listed,
    )  # fmt: skip


def _blind(module: Module) -> Iterator[ast.ExceptHandler | ast.Call]:
    """Handlers, and calls of `suppress`, that catch anything."""
    for node in module.nodes:
        if isinstance(node, ast.ExceptHandler):
            if node.type is None or _names(node.type) & BLIND:
                yield node
        elif (
            isinstance(node, ast.Call)
            and "suppress" in _names(node.func)
            and any(_names(argument) & BLIND for argument in node.args)
        ):
            yield node


def _says_why(line: str) -> bool:
    """True if a line has a comment of two words or more beside what a linter reads."""
    return len(_NOQA.sub("", line.partition("#")[2]).split()) > 1


def traps(files: Sequence[Module]) -> Measure:
    """Docstrings that begin a sentence with the formula "The trap:"."""
    listed = [
        module.at(text)
        for module in files
        for text in module.docstrings()
        if TRAP.search(str(text.value))
    ]
    return Measure("traps", '"The trap:" in docstrings', len(listed), 0, offenders=listed)


# -- names and imports ----------------------------------------------------------------------------


def is_vague(name: str) -> bool:
    """True if a name without its underscores is one of VAGUE."""
    return _plain(name) in VAGUE


def _plain(name: str) -> str:
    return name.strip("_").lower()


def bound_names(module: Module) -> Iterator[str]:
    """Stored names, arguments, functions and classes, each as often as it is bound."""
    for node in module.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, DEFINITIONS):
            yield node.name


def _names(expression: ast.expr) -> set[str]:
    """Names in an expression, those after a dot included: {"contextlib", "suppress"}."""
    return {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(expression)
        if isinstance(node, ast.Name | ast.Attribute)
    }


def importers_of(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """The modules that import each module. One loaded by name has an importer "by name" as well."""
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for module in modules.values():
        for target in _imported(module, modules):
            importers[target].add(module.name)
        for target in _loaded_by_name(module, modules):
            importers[target].add("by name")
    for name, sources in importers.items():
        sources.discard(name)
    return importers


def _imported(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    """Modules in its import statements. Of `from package import name`, the module `name` if it is
    one, else the package."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module)
            for alias in node.names:
                yield from [n for n in (f"{base}.{alias.name}", base) if n in modules][:1]


def _base(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    above = parts[: len(parts) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _loaded_by_name(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    """Modules whose dotted path is a string here, or begins with the constant part of an f-string.

    In an `__init__`, paths may be relative to its package.
    """
    for node in module.nodes:
        if isinstance(node, ast.JoinedStr) and node.values:
            first = node.values[0]
            if isinstance(first, ast.Constant) and str(first.value).endswith("."):
                folder = str(first.value)[:-1]
                yield from (name for name in modules if name.rpartition(".")[0] == folder)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            paths = [node.value, *([f"{module.name}.{node.value}"] * module.is_package)]
            yield from (path for path in paths if path in modules)


# -- output ---------------------------------------------------------------------------------------


def table(rows: Sequence[Measure], *, is_listed: bool) -> str:
    """The verdict, then a line for each measure, then the offenders if asked for."""
    checked = [row for row in rows if row.is_checked]
    broken = [row.key for row in checked if row.is_broken]
    verdict = f"{len(broken)} of {len(checked)} checked limits broken"
    lines = [f"{verdict}: {', '.join(broken)}" if broken else verdict, ""]
    lines.append(f"{'measure':<46}{'value':>8}{'limit':>8}  {'state':<12}detail")
    for row in rows:
        limit = "-" if row.limit is None else f"{row.limit:,}"
        line = f"{row.title:<46}{row.value:>8,}{limit:>8}  {_state(row):<12}{row.detail}"
        lines.append(line.rstrip())
    for row in rows if is_listed else ():
        if row.offenders:
            lines += ["", f"{row.title} ({row.key}):", *(f"  {text}" for text in row.offenders)]
    return "\n".join(lines) + "\n"


def _state(row: Measure) -> str:
    if row.limit is None:
        return ""
    if not row.is_broken:
        return "ok"
    return "broken" if row.is_checked else "above goal"


def with_limits(rows: Sequence[Measure], limits: Sequence[str]) -> list[Measure]:
    """The measures with limits such as "modules=420" set and checked. Raises ValueError."""
    by_key = {row.key: row for row in rows}
    for text in limits:
        key, _, number = text.partition("=")
        if key not in by_key or not number.isdecimal():
            names = ", ".join(by_key)
            raise ValueError(f"--limit {text}: must be NAME=NUMBER; the names are {names}")
        by_key[key] = replace(by_key[key], limit=int(number), is_checked=True)
    return list(by_key.values())


def _purpose(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def tree_map(root: Path) -> str:
    """Every folder of the package with its purpose and its modules, as Markdown."""
    package = root / "src" / "ergmeter"
    rows = ["| folder | holds | modules |", "| --- | --- | --- |"]
    for init in sorted(package.rglob("__init__.py")):
        folder = init.parent.relative_to(package).as_posix().replace(".", "ergmeter")
        names = sorted(path.stem for path in init.parent.glob("*.py") if path != init)
        rows.append(
            f"| `{folder}` | {_purpose(init)} | {', '.join(f'`{name}`' for name in names)} |"
        )
    return "\n".join(rows) + "\n"


def module_list(root: Path) -> str:
    """Every module with the first line of its docstring, as Markdown."""
    package = root / "src" / "ergmeter"
    rows = ["| module | does |", "| --- | --- |"]
    for path in sorted(package.rglob("*.py")):
        if path.name != "__init__.py":
            name = path.relative_to(package).with_suffix("").as_posix().replace("/", ".")
            rows.append(f"| `{name}` | {_purpose(path)} |")
    return "\n".join(rows) + "\n"


def with_sections(page: str, root: Path) -> str:
    """The page of the architecture with its generated sections written anew."""
    for name, text in (("map", tree_map(root)), ("modules", module_list(root))):
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        page = before + begin + text + rest[rest.index(f"<!-- end of {name} -->") :]
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the measures; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is broken")
    parser.add_argument("--list", action="store_true", help="list the offenders")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="NAME=NUMBER",
        help="the largest value allowed, which --check then enforces; may be repeated",
    )  # fmt: skip
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout; default: this one")
    parser.add_argument("--map", action="store_true", help="write the map into the docs")
    options = parser.parse_args(arguments)
    if options.map:
        page = options.root / "docs" / "architecture.md"
        page.write_text(with_sections(page.read_text(), options.root))
        return 0
    try:
        rows = with_limits(measures(options.root), options.limit)
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(table(rows, is_listed=options.list))
    return int(options.check and any(row.is_checked and row.is_broken for row in rows))


if __name__ == "__main__":
    sys.exit(main())
