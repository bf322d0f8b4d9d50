"""`erg load`: requests to an inference server, and what came of them."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.options import load as options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ergmeter.load.client import Endpoint
    from ergmeter.load.level import LevelOutcome, LevelPlan
    from ergmeter.load.pacing import Closed, LevelLength, Open
    from ergmeter.load.preflight import Asking
    from ergmeter.load.prompts import FromFile, MadeUp

_OPEN_LOOP_S = 30.0
_OPEN_LOOP_WARMUP = 4


@click.command()
@click.argument("url")
@click.option("--model", required=True, help="What the server calls its model.")
@click.option(
    "--concurrency",
    metavar="N[,N...]",
    help="Closed loop: so many requests at a time. Several make a run each. [default: 1]",
)
@click.option(
    "--rate",
    metavar="R[,R...]",
    help="Open loop: so many requests a second on average (Poisson), however many are under way.",
)
@click.option(
    "--requests",
    "requests_",
    type=click.IntRange(min=1),
    help="How many requests count in each run. [default: 10 for each at a time, at least 20]",
)
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Or: all that begin within S seconds. [default with --rate: 30]",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Length of the made-up prompts, by the server's own count as near as can be.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="The most tokens of an answer; where the server allows it (ignore_eos), just as many.",
)
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help='Prompts of your own: lines of {"prompt": ...} or {"messages": [...]}.',
)
@click.option(
    "--endpoint",
    type=click.Choice(["chat", "completions"]),
    default="chat",
    show_default=True,
    help="/v1/chat/completions or /v1/completions.",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    help="Requests before those that count. [default: as many as at a time; 4 with --rate]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and arrivals.")
@click.option(
    "--slo", metavar="ttft=S,tpot=S,e2e=S", help="Limits in seconds, for goodput: any of the three."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="A request has failed when nothing came for so many seconds.",
)
@click.option(
    "--max-error-rate",
    default="5%",
    show_default=True,
    metavar="SHARE",
    help="Exit with 1 if more of a level's requests than this fail: 5% or 0.05.",
)
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="'NAME: VALUE'",
    help="Sent with each request; $VARIABLE in it is filled in. May be repeated.",
)
@click.option(
    "--api-key-env",
    default="OPENAI_API_KEY",
    show_default=True,
    help="The environment variable that holds the key, if one is needed.",
)
@click.option("--body", metavar="JSON", help="Fields to add to each request: '{\"top_p\": 0.9}'.")
@click.option(
    "--no-energy", is_flag=True, help="Leave this machine's devices unread: for a tunnel."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The run directory to make; of several, the directory they go in."
    " [default: runs/DATE-load-...]",
)
@click.option("--json", "as_json", is_flag=True, help="What came of it, as JSON.")
def command(**given: Any) -> int:  # noqa: ANN401  click passes what it parsed
    """Send requests to an inference server and say how it served them.

    URL is the base of any server that speaks OpenAI's protocol: vLLM, SGLang, transformers serve.
    Each number at a time, or a second, makes a run, with TTFT, TPOT, tokens/s and, where the server
    is on this machine, joules per token. A first request, in no run, finds out what it understands.
    Ctrl-C or SIGTERM ends it early and still shows what was measured until then.

    \b
    erg load http://localhost:8000 --model my-model --concurrency 1,4,16
    erg load https://host/v1 --model my-model --rate 2 --duration 60 --slo ttft=0.5,tpot=0.05
    """
    import asyncio

    from ergmeter.load import level, preflight

    asking, prompts, why_no_energy = _what(given)
    paces = _paces(given)
    extents = [_extent(given, pace) for pace in paces]
    slo = options.slo(given["slo"])
    max_error_frac = options.share("--max-error-rate", given["max_error_rate"])
    options.hide_headers()
    asking, prompts = asyncio.run(
        preflight.prepare(asking, prompts, prompt_tokens=given["prompt_tokens"])
    )
    done: list[tuple[LevelPlan, LevelOutcome]] = []
    with level.Interruption() as interruption:
        for pace, extent in zip(paces, extents, strict=True):
            warmup = given["warmup"]
            plan = level.LevelPlan(
                asking,
                prompts,
                pace,
                extent,
                warmup=_usual_warmup(pace) if warmup is None else warmup,
                slo=slo,
                why_no_energy=why_no_energy,
            )
            name = f"load-{_short(pace)}"
            out = _out(given["out"], pace, is_only=len(paces) == 1)
            with _progress(plan, quiet=given["as_json"]) as tell:
                outcome = level.run(plan, out=out, name=name, tell=tell, interruption=interruption)
            done.append((plan, outcome))
            if outcome.is_interrupted:
                break
        code = _show(done, max_error_frac=max_error_frac, as_json=given["as_json"])
    return 128 + interruption.signal if interruption.signal else code  # as a shell gives it


def _what(given: dict[str, Any]) -> tuple[Asking, MadeUp | FromFile, str]:
    """Who is asked what; and why this machine's devices are not the server's, if they are not."""
    from ergmeter.load.client import RequestTarget, address, why_remote
    from ergmeter.load.preflight import Asking
    from ergmeter.load.prompts import MadeUp, read_prompts

    endpoint: Endpoint = given["endpoint"]
    where = address(given["url"], endpoint)
    headers = options.headers(given["headers"], os.environ.get(given["api_key_env"], ""))
    target = RequestTarget(where, headers, given["timeout_s"])
    asking = Asking(target, endpoint, given["model"], options.body(given["body"]), {})
    tokens = given["output_tokens"]
    if given["prompts_file"] is not None:
        prompts: MadeUp | FromFile = read_prompts(given["prompts_file"], output_tokens=tokens)
    else:
        prompts = MadeUp(given["prompt_tokens"], tokens, given["seed"])
    why = "--no-energy was given" if given["no_energy"] else why_remote(where.host)
    return asking, prompts, why


def _paces(given: dict[str, Any]) -> list[Closed | Open]:
    from ergmeter.load.pacing import Closed, Open

    if given["rate"] is not None and given["concurrency"] is not None:
        raise click.UsageError("--rate is an open loop, --concurrency a closed one: give one")
    if given["rate"] is not None:
        rates = options.numbers("--rate", given["rate"], float)
        return [Open(rate, given["seed"]) for rate in rates]
    return [
        Closed(int(n)) for n in options.numbers("--concurrency", given["concurrency"] or "1", int)
    ]


def _extent(given: dict[str, Any], pace: Closed | Open) -> LevelLength:
    from ergmeter.load.pacing import Closed, LevelLength

    if given["requests_"] is not None and given["duration_s"] is not None:
        raise click.UsageError("--requests and --duration both say when to end: give one")
    if given["requests_"] is not None or given["duration_s"] is not None:
        return LevelLength(given["requests_"], given["duration_s"])
    if isinstance(pace, Closed):
        return LevelLength(requests=max(20, 10 * pace.concurrency))
    return LevelLength(duration_s=_OPEN_LOOP_S)


def _usual_warmup(pace: Closed | Open) -> int:
    from ergmeter.load.pacing import Closed

    return pace.concurrency if isinstance(pace, Closed) else _OPEN_LOOP_WARMUP


def _short(pace: Closed | Open) -> str:
    from ergmeter.load.pacing import Closed

    return f"c{pace.concurrency}" if isinstance(pace, Closed) else f"r{pace.rate_per_s:g}"


def _out(given: Path | None, pace: Closed | Open, *, is_only: bool) -> Path:
    from ergmeter.runlog.identity import new_run_path

    if given is None:
        return new_run_path(f"load-{_short(pace)}")
    return given if is_only else given / _short(pace)


@contextmanager
def _progress(plan: LevelPlan, *, quiet: bool) -> Iterator[Callable[[LevelOutcome], None]]:
    """A bar on standard error, for somebody who looks on."""
    if quiet or not sys.stderr.isatty():
        yield lambda _outcome: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(30), TextColumn("{task.fields[now]}"))
    console = Console(stderr=True)
    # Drawing takes processor time from what is measured, so: seldom.
    with Progress(
        *columns, TimeElapsedColumn(), console=console, refresh_per_second=4, transient=True
    ) as bar:
        task = bar.add_task(plan.pace.label, total=plan.extent.requests, now="")

        def tell(outcome: LevelOutcome) -> None:
            failed = f", {outcome.failed} failed" if outcome.failed else ""
            bar.update(task, completed=outcome.settled, now=f"{outcome.settled} requests{failed}")

        yield tell


def _show(
    done: list[tuple[LevelPlan, LevelOutcome]], *, max_error_frac: float, as_json: bool
) -> int:
    """Print what was measured. The exit code: 1 if too many requests of a level failed."""
    import json

    from ergmeter.metrics.summarize import summarize
    from ergmeter.runlog.reader import Run
    from ergmeter.views.run import load as view

    levels = [
        view.LevelRow(plan, outcome, summarize(Run.open(outcome.run))) for plan, outcome in done
    ]
    if as_json:
        click.echo(json.dumps(view.document(levels), indent=1, allow_nan=False))
    else:
        from rich.console import Console

        view.show(Console(), levels)
    complaints = [_complaint(plan, outcome, max_error_frac) for plan, outcome in done]
    for complaint in filter(None, complaints):
        click.echo(f"erg: {complaint}", err=True)
    return 1 if any(complaints) else 0


def _complaint(plan: LevelPlan, outcome: LevelOutcome, max_error_frac: float) -> str:
    """Why a level is not a success; empty if it is one, or if it was ended early."""
    label = plan.pace.label
    if not outcome.answered and not outcome.is_interrupted:
        kind, _ = outcome.failures.most_common(1)[0] if outcome.failed else ("none sent", 0)
        return f"{label}: no request was answered: {kind} ({outcome.examples.get(kind, '')})"
    if outcome.failed_frac > max_error_frac:
        return (
            f"{label}: {outcome.failed} of {outcome.settled} requests failed"
            f" ({100 * outcome.failed_frac:.3g} %), more than --max-error-rate"
            f" {100 * max_error_frac:g}%"
        )
    return ""
