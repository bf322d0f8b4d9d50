"""One rank of several, told by the environment: `rank.py RUN STEPS TOKENS TRUTH_DIR [FLAG]...`.

Flags: `torch` (steps that wait for each other in an all-reduce of gloo's), `layout=..`,
`micro=N` (gradient accumulation), `pair` (steps of two ranks begin when both measure), `die=RANK`
(that one of the two kills itself half way).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ergmeter import Meter

STEP_S = 0.05


class Group:
    """What the ranks wait for together, if they do."""

    def __init__(self, *, with_torch: bool) -> None:
        self._gradient: Any = None
        if with_torch:
            import torch
            import torch.distributed as dist

            dist.init_process_group("gloo")
            self._gradient = torch.ones(1000)

    def meet(self) -> None:
        if self._gradient is not None:
            import torch.distributed as dist

            dist.all_reduce(self._gradient)

    def end(self) -> None:
        if self._gradient is not None:
            import torch.distributed as dist

            dist.destroy_process_group()


def main(run: str, steps: int, tokens: int, truth: Path, *flags: str) -> None:
    options = dict(flag.partition("=")[::2] for flag in flags)
    rank, micro = int(os.environ["RANK"]), int(options.get("micro", 1))
    group = Group(with_torch="torch" in options)
    with Meter(run, probes=["nvml", "process"], layout=options.get("layout")) as meter:
        group.meet()
        if "pair" in options:
            (truth / f"{rank}.measures").touch()
            while not (truth / f"{1 - rank}.measures").exists():
                time.sleep(0.01)
        start_ns, amids_ns = time.monotonic_ns(), []
        for number in range(steps):
            if options.get("die") == str(rank) and number == steps // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            with meter.step() as step:
                amids_ns.append(time.monotonic_ns())
                for _ in range(micro):
                    time.sleep(STEP_S / micro)
                    step.micro_step(tokens)
                group.meet()
        end_ns = time.monotonic_ns()
        said = {"outside_ns": [start_ns, end_ns], "inside_ns": [amids_ns[0], amids_ns[-1]]}
        (truth / f"{rank}.json").write_text(json.dumps(said))
        group.meet()
    group.end()


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), *sys.argv[5:])
