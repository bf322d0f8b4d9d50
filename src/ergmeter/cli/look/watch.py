"""`erg watch`: a run while it is running."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ergmeter.cli.options import COUNT, PATH, flag
from ergmeter.cli.run_options import show_run, with_rules, with_training
from ergmeter.errors import FormatError
from ergmeter.signals import handled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from ergmeter.metrics.live.alert_rules import NotedAlert
    from ergmeter.metrics.live.frame import LiveFrame, RunWatcher

_LINES_EVERY_S = 10.0
_FRAMES_EVERY_S = 2.0
# Totals of the run so far read all of it: they get at most a twentieth of the time.
_TOTALS_EVERY_S = 5.0
_TOTALS_SHARE = 0.05


@click.command()
@click.argument("run", type=PATH, required=False, metavar="[RUN|DIRECTORY]")
@flag("--once", help="Show one page and end, also of a run that is over.")
@click.option("--rank", type=click.IntRange(min=0), help="Only steps of this rank.")
@with_training
@click.option("--steps", type=COUNT, help="Total number of steps, for the ETA.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.2),
    metavar="SECONDS",
    help="How often to look. [default: 2 on a terminal, else 10]",
)
@with_rules
def command(
    run: Path | None,
    once: bool,
    rank: int | None,
    training: int | None,
    steps: int | None,
    interval_s: float | None,
    alerts: tuple[str, ...],
) -> int:
    """Watch a run while it is running; q or Ctrl-C ends. Without RUN: the newest under runs/.

    Without a terminal, it prints a line now and then. When the run ends its card is shown. The
    alert rules are those of the run, or --alert. For a run that is over, --once lists the alerts
    that were raised and those that would have been. Of several trainings in one run the newest is
    shown, unless --training names another.
    """
    from rich.console import Console

    from ergmeter.metrics.live.alert_rules import parse_rules
    from ergmeter.metrics.live.frame import RunWatcher
    from ergmeter.views.run import watch

    parse_rules(alerts)  # raises if one is wrong
    path = _chosen(run)
    console = Console()
    watching = RunWatcher(path, rules=alerts, rank=rank, training=training, total_steps=steps)
    try:
        if once:
            console.print(watch.page(watching.look(totals=True), columns=console.width))
            return 0
        show = _on_terminal if console.is_terminal else _as_lines
        every_s = interval_s or (_FRAMES_EVERY_S if console.is_terminal else _LINES_EVERY_S)
        ended = show(console, _Looks(watching), every_s)
    except (FormatError, FileNotFoundError, NotADirectoryError) as error:
        if isinstance(error, FormatError) and path.exists():
            raise
        raise FormatError(f"the run {path} is gone: its directory was moved or removed") from error
    finally:
        watching.close()
    if ended is not None:
        from ergmeter.runlog.reader import Run

        ended_run = Run.open(path)
        show_run(console, ended_run.training(training) if training else ended_run)
    return 0


def _chosen(path: Path | None) -> Path:
    """The run, or the newest in a directory of runs."""
    from ergmeter.runlog.format import RUN_FILE, newest_run

    if path is None:
        return newest_run(Path("runs"))
    is_parent = path.is_dir() and not (path / RUN_FILE).exists()
    return newest_run(path) if is_parent else path


class _Looks:
    """Reads a run's frames; limits the time for totals over the whole run to a share."""

    def __init__(self, watching: RunWatcher) -> None:
        self._watching = watching
        self._due_s = 0.0

    def frame(self) -> LiveFrame:
        began_s = time.monotonic()
        totals = began_s >= self._due_s
        frame = self._watching.look(totals=totals)
        if not frame.is_going and not totals:
            frame = self._watching.look(totals=True)
        if totals:
            cost_s = time.monotonic() - began_s
            self._due_s = time.monotonic() + max(_TOTALS_EVERY_S, cost_s / _TOTALS_SHARE)
        return frame


def _on_terminal(console: Console, looks: _Looks, every_s: float) -> LiveFrame | None:
    """Draw until the run is over and return the last frame; None if the user quit."""
    from rich.live import Live

    from ergmeter.views.run import watch

    screen = Live(console=console, screen=True, auto_refresh=False)
    try:
        with handled(_leave, (signal.SIGTERM, signal.SIGHUP)), _keys() as key, screen as live:
            while True:
                frame = looks.frame()
                room = {"columns": console.width, "lines": console.height}
                live.update(watch.page(frame, **room), refresh=True)
                if not frame.is_going:
                    return frame
                if key(every_s) in ("q", "Q"):
                    return None
    except KeyboardInterrupt:
        return None


def _as_lines(_console: Console, looks: _Looks, every_s: float) -> LiveFrame | None:
    from ergmeter.views.run import watch

    printed: list[NotedAlert] = []
    replaced = 0
    try:
        while True:
            frame = looks.frame()
            if frame.replaced > replaced:
                replaced = frame.replaced
                printed.clear()  # they were alerts of the replaced run
                click.echo(watch.REPLACED)
            for number in new_alerts(frame, printed):
                click.echo(watch.alert_line(frame, number))
                printed.append(frame.alerts[number])
            click.echo(watch.line(frame))
            if not frame.is_going:
                return frame
            time.sleep(every_s)
    except KeyboardInterrupt:
        return None


def new_alerts(frame: LiveFrame, printed: list[NotedAlert]) -> list[int]:
    """Return the indices of alerts without a line. A late one may come between others; the run may
    report an alert, found here first, a little later, which is not a new one."""
    from ergmeter.metrics.live.alert_rules import is_same

    def has_line(alert: NotedAlert) -> bool:
        earlier = (p for p in printed if not p.was_told or not alert.was_told)
        return alert in printed or any(is_same(alert, p) for p in earlier)

    return [at for at, alert in enumerate(frame.alerts) if not has_line(alert)]


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key; restore the terminal at the end."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def key(wait_s: float) -> str:
        ready = select.select([fd], [], [], wait_s)[0]
        return os.read(fd, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(fd)
        yield key
    finally:
        # Where the terminal is gone there is nothing to restore.
        with suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _no_key(wait_s: float) -> str:
    time.sleep(wait_s)
    return ""


def _leave(number: int, _frame: object) -> None:
    """Turn a signal into SystemExit, so that the terminal is restored."""
    raise SystemExit(128 + number)
