"""Programs that are forked from one process which has loaded what they import: `warm.py PLAN`.

PLAN is JSON: a list of programs, each with its `words` (a script and its arguments), `cwd` and
`imports` (modules that are loaded before it is forked, and stay loaded for those after it). With
`ranks` it is as many, each forked by the agent of torchrun, which tells them who they are; with
`nodes` (how many, this one's number, where the first is) they are those of one node.
They run one after the other. Prints a line of JSON for each: its `code`, and what it printed.

Each ends when what was registered to be done at its end is done: to take all modules apart then
would copy what it shares with the others.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any


def become(words: list[str]) -> None:
    """Run a script as Python does that is given its name."""
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")


def launch(words: list[str], ranks: int, nodes: tuple[int, int, str] | None) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    count, number, endpoint = nodes or (1, 0, "localhost:0")
    config = LaunchConfig(
        min_nodes=count, max_nodes=count, nproc_per_node=ranks, start_method="fork", run_id="warm",
        rdzv_endpoint=endpoint, rdzv_configs={"rank": number, "timeout": 900}, max_restarts=0,
        monitor_interval=0.1, rdzv_backend="static" if nodes else "c10d",
    )  # fmt: skip
    elastic_launch(config, become)(words)


class Ending:
    """With which code this process ends."""

    code = 0

    def __call__(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.code)


def main(plan: list[dict[str, Any]]) -> None:
    for program in plan:
        for name in program["imports"]:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # or a child copies all that it looks through for garbage
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if not child:
                os.chdir(program["cwd"])
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                words, ranks = program["words"], program.get("ranks", 0)
                launch(words, ranks, program.get("nodes")) if ranks else become(words)
                return
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            printed: dict[str, Any] = {"code": code}
            for name, file in (("out", out), ("err", err)):
                file.seek(0)
                printed[name] = file.read().decode()
        print(json.dumps(printed), flush=True)


if __name__ == "__main__":
    ending = Ending()
    atexit.register(ending)  # the first, which is done last
    gc.set_threshold(100_000, 50, 100)
    try:
        main(json.loads(sys.argv[1]))
    except SystemExit as ended:
        ending.code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    except BaseException:
        ending.code = 1
        raise
