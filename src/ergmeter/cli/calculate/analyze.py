"""`erg analyze`, also `calculate_training_metrics.py`: the metrics of a Trainium training."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.options.analyze import with_options
from ergmeter.cli.options.pages import check_page, check_writable, write_page
from ergmeter.cli.options.window import chosen_form

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ergmeter.neuron.job.request import AnalysisRequest
    from ergmeter.neuron.parts import Analysis
    from ergmeter.neuron.progress import AnalysisProgress, Event

_SCRIPT = "calculate_training_metrics.py"
_GRAPHS_IN_MARKDOWN = 20


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("earlier", nargs=-1, metavar="[FILES]...")
@with_options
def command(
    earlier: tuple[str, ...],
    compare: bool,
    form: str,
    as_json: bool,
    page: Path | None,
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

    form = chosen_form(form, as_json=as_json)
    if compare:
        _check_alone()
        check_page(page)
        _compare(earlier, form=form, page=page)
        return
    if earlier:
        raise UsageError(f"{earlier[0]!r} is no option; files are for --compare")
    request = _request(**given)
    path = output or ("training_metrics.json" if form == "text" else None)
    _check_shown(request, form=form, per_file=print_per_file, is_written=path is not None)
    if path is not None:
        _check_output(Path(path), request)
    check_page(page, [Path(path)] if path is not None else ())
    found = _analyze(request, compat=compat, is_quiet=form != "text", per_file=print_per_file)
    if path is not None:
        Path(path).write_text(_text(found.document) + "\n", encoding="utf-8")
    if form == "json":
        click.echo(_text(found.document))
    elif form == "md":
        click.echo(_markdown(found), nl=False)
    else:
        click.echo(f"\nMetrics saved to: {path}")
    if page is not None:
        from ergmeter.views.html.analyze_page import analysis_page

        write_page(page, analysis_page(found), is_told_apart=form != "text")


def main() -> None:
    """Entry point of `calculate_training_metrics.py`."""
    from ergmeter.cli.main import main as run

    run(command=command, program=_SCRIPT)


def _analyze(request: AnalysisRequest, *, compat: bool, is_quiet: bool, per_file: bool) -> Analysis:
    from ergmeter.neuron.progress import AnalysisProgress
    from ergmeter.views.analyze import console as view
    from ergmeter.views.analyze.graphs import files_section

    if compat:
        from ergmeter.compat.nki_llama.document import analyze_compat as analyze
    else:
        from ergmeter.neuron.analysis import analyze

    say: Callable[[str], None] = (lambda _: None) if is_quiet else click.echo
    with _progress() as bar:

        def watch(event: Event) -> None:
            if isinstance(event, AnalysisProgress):
                bar(event)
            for line in view.event_lines(event):
                say(line)

        found = analyze(request, watch)
    document = found.document
    sections = []
    if per_file:
        why = document.get("missing", {}).get("average_score")
        summary = document["nki_analysis"]["summary"]
        sections.append(files_section(found.files, summary, why=why, is_original=compat))
    if request.calculate_score:
        sections.append(view.score_section(document))
    sections.append(view.summary_section(document))
    for section in sections:
        for line in section:
            say(line)
    return found


def _request(**given: Any) -> AnalysisRequest:  # noqa: ANN401  click passes what it parsed
    from ergmeter.errors import UsageError
    from ergmeter.neuron.job.compile_cache import Choice, parse_time
    from ergmeter.neuron.job.request import AnalysisRequest
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
    return AnalysisRequest(**given, lnc=int(lnc) if lnc else None, choice=choice, baseline=baseline)


def _check_output(path: Path, request: AnalysisRequest) -> None:
    """Before the work: there is a place for it, and it is no file that is read."""
    from ergmeter.errors import UsageError

    check_writable(path, option="--output")
    read = (request.config, request.model_config, request.log_file, request.graph_runs)
    for one in filter(None, read):
        if path.exists() and Path(one).exists() and path.samefile(one):
            raise UsageError(f"--output {path} is what is read; name another file")


def _check_shown(request: AnalysisRequest, *, form: str, per_file: bool, is_written: bool) -> None:
    """Refuse options that would be left without effect."""
    from ergmeter.errors import UsageError

    if per_file and form != "text":
        raise UsageError(f"--print-per-file is for the console, and --format {form} is alone there")
    if request.detailed and form == "md" and not is_written:
        raise UsageError("--detailed is of the JSON: give its --output, or leave out --format md")


def _markdown(found: Analysis) -> str:
    from ergmeter.views.analyze.headline import title
    from ergmeter.views.analyze.markdown import markdown
    from ergmeter.views.analyze.parts import analysis_parts

    parts = analysis_parts(found.document, found.files, most_graphs=_GRAPHS_IN_MARKDOWN)
    return markdown(title(found.document), parts)


def _text(document: dict[str, Any]) -> str:
    from ergmeter.views.documents import finite

    return json.dumps(finite(document), indent=4, allow_nan=False)


@contextmanager
def _progress() -> Iterator[Callable[[AnalysisProgress], None]]:
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

        def show(progress: AnalysisProgress) -> None:
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
        if is_given and name not in ("earlier", "compare", "as_json", "form", "page"):
            said = "--compare goes with files, --json, --format and --html"
            raise UsageError(f"{said}; leave out {option.opts[0]}")


def _compare(paths: tuple[str, ...], *, form: str, page: Path | None) -> None:
    from ergmeter.neuron.compare import compare
    from ergmeter.neuron.outputs import read_outputs

    found = compare(read_outputs(paths))
    if form == "json":
        click.echo(json.dumps(found.document(), indent=1, allow_nan=False))
    elif form == "md":
        from ergmeter.views.analyze.compare import comparison_parts, title
        from ergmeter.views.analyze.markdown import markdown

        click.echo(markdown(title(found), comparison_parts(found)), nl=False)
    else:
        from rich.console import Console

        from ergmeter.views.analyze import compare as analyze_compare

        console = Console()
        for part in analyze_compare.parts(found):
            console.print(part)
    if page is not None:
        from ergmeter.views.html.analyze_page import comparison_page

        write_page(page, comparison_page(found), is_told_apart=form != "text")
