"""Short forms of click's options, which the commands declare theirs with."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

PATH = click.Path(path_type=Path)
COUNT = click.IntRange(min=1)

flag = partial(click.option, is_flag=True)
path_option = partial(click.option, type=PATH)
repeated = partial(click.option, multiple=True)
with_default = partial(click.option, show_default=True)
