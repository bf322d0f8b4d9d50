"""`erg demo`: a real training, small enough for any machine, and its results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ergmeter.cli.measure.torch_workload import INTERRUPTED, workload
from ergmeter.cli.options import flag, path_option, progress_bar, with_default

if TYPE_CHECKING:
    from ergmeter.workloads.demo_training import DemoOutcome, DemoProgress

# How to see every metric of the run stands below the card already.
_NEXT = "your own command: erg record -- python train.py; what can be measured here: erg doctor"


@click.command()
@with_default("--seconds", type=click.IntRange(1, 3600), default=20, help="How long to train.")
@path_option("--out", help="The run directory to make. [default: runs/DATE-demo-xxxx]")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda", "mps"]),
    default="auto",
    help="Where to train. [default: auto, an accelerator where there is one]",
)
@flag("--json", "as_json", help="The whole summary as JSON, and no card.")
@flag("--quiet", help="Just the result: no progress, no hints.")
def command(seconds: int, out: Path | None, device: str, as_json: bool, quiet: bool) -> int:
    """Train a small Llama-like model for about 20 seconds and show what was measured.

    The text is made on the spot; nothing is downloaded. Ctrl-C ends it early and still shows what
    was measured until then. Needs torch.

    \b
    erg demo
    erg demo --seconds 60 --device cpu --out runs/first
    """
    demo = workload("demo_training", what="the demo")
    where = demo.device_named(device)
    parameters = demo.size_for(where).model.parameters
    what = f"training {parameters / 1e6:.1f} M parameters on {where.type} for {seconds} s"
    with progress_bar(what, quiet=quiet, has_line=True, refresh_per_second=4) as show:

        def tell(tick: DemoProgress) -> None:
            now = f"{tick.elapsed_s:3.0f} s  step {tick.steps}  loss {tick.loss:.2f}"
            show(tick.elapsed_s, seconds, now)

        outcome: DemoOutcome = demo.run(seconds, device=where, out=out, tell=tell)
    _show(outcome, as_json=as_json, hints=not quiet)
    return INTERRUPTED if outcome.interrupted else 0


def _show(outcome: DemoOutcome, *, as_json: bool, hints: bool) -> None:
    from rich.console import Console

    from ergmeter.cli.options import print_json
    from ergmeter.cli.run_options import show_run
    from ergmeter.metrics.summarize import summarize
    from ergmeter.runlog.reader import Run
    from ergmeter.views import documents

    run = Run.open(outcome.run)
    if as_json:
        print_json(documents.report(run, summarize(run)))
        return
    if hints:
        if outcome.held_out:
            course = ", then ".join(f"{loss:.2f}" for loss in outcome.held_out)
            click.echo(f"loss on tales it never saw: {course} (a blind guess at a byte is 5.55)")
        click.echo(_NEXT)
    show_run(Console(), run)
