"""`erg serve`: a directory of runs in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from ergmeter.cli.options import PATH, flag, with_default
from ergmeter.errors import PluginError


@click.command()
@click.argument("directory", type=PATH, default=Path("runs"))
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port to listen on. Default: any free port.",
)
@with_default(
    "--host",
    default="127.0.0.1",
    help="Address to listen on; others than loopback need a token.",
)
@click.option(
    "--token",
    envvar="ERGMETER_TOKEN",
    help="Visitors need this token (16 characters or more). Default: generated and printed if"
    " others can reach the address, else none.",
)
@flag("--open", "is_to_open", help="Also open it in the browser.")
def command(directory: Path, port: int, host: str, token: str | None, is_to_open: bool) -> None:
    """Show the runs in DIRECTORY (default: runs/) as web pages, live while they are written.

    A list with search, sort and filters; a page for each run that follows it and becomes its
    report; comparisons, bench matrices and energy ledgers. Nothing is written, and nothing outside
    DIRECTORY is read. Listens on this machine alone unless --host says otherwise. Ctrl-C stops it.
    """

    try:
        from ergmeter.views.serve import app
    except ImportError as error:
        raise PluginError(f"erg serve needs {error.name}: pip install 'ergmeter[serve]'") from error
    address = app.ListenAddress(host, port, token)
    app.serve(directory, address, say=click.echo, is_to_open=is_to_open)
