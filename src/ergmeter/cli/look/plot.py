"""`erg plot`: charts of a run as files.

A file that is neither a PNG nor an SVG of ours is never replaced; a file that is replaced is named.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.options import (
    GroupedCommand,
    check_folder,
    check_writable,
    first_bytes,
    flag,
    path_option,
    warn,
    with_default,
)
from ergmeter.cli.run_options import with_run_and_settings
from ergmeter.errors import suggestion

if TYPE_CHECKING:
    from ergmeter.records import Flops
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.settings import Settings

# As in `views.charts.plots`, which would load numpy for `erg plot --help`; a test compares them.
KINDS = (
    *("phases", "power", "energy", "memory", "activity", "clocks", "temperature", "node", "disk"),
    *("network", "steps", "loss", "ladder", "waterfall", "time_spent", "energy_spent"),
    *("step_times", "roofline"),
)
_ALL = "all"
_FORMATS = ("svg", "png")
_PNG = b"\x89PNG\r\n\x1a\n"
_SVG, _OF_VEGA = b"<svg", b'class="marks"'
_HEAD_BYTES = 512


class _Kinds(click.Choice[str]):
    """The kinds of charts; an unknown one is an error with the closest match."""

    def convert(
        self,
        value: Any,  # noqa: ANN401  as click's
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:  # noqa: ANN401
        if value not in self.choices:
            near = suggestion(value, self.choices, "did you mean {}? There are", cutoff=0.5)
            kinds = ", ".join(self.choices)
            self.fail(f"no kind {value!r} of plot; {near or 'there are'} {kinds}", param, ctx)
        return value


class _OfOneRun(GroupedCommand):
    """A command on one run; several runs are an error that names `erg compare`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        left = super().parse_args(ctx, args)
        if ctx.args:
            runs = " ".join([str(ctx.params["run"]), *ctx.args])
            raise click.UsageError(
                f"a plot is of one run; `erg compare {runs} --html FILE` draws several"
            )
        return left


@click.command(cls=_OfOneRun, context_settings={"allow_extra_args": True})
@with_default(
    "--kind",
    "kinds",
    type=_Kinds([*KINDS, _ALL]),
    multiple=True,
    default=("power",),
    help="What to draw; may be repeated. `all`: every chart that can be drawn.",
)
@path_option(
    "-o",
    "--out",
    metavar="FILE|DIR",
    help="Required: FILE.svg or FILE.png; for several kinds a directory, made if missing, with a"
    " file named after each kind.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    help="Format of files in a directory. Default: svg.",
)
@flag("--dark", help="On a dark background.")
@with_run_and_settings
def command(
    settings: Settings,
    flops: tuple[Flops, ...],
    run: Run,
    kinds: tuple[str, ...],
    out: Path | None,
    form: str | None,
    dark: bool,
) -> int:
    """Draw charts of a run into files, without a browser. Without RUN: the newest under runs/.

    The charts are those of `erg report --html`. One that can't be drawn is not written, and the
    reason is printed. Existing PNGs and SVGs of `erg plot` are replaced. Needs pip install
    'ergmeter[html]'.

    \b
    erg plot runs/a --kind waterfall -o waterfall.svg
    erg plot runs/a --kind all -o plots
    """
    from ergmeter.metrics.summarize import evidence_of, summary_of
    from ergmeter.views.charts.plots import charts, converter, plot, reasons

    wanted = KINDS if _ALL in kinds else tuple(dict.fromkeys(kinds))
    if out is None:
        where = f"-o {wanted[0]}.svg (or .png)" if len(wanted) == 1 else "-o DIR"
        raise click.UsageError(f"say where the plot goes: {where}")
    targets = _targets(out, wanted, form)
    for path in targets.values():
        _check_target(path)
    converter()
    evidence = evidence_of(run, settings, flops=flops)
    summary = summary_of(evidence)
    all_charts = charts(evidence, summary, wanted)
    drawable = [chart for chart in all_charts if chart.spec is not None]
    if drawable and out not in targets.values():
        out.mkdir(parents=True, exist_ok=True)
    for chart in drawable:
        path = targets[chart.id]
        theme = "dark" if dark else "light"
        kind = path.suffix.lower().removeprefix(".")
        _write(path, plot(chart, run.name, form=kind, theme=theme))
    warn(reasons(all_charts))
    if not drawable and _ALL not in kinds:
        others = [chart.id for chart in charts(evidence, summary, KINDS) if chart.spec is not None]
        alternatives = f"--kind {', '.join(others)}" if others else "no kind at all"
        warn([f"this run has plots for: {alternatives}"])
    is_enough = bool(drawable) if _ALL in kinds else len(drawable) == len(wanted)
    return 0 if is_enough else 1


def _targets(out: Path, kinds: tuple[str, ...], form: str | None) -> dict[str, Path]:
    """Return the file of each kind: the one named, or one in a directory, named after it."""
    named = out.suffix.lower().removeprefix(".")
    is_picture = named in _FORMATS
    if out.is_dir() or (len(kinds) > 1 and not is_picture):
        check_folder(out, option="-o")
        return {kind: out / f"{kind}.{form or _FORMATS[0]}" for kind in kinds}
    if len(kinds) > 1:
        raise click.UsageError(
            f"-o {out}: {len(kinds)} plots do not go into one file; name a directory"
        )
    if not is_picture:
        raise click.UsageError(f"{out} is neither .svg nor .png: the name says what it will be")
    if form not in (None, named):
        raise click.UsageError(f"-o {out} is not --format {form}: the name says what it will be")
    check_writable(out, option="-o")
    return {kinds[0]: out}


def _check_target(path: Path) -> None:
    """Refuse to replace a file that is neither a PNG nor an SVG of `erg plot`."""
    if path.is_dir():
        raise click.UsageError(f"-o: {path} is a directory; name another place")
    head = first_bytes(path, _HEAD_BYTES)
    is_ours = head.startswith(_PNG) or (head.startswith(_SVG) and _OF_VEGA in head)
    if head and not is_ours:
        raise click.UsageError(
            f"-o: {path} exists and is not a plot, so it is not replaced; name another"
        )


def _write(path: Path, image: bytes) -> None:
    is_replaced = path.is_file() and path.stat().st_size > 0
    path.write_bytes(image)
    click.echo(f"{path} (replaced)" if is_replaced else path)
