"""`erg analyze`, also `calculate_training_metrics.py`: the metrics of a Trainium training."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ergmeter.neuron.request import Request
    from ergmeter.neuron.watch import Event, Progress

_INPUTS = [
    click.option("--config", metavar="YAML", help="The training's YAML. Needed."),
    click.option("--model-config", metavar="JSON", help="The model's config.json. Needed."),
    click.option(
        "--compile-dir",
        metavar="DIR",
        help="Neuron compile cache, or a part of it.  [default: /home/ubuntu/neuron_cache]",
    ),
    click.option("--log-file", metavar="LOG", help="The training's log, for its throughput."),
    click.option("--batch-size", type=int, help="Global batch size, over the YAML's."),
    click.option("--seq-len", type=int, help="Tokens of a sequence, over the YAML's."),
    click.option("--throughput", type=float, help="Sequences per second, over the log's."),
    click.option("--num-nodes", type=int, help="Over trainer.num_nodes; 1 if neither is given."),
    click.option("--devices", type=int, help="Devices of a node, over trainer.devices."),
    click.option(
        "--lnc",
        type=click.Choice(["1", "2"]),
        help="Physical cores in a device.  [default: 2 on trn2 and trn3, else 1]",
    ),
    click.option("--dtype", help="What products are computed in, over precision.type."),
    click.option(
        "--hw-backend",
        type=click.Choice(["trn1", "trn2", "trn3", "inf2"]),
        default="trn1",
        show_default=True,
        help="The family of instances.",
    ),
    click.option(
        "--convention",
        help="Whose count of FLOPs; `neuron` is the original's, `erg conventions` explains them."
        "  [default: exact]",
    ),
]
_CHOICE = [
    click.option("--compiler-version", multiple=True, help="Only its graphs. May be repeated."),
    click.option("--module", multiple=True, help="Only this MODULE_... May be repeated."),
    click.option("--since", help="Only graphs written since that time."),
    click.option("--until", help="Only graphs written until that time."),
    click.option("--modules-from-log", is_flag=True, help="Only modules that the log names."),
    click.option(
        "--graph-runs", metavar="FILE", help="How often each graph ran: lines `MODULE_... 1234`."
    ),
    click.option("--processes", type=click.IntRange(min=1), help="For counting graphs."),
]
_SCORE = [
    click.option("--calculate-score", is_flag=True, help="The training score, with its factors."),
    click.option("--per-file-scores", is_flag=True, help="A score for each graph."),
    click.option(
        "--base-mfu", type=float, default=50.0, show_default=True, help="Baseline MFU in percent."
    ),
    click.option(
        "--base-throughput",
        type=float,
        default=100.0,
        show_default=True,
        help="Baseline sequences/s.",
    ),
    click.option(
        "--loss-improvement",
        type=float,
        default=1.0,
        show_default=True,
        help="Baseline loss / achieved loss.",
    ),
    click.option(
        "--convergence-rate",
        type=float,
        default=1.0,
        show_default=True,
        help="Baseline steps / achieved steps.",
    ),
    click.option(
        "--score-offset",
        type=click.Choice(["1", "0.1"]),
        default="1",
        show_default=True,
        help="The score's NKI factor is this plus the ratio; 0.1 since 2025-06-26.",
    ),
]
_OUTPUT = [
    click.option(
        "--output",
        metavar="JSON",
        help="Where to write.  [default: training_metrics.json; with --json: nowhere]",
    ),
    click.option("--detailed", is_flag=True, help="Graphs one by one in the JSON."),
    click.option("--print-per-file", is_flag=True, help="Graphs one by one on the console."),
    click.option("--json", "as_json", is_flag=True, help="The document to stdout, nothing else."),
    click.option(
        "--compat", is_flag=True, help="The original's numbers of 2025-06-12, faults included."
    ),
    click.option(
        "--compare", is_flag=True, help="Compare earlier outputs: --compare A.json B.json"
    ),
]


def _with(options: list[Any]) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:  # noqa: ANN401  click's decorators are untyped functions
        for option in reversed(options):
            function = option(function)
        return function

    return add


_SCRIPT = "calculate_training_metrics.py"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("earlier", nargs=-1, metavar="[FILES]...")
@_with([*_INPUTS, *_CHOICE, *_SCORE, *_OUTPUT])
def command(
    earlier: tuple[str, ...],
    compare: bool,
    as_json: bool,
    compat: bool,
    output: str | None,
    print_per_file: bool,
    **given: Any,  # noqa: ANN401  what `_request` takes
) -> None:
    """Calculate MFU, the NKI share of compiled graphs and a score of a Trainium training.

    From its YAML, its model's config.json, its log and its compile cache; no Neuron device or SDK
    is needed. Takes the flags of nki-llama's calculate_training_metrics.py and writes its keys.
    """
    from ergmeter.errors import UsageError

    if compare:
        _check_alone()
        _compare(earlier, as_json=as_json)
        return
    if earlier:
        raise UsageError(f"{earlier[0]!r} is no option; files are for --compare")
    request = _request(**given)
    path = output or (None if as_json else "training_metrics.json")
    if path is not None:
        _check_writable(path)
    document = _analyze(request, compat=compat, as_json=as_json, per_file=print_per_file)
    if path is not None:
        _write(path, document)
    if as_json:
        click.echo(_text(document))
    else:
        click.echo(f"\nMetrics saved to: {path}")


def main() -> None:
    """Entry point of `calculate_training_metrics.py`."""
    from ergmeter.cli.main import main as run

    run(command=command, program=_SCRIPT)


def _analyze(request: Request, *, compat: bool, as_json: bool, per_file: bool) -> dict[str, Any]:
    from ergmeter.neuron.watch import Progress
    from ergmeter.views import analyze as view
    from ergmeter.views.analyze_files import files_section

    if compat:
        from ergmeter.neuron.compat import analyze_compat as analyze
    else:
        from ergmeter.neuron.analysis import analyze

    say: Callable[[str], None] = (lambda _: None) if as_json else click.echo
    with _progress() as bar:

        def watch(event: Event) -> None:
            if isinstance(event, Progress):
                bar(event)
            for line in view.event_lines(event):
                say(line)

        document, files = analyze(request, watch)
    sections = []
    if per_file:
        why = document.get("missing", {}).get("average_score")
        summary = document["nki_analysis"]["summary"]
        sections.append(files_section(files, summary, why=why, is_original=compat))
    if request.calculate_score:
        sections.append(view.score_section(document))
    sections.append(view.summary_section(document))
    for section in sections:
        for line in section:
            say(line)
    return document


def _request(**given: Any) -> Request:  # noqa: ANN401  click passes what it parsed
    from ergmeter.errors import UsageError
    from ergmeter.neuron.cache import Choice, parse_time
    from ergmeter.neuron.request import Request
    from ergmeter.neuron.score import Baseline
    from ergmeter.records import dtype_named

    for name, what in (("config", "training's YAML"), ("model_config", "model's config.json")):
        if given[name] is None:
            raise UsageError(f"the {what} is needed: pass --{name.replace('_', '-')}")
    since, until = given.pop("since"), given.pop("until")
    choice = Choice(
        compilers=given.pop("compiler_version"),
        modules=given.pop("module"),
        since=parse_time(since, option="--since") if since else None,
        until=parse_time(until, option="--until") if until else None,
    )
    baseline = Baseline(
        mfu_percent=given.pop("base_mfu"),
        throughput_seq_per_s=given.pop("base_throughput"),
        loss_improvement=given.pop("loss_improvement"),
        convergence_rate=given.pop("convergence_rate"),
        offset=float(given.pop("score_offset")),
    )
    lnc = given.pop("lnc")
    given["dtype"] = dtype_named(given["dtype"])
    return Request(**given, lnc=int(lnc) if lnc else None, choice=choice, baseline=baseline)


def _check_writable(path: str) -> None:
    """Before the work, not after it."""
    from pathlib import Path

    from ergmeter.errors import UsageError

    if Path(path).is_dir():
        raise UsageError(f"--output {path}: is a directory; it takes a file")
    folder = Path(path).parent
    if not folder.is_dir():
        what = "is no directory" if folder.exists() else "does not exist"
        raise UsageError(f"--output {path}: the directory {folder} {what}")


def _write(path: str, document: dict[str, Any]) -> None:
    from pathlib import Path

    Path(path).write_text(_text(document) + "\n", encoding="utf-8")


def _text(document: dict[str, Any]) -> str:
    from ergmeter.views.documents import finite

    return json.dumps(finite(document), indent=4, allow_nan=False)


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A bar on the terminal's error stream, where there is one."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    # Lines on the same terminal are printed above the bar; a pipe is left alone.
    with Bar(
        console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty()
    ) as bar:
        tasks: dict[str, Any] = {}

        def show(progress: Progress) -> None:
            if progress.what not in tasks:
                tasks[progress.what] = bar.add_task(progress.what, total=progress.total or None)
            goes_on = not progress.total or progress.done < progress.total
            bar.update(tasks[progress.what], completed=progress.done, visible=goes_on)

        yield show


def _check_alone() -> None:
    """Refuse options that --compare would leave without effect."""
    from click.core import ParameterSource

    from ergmeter.errors import UsageError

    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in ("earlier", "compare", "as_json"):
            raise UsageError(f"--compare goes with files and --json; leave out {option.opts[0]}")


def _compare(paths: tuple[str, ...], *, as_json: bool) -> None:
    from rich.console import Console

    from ergmeter.neuron.compare import compare
    from ergmeter.neuron.outputs import read_outputs
    from ergmeter.views import analyze_compare

    found = compare(read_outputs(paths))
    if as_json:
        click.echo(json.dumps(found.document(), indent=1, allow_nan=False))
        return
    console = Console()
    for part in analyze_compare.parts(found):
        console.print(part)
