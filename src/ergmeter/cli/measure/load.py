"""`erg load`: requests to an inference server, and what came of them."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.options import (
    COUNT,
    flag,
    path_option,
    progress_bar,
    repeated,
    warn,
    with_default,
    with_forms,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ergmeter.cli.options import Forms
    from ergmeter.load.client import Endpoint
    from ergmeter.load.level import LevelOutcome, LevelPlan
    from ergmeter.load.pacing import Closed, LevelLength, Open
    from ergmeter.load.request_body import Asking, FromFile, MadeUp

_LIMITS = ("ttft", "tpot", "e2e")


def _parse_numbers(option: str, text: str, kind: type[int] | type[float]) -> list[float]:
    """Parse numbers separated by commas, each above 0; duplicates are dropped."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise click.UsageError(
            f"{option} takes numbers with commas between; got {text!r}"
        ) from error
    if not all(0 < number < float("inf") for number in values):
        raise click.UsageError(f"{option} takes numbers above 0; got {text!r}")
    return list(dict.fromkeys(values))


def _parse_slo(text: str | None) -> dict[str, float]:
    """Parse limits in seconds by name: ttft=0.5,tpot=0.05."""
    limits = {}
    for part in text.split(",") if text else ():
        name, _, limit = part.partition("=")
        try:
            limits[name.strip()] = float(limit)
        except ValueError as error:
            raise click.UsageError(f"--slo takes ttft=0.5,tpot=0.05; got {part!r}") from error
    unknown = [name for name in limits if name not in _LIMITS]
    if unknown:
        raise click.UsageError(f"--slo takes limits of {', '.join(_LIMITS)}; got {unknown[0]!r}")
    return limits


def _parse_share(option: str, text: str) -> float:
    """Parse a share such as 5% or 0.05, from 0 to 1."""
    number, is_percent = text.removesuffix("%"), text.endswith("%")
    try:
        value = float(number) / (100 if is_percent else 1)
    except ValueError as error:
        raise click.UsageError(
            f"{option} takes a share such as 5% or 0.05; got {text!r}"
        ) from error
    if not 0 <= value <= 1:
        raise click.UsageError(f"{option} takes 0% to 100%, or 0 to 1; got {text!r}")
    return value


def _parse_headers(texts: tuple[str, ...], key: str) -> tuple[tuple[str, str], ...]:
    """Parse headers into pairs, the API key's first; $VARIABLE in a value is expanded."""
    pairs = [("Authorization", f"Bearer {key}")] if key else []
    for header in texts:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise click.UsageError(f"--header takes 'NAME: VALUE'; got {name!r}")
        filled = os.path.expandvars(value.strip())
        if not (name + filled).isprintable() or not (name + filled).isascii():
            raise click.UsageError(f"--header {name.strip()!r}: its value is not printable ASCII")
        pairs.append((name.strip(), filled))
    return tuple(pairs)


def _parse_body(text: str | None) -> dict[str, Any]:
    """Parse the JSON object of --body."""
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise click.UsageError(f"--body takes a JSON object ({error})") from error
    if not isinstance(fields, dict):
        raise click.UsageError(f"--body takes a JSON object; got {text!r}")
    return fields


def _hide_headers() -> None:
    """Mask header values in sys.argv: the run stores it, and a header may contain a key."""
    for index, word in enumerate(sys.argv):
        if word == "--header" and index + 1 < len(sys.argv):
            sys.argv[index + 1] = f"{sys.argv[index + 1].partition(':')[0]}: ***"
        elif word.startswith("--header="):
            sys.argv[index] = f"{word.partition(':')[0]}: ***"


@click.command()
@click.argument("url")
@click.option("--model", required=True, help="What the server calls its model.")
@click.option(
    "--concurrency",
    metavar="N[,N...]",
    help="Closed loop: N requests at a time. Each number makes a run. [default: 1]",
)
@click.option(
    "--rate",
    metavar="R[,R...]",
    help="Open loop: R requests a second on average (Poisson), however many are in flight.",
)
@click.option(
    "--requests",
    "requests_",
    type=COUNT,
    help="Requests that count in each run. [default: 10 x concurrency, at least 20]",
)
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Instead of --requests: all that begin within S seconds. [default with --rate: 30]",
)
@with_default(
    "--prompt-tokens",
    type=COUNT,
    default=128,
    help="Length of the made-up prompts, about this by the server's own count.",
)
@with_default(
    "--output-tokens",
    type=COUNT,
    default=128,
    help="The most tokens of an answer; exactly as many if the server allows it (ignore_eos).",
)
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help='Prompts of your own: lines of {"prompt": ...} or {"messages": [...]}.',
)
@with_default(
    "--endpoint",
    type=click.Choice(["chat", "completions"]),
    default="chat",
    help="/v1/chat/completions or /v1/completions.",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    help="Requests before those that count. [default: the concurrency; 4 with --rate]",
)
@with_default("--seed", type=int, default=0, help="Seed of prompts and arrivals.")
@click.option(
    "--slo", metavar="ttft=S,tpot=S,e2e=S", help="Limits in seconds, for goodput: any of the three."
)
@with_default(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    help="A request fails if nothing is received for this many seconds.",
)
@with_default(
    "--max-error-rate",
    default="5%",
    metavar="SHARE",
    help="Exit with 1 if more of a level's requests than this fail: 5% or 0.05.",
)
@repeated(
    "--header",
    "headers",
    metavar="'NAME: VALUE'",
    help="Sent with each request; $VARIABLE in it is expanded. May be repeated.",
)
@with_default(
    "--api-key-env",
    default="OPENAI_API_KEY",
    help="The environment variable that holds the key, if one is needed.",
)
@click.option("--body", metavar="JSON", help="Fields to add to each request: '{\"top_p\": 0.9}'.")
@flag("--no-energy", help="Do not read this machine's devices: for a server behind a tunnel.")
@path_option(
    "--out",
    help="The run directory to make; of several, the directory they go in."
    " [default: runs/DATE-load-...]",
)
@with_forms
def command(forms: Forms, **options: Any) -> int:  # noqa: ANN401  click passes what it parsed
    """Send requests to an inference server and measure how it serves them.

    URL is the base of any server that speaks OpenAI's protocol: vLLM, SGLang, transformers serve.
    Each concurrency or rate makes a run, with TTFT, TPOT, tokens/s and, if the server is on this
    machine, joules per token. A first request, in no run, finds the options that it accepts.
    Ctrl-C or SIGTERM ends it early and still shows what was measured until then.

    \b
    erg load http://localhost:8000 --model my-model --concurrency 1,4,16
    erg load https://host/v1 --model my-model --rate 2 --duration 60 --slo ttft=0.5,tpot=0.05
    """
    import asyncio

    from ergmeter import signals
    from ergmeter.load import level, request_body

    asking, prompts, why_no_energy = _what(options)
    paces = _paces(options)
    extents = [_extent(options, pace) for pace in paces]
    slo = _parse_slo(options["slo"])
    max_error_frac = _parse_share("--max-error-rate", options["max_error_rate"])
    _hide_headers()
    asking, prompts = asyncio.run(
        request_body.prepare(asking, prompts, prompt_tokens=options["prompt_tokens"])
    )
    done: list[tuple[LevelPlan, LevelOutcome]] = []
    interruption = level.Interruption()
    with signals.handled(interruption.on_signal):
        for pace, extent in zip(paces, extents, strict=True):
            warmup = options["warmup"]
            plan = level.LevelPlan(
                asking,
                prompts,
                pace,
                extent,
                warmup=pace.usual_warmup if warmup is None else warmup,
                slo=slo,
                why_no_energy=why_no_energy,
            )
            name = f"load-{pace.short}"
            out = _out(options["out"], pace, is_only=len(paces) == 1)
            with _progress(plan, quiet=forms.form == "json") as tell:
                outcome = level.run(plan, out=out, name=name, tell=tell, interruption=interruption)
            done.append((plan, outcome))
            if outcome.is_interrupted:
                break
        code = _show(done, forms, max_error_frac=max_error_frac)
    return 128 + interruption.signal if interruption.signal else code  # as a shell gives it


def _what(options: dict[str, Any]) -> tuple[Asking, MadeUp | FromFile, str]:
    """Return request options, prompts, and why this machine's energy is not read, if it isn't."""
    from ergmeter.load.client import RequestTarget, address, why_remote
    from ergmeter.load.request_body import Asking, MadeUp, read_prompts

    endpoint: Endpoint = options["endpoint"]
    where = address(options["url"], endpoint)
    headers = _parse_headers(options["headers"], os.environ.get(options["api_key_env"], ""))
    target = RequestTarget(where, headers, options["timeout_s"])
    asking = Asking(target, endpoint, options["model"], _parse_body(options["body"]), {})
    tokens = options["output_tokens"]
    if options["prompts_file"] is not None:
        prompts: MadeUp | FromFile = read_prompts(options["prompts_file"], output_tokens=tokens)
    else:
        prompts = MadeUp(options["prompt_tokens"], tokens, options["seed"])
    why = "--no-energy was given" if options["no_energy"] else why_remote(where.host)
    return asking, prompts, why


def _paces(options: dict[str, Any]) -> list[Closed | Open]:
    from ergmeter.load.pacing import Closed, Open

    if options["rate"] is not None and options["concurrency"] is not None:
        raise click.UsageError("--rate is an open loop, --concurrency a closed one: give one")
    if options["rate"] is not None:
        rates = _parse_numbers("--rate", options["rate"], float)
        return [Open(rate, options["seed"]) for rate in rates]
    counts = _parse_numbers("--concurrency", options["concurrency"] or "1", int)
    return [Closed(int(count)) for count in counts]


def _extent(options: dict[str, Any], pace: Closed | Open) -> LevelLength:
    from ergmeter.load.pacing import LevelLength

    if options["requests_"] is not None and options["duration_s"] is not None:
        raise click.UsageError("--requests and --duration both say when to end: give one")
    if options["requests_"] is not None or options["duration_s"] is not None:
        return LevelLength(options["requests_"], options["duration_s"])
    return pace.usual_length


def _out(path: Path | None, pace: Closed | Open, *, is_only: bool) -> Path:
    from ergmeter.runlog.identity import new_run_path

    if path is None:
        return new_run_path(f"load-{pace.short}")
    return path if is_only else path / pace.short


@contextmanager
def _progress(plan: LevelPlan, *, quiet: bool) -> Iterator[Callable[[LevelOutcome], None]]:
    """A progress bar on standard error."""
    with progress_bar(plan.pace.label, quiet=quiet, refresh_per_second=4, time="elapsed") as show:

        def tell(outcome: LevelOutcome) -> None:
            failed = f", {outcome.failed} failed" if outcome.failed else ""
            show(outcome.settled, plan.extent.requests, f"{outcome.settled} requests{failed}")

        yield tell


def _show(
    done: list[tuple[LevelPlan, LevelOutcome]], forms: Forms, *, max_error_frac: float
) -> int:
    """Print the results. Return the exit code: 1 if too many requests of a level failed."""
    from ergmeter.metrics.summarize import summarize
    from ergmeter.runlog.reader import Run
    from ergmeter.views.run import load as view

    levels = [
        view.LevelRow(plan, outcome, summarize(Run.open(outcome.run))) for plan, outcome in done
    ]
    forms.show(view.document(levels))
    complaints = (_complaint(plan, outcome, max_error_frac) for plan, outcome in done)
    return warn(filter(None, complaints))


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
