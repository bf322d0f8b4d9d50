"""`erg train` of a model whose steps are slow: after some quick ones, one of them takes long.

    slow_steps.py KIND QUICK LENGTH WARM_UP_S [options of erg train]

KIND is `sleep`, for so many seconds, in the forward pass; `optimizer`, the same in the optimizer,
which is not waited for; `torch`, the eigenvalues of a matrix of that size, which is one call into
C; or `never`. The file `slow` has the process's number from then on, and `over` is
made after it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from ergmeter.cli.main import main
from ergmeter.workloads.sft import progress

kind, quick, length, warm_up_s = sys.argv[1], *map(float, sys.argv[2:5])
progress.WARM_UP_S = warm_up_s
slow: Any = torch.optim.AdamW if kind == "optimizer" else LlamaForCausalLM
method = "step" if kind == "optimizer" else "forward"
quick_one, calls = getattr(slow, method), 0


def slow_one(self: Any, *args: Any, **named: Any) -> Any:
    global calls
    calls += 1
    if calls > quick and not Path("slow").exists():
        Path("slow.new").write_text(str(os.getpid()))
        Path("slow.new").rename("slow")
        if kind in ("sleep", "optimizer"):
            progress._OPTIMIZER_S = 0.5
            time.sleep(length)
        elif kind == "torch":
            torch.linalg.eigvals(torch.randn(int(length), int(length)))
        Path("over").touch()
    return quick_one(self, *args, **named)


setattr(slow, method, slow_one)
main(["train", *sys.argv[5:]])
