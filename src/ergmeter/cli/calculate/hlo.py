"""`erg hlo`: what compiled modules multiply, from the files that XLA and Neuron leave behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from ergmeter.cli.options import Forms, flag, with_forms, without_effect
from ergmeter.errors import FormatError, UsageError


@click.command()
@click.argument(
    "paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path)
)
@click.option(
    "--by",
    type=click.Choice(["module", "op", "computation", "kernel"]),
    help="What to list. Default: op for one file, module for several.",
)
@without_effect("--processes")
@without_effect("--no-memo", is_flag=True)
@with_forms
@flag("-v", "--verbose", help="Also print which reader was used.")
def command(paths: tuple[Path, ...], by: str | None, forms: Forms, verbose: bool) -> None:
    """Count the multiply-accumulates of HLO modules: files, or directories with all below them.

    A module is counted as it is executed: loops times their trip count, calls at each call site,
    conditionals by their costliest branch. NKI kernels count with the MACs that they state; those
    that state none are listed as unknown. Complex products count as 4 real ones; Cholesky
    decompositions, triangular solves and FFTs are listed and not counted. Files may be packed with
    gzip.
    """
    from rich.console import Console
    from rich.progress import track

    from ergmeter.hlo import count_files
    from ergmeter.views.calculate import hlo

    files, left_out = _files(paths)
    stderr = Console(stderr=True)
    is_silent = len(files) < 2 or not stderr.is_terminal
    counting = count_files(files)
    counted = list(
        track(counting, "reading", len(files), console=stderr, transient=True, disable=is_silent)
    )
    if forms.form != "json" and not any(module.count for module in counted):
        raise FormatError("; ".join(hlo.failures(counted, in_table=False)))
    by = by or ("op" if len(files) == 1 else "module")
    console = Console(soft_wrap=not Console().is_terminal)
    forms.show(hlo.document(counted, by=by, left_out=left_out, verbose=verbose), console=console)
    if any(module.error for module in counted):
        raise click.exceptions.Exit(1)


def _files(paths: tuple[Path, ...]) -> tuple[list[Path], dict[str, int]]:
    """Return the module files of these paths, each once, and counts of others by reason."""
    from ergmeter.hlo.files import SHOWN_NAMES, module_files

    files: dict[Path, None] = {}
    left_out: Counter[str] = Counter()
    for path in paths:
        if path.is_dir():
            modules, others = module_files(path)
            left_out.update(others)
            if not modules:
                raise UsageError(f"no HLO modules in {path}; they are named {SHOWN_NAMES}")
            files.update(dict.fromkeys(modules))
        else:
            files[path] = None
    return list(files), dict(left_out)
