"""`python scripts/walks.py`: counts the modules that six everyday walks through ergmeter enter.

A module is entered when a function of it is called; what only runs at import is not counted, nor
are the generated methods of dataclasses. Each walk runs in a process of its own, twice: an error if
the two differ. `--list` names the modules, `--json FILE` stores them, and `--against FILE` compares
with stored ones: the goal is 70 % of the modules or fewer.

Modules move, so the walks use the command line, public names of `ergmeter`, files in tests/data and
helpers of the tests. Needs gcc and ergmeter[html,hlo].
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ergmeter import Meter

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ergmeter"
DATA = ROOT / "tests" / "data"
GOAL_FRAC = 0.7
REPEATS = 2
TIMEOUT_S = 120.0

# A bench of one cell in three repeats: seconds a step and the loss of each repeat.
BENCHES = {
    "reference": [(2.00, 1.500), (2.01, 1.501), (1.99, 1.499)],
    "new": [(2.10, 1.502), (2.11, 1.500), (2.09, 1.501)],
}


@dataclass(frozen=True)
class Walk:
    """A way through the code: files it needs, made first and not counted, and what it does."""

    title: str
    command: str
    follow: Callable[[], None]
    prepare: Callable[[], Mapping[str, str]] = dict  # in its folder; returns its environment
    has_goal: bool = True


# -- the walks; each in a folder of its own -------------------------------------------------------


def scripted_gpu() -> Mapping[str, str]:
    """Compile the scripted NVML library, with one GPU at 300 W."""
    from tests.nvml.library import Gpu, Script, build  # noqa: PLC0415  not in the walks' processes

    gpu = Gpu(power_w=300.0, memory_bytes=3e9, busy_frac=0.9)
    return build(Path.cwd()).environment(Script([gpu]))


def nvml_to_card() -> None:
    """Record steps with the NVML probe; print the card."""
    metered("run", probes=["nvml"])
    erg("report", "run")


def step_to_tokens_per_s() -> None:
    """Record steps without probes; read tokens/s of the summary."""
    from ergmeter import Reading  # noqa: PLC0415  imported when the walk begins

    meter = metered("run", probes=[])
    assert isinstance(meter.summary().readings["throughput.tokens_per_s"], Reading)


def config_to_mfu() -> None:
    """Print the MFU of a training of Llama 3.1 8B on 8 H100s."""
    config = DATA / "configs" / "llama-3.1-8b.json"
    how = ("--seq-len", "8192", "--num-devices", "8", "--device", "H100 SXM")
    erg("mfu", config, *how, "--tokens-per-s", "60000")


def compile_cache() -> Mapping[str, str]:
    """Make a Neuron compile cache of two graphs, one of them with NKI kernels."""
    for number, graph in enumerate(("nki_entry", "dot_mnk.opt")):
        folder = Path("cache", "neuronxcc-2.18.121.0+9e31e41a", f"MODULE_{number}+00000000")
        folder.mkdir(parents=True)
        shutil.copy(DATA / "hlo" / f"{graph}.hlo_module.pb", folder / "model.hlo_module.pb")
    return {}


def hlo_to_nki_ratio() -> None:
    """Print the NKI ratio of the graphs of a Trainium training."""
    job = ("--config", DATA / "neuron" / "llama3_8b_sft.yaml", "--throughput", "2")
    model = ("--model-config", DATA / "configs" / "llama-3.1-8b.json")
    erg("analyze", *job, *model, "--compile-dir", "cache")


def benches() -> Mapping[str, str]:
    """Write two directories of results, whose cells have a run and a Trainer's results."""
    from tests.runs import GPU, add_writer, even_steps, make_run  # noqa: PLC0415  as above

    for bench, repeats in BENCHES.items():
        for index, (step_s, loss) in enumerate(repeats):
            folder = Path(bench, f"exp_{index}")
            folder.mkdir(parents=True)
            cell = {
                "index": index, "id": f"id{index}", "scenario": "small", "num_gpus": 1,
                "settings": {"framework_config": "none"}, "repeat": index + 1, "command": ["x"],
            }  # fmt: skip
            results = {"train_loss": loss, "train_runtime": 40.0}
            contents = {"cell": cell, "status": {"status": "ok"}, "results": results}
            for name, content in contents.items():
                (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
            steps = even_steps(20, seconds=step_s, tokens_computed=1000, tokens_real=600)
            add_writer(
                make_run(folder / "run"), steps=steps, settings={"warmup_steps": 0}, devices=[GPU]
            )
    return {}


def cell_to_gate_verdict() -> None:
    """Judge a bench that is 5 % slower: the gate is red."""
    erg("gate", "new", "reference", "--rule", "tokens_per_s -3%", exit_code=1)


def recorded_run() -> Mapping[str, str]:
    """Unpack a fine-tuning that was recorded on an H200."""
    with tarfile.open(DATA / "h200_run" / "finetune.tar.gz") as packed:
        packed.extractall(filter="data")
    return {}


def run_to_chart() -> None:
    """Write the HTML report of the fine-tuning."""
    erg("report", "finetune-1b", "--html", "report.html")
    assert b"<svg" in Path("report.html").read_bytes()


WALKS = {
    "nvml": Walk(
        "NVML reading to the card", "Meter(probes=['nvml']); erg report RUN",
        nvml_to_card, scripted_gpu,
    ),
    "step": Walk(
        "training step to tokens/s", "Meter(probes=[]); meter.summary()", step_to_tokens_per_s
    ),
    "mfu": Walk(
        "config.json to MFU", "erg mfu config.json", config_to_mfu, has_goal=False
    ),
    "nki": Walk(
        "HLO file to the NKI ratio", "erg analyze --compile-dir cache",
        hlo_to_nki_ratio, compile_cache,
    ),
    "gate": Walk(
        "bench cell to its gate verdict", "erg gate NEW REF", cell_to_gate_verdict, benches
    ),
    "chart": Walk(
        "run to an HTML chart", "erg report RUN --html FILE", run_to_chart, recorded_run
    ),
}  # fmt: skip


def erg(*arguments: object, exit_code: int = 0) -> None:
    """Call the command in this process. Raises RuntimeError unless it exits as expected."""
    sys.argv = ["erg", *map(str, arguments)]
    try:
        runpy.run_module("ergmeter", run_name="__main__")
    except SystemExit as end:
        if (end.code or 0) != exit_code:
            raise RuntimeError(f"{' '.join(sys.argv)}: exit code {end.code}") from end


def metered(out: str, *, probes: Sequence[str]) -> Meter:
    """A closed Meter, with 30 steps of 1000 tokens in a new run.

    One step is a stall. Stalls are reported, and a busy machine causes some: with one of its own
    the walk enters the same modules on a quiet machine.
    """
    import ergmeter  # noqa: PLC0415  imported when the walk begins

    with ergmeter.Meter(out, probes=probes, warmup_steps=2) as meter:
        for index in range(30):
            with meter.step(tokens=1000):
                time.sleep(0.5 if index == 20 else 0.03)
    return meter


# -- counting -------------------------------------------------------------------------------------


class Tracer:
    """Collects the modules of the package whose functions are called, in all threads."""

    def __init__(self) -> None:
        self.entered: set[str] = set()
        self._modules: dict[CodeType, str | None] = {}

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Collect until the end of the block; threads must be started inside."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in self._modules:
            self._modules[code] = _function_module(code)
        module = self._modules[code]
        if module is not None and module not in self.entered and not _is_importing(frame):
            self.entered.add(module)


def _function_module(code: CodeType) -> str | None:
    """The module of a function's code; None for bodies of modules and classes, and other code."""
    path = Path(code.co_filename)
    if not code.co_flags & inspect.CO_OPTIMIZED or PACKAGE not in path.parents:
        return None
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_importing(frame: FrameType | None) -> bool:
    """True if the call comes from the body of a module of the package that is being imported."""
    while frame is not None:
        is_body = frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] != "__main__"
        if is_body and PACKAGE in Path(frame.f_code.co_filename).parents:
            return True
        frame = frame.f_back
    return False


def modules_of(name: str) -> list[str]:
    """The modules that a walk enters, sorted. Runs it in a process and folder of its own."""
    with tempfile.TemporaryDirectory(prefix="walk-") as folder:
        before = Path.cwd()
        os.chdir(folder)
        try:
            variables = WALKS[name].prepare()
        finally:
            os.chdir(before)
        command = [sys.executable, __file__, "--follow", name]
        done = subprocess.run(
            command, cwd=folder, env=_environment(folder, variables), timeout=TIMEOUT_S,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"walk {name} failed:\n{done.stderr}")
        modules: list[str] = json.loads(Path(folder, "modules.json").read_text(encoding="utf-8"))
        return modules


def _environment(folder: str, variables: Mapping[str, str]) -> dict[str, str]:
    """An environment with the same caches, terminal and order of sets on any machine."""
    passed = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return {
        **passed,
        "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), str(ROOT)]),
        "PYTHONHASHSEED": "0",
        "HOME": folder,
        "XDG_CACHE_HOME": str(Path(folder, "caches")),
        "COLUMNS": "120",
        **variables,
    }


def follow(name: str) -> None:
    """Follow one walk in this process, and write the modules it enters to modules.json."""
    tracer = Tracer()
    with tracer.tracing():
        WALKS[name].follow()
    Path("modules.json").write_text(json.dumps(sorted(tracer.entered)), encoding="utf-8")


def measured(names: Sequence[str]) -> dict[str, list[str]]:
    """The modules of each walk. Raises RuntimeError if two runs of one differ."""
    modules = {}
    for name in names:
        runs = [modules_of(name) for _ in range(REPEATS)]
        different = {module for run in runs for module in set(run) ^ set(runs[0])}
        if different:
            raise RuntimeError(f"walk {name} differs between runs: {', '.join(sorted(different))}")
        modules[name] = runs[0]
    return modules


# -- output ---------------------------------------------------------------------------------------


def table(modules: Mapping[str, Sequence[str]]) -> str:
    """A line for each walk."""
    lines = [f"{'walk':<32}{'modules':>8}  command"]
    lines += [
        f"{WALKS[name].title:<32}{len(entered):>8}  {WALKS[name].command}"
        for name, entered in modules.items()
    ]
    return "\n".join(lines) + "\n"


def comparison(before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]) -> str:
    """The verdict, then a line for each walk: modules before and after, and their ratio."""
    lines = [f"{'walk':<32}{'before':>8}{'after':>8}{'ratio':>8}  goal"]
    missed = []
    for name, entered in after.items():
        ratio = len(entered) / len(before[name])
        goal = "none"
        if WALKS[name].has_goal:
            goal = "met" if ratio <= GOAL_FRAC else f"at most {int(GOAL_FRAC * len(before[name]))}"
            missed += [name] if ratio > GOAL_FRAC else []
        sizes = f"{len(before[name]):>8}{len(entered):>8}{ratio:>8.0%}"
        lines.append(f"{WALKS[name].title:<32}{sizes}  {goal}")
    goals = sum(WALKS[name].has_goal for name in after)
    verdict = f"{goals - len(missed)} of {goals} walks are at {GOAL_FRAC:.0%} or less of before"
    return "\n".join([verdict, "", *lines]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"of: {', '.join(WALKS)}")
    parser.add_argument("--list", action="store_true", help="name the modules")
    parser.add_argument("--json", type=Path, metavar="FILE", help="store the modules")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with stored modules")
    parser.add_argument("--follow", choices=WALKS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.follow:
        follow(options.follow)
        return 0
    if not set(options.walks) <= set(WALKS):
        parser.error(f"the walks are {', '.join(WALKS)}")
    sys.path[:0] = [str(PACKAGE.parent), str(ROOT)]
    try:
        modules = measured(options.walks or list(WALKS))
    except RuntimeError as error:
        sys.stderr.write(f"walks.py: {error}\n")
        return 1
    if options.against:
        before = json.loads(options.against.read_text(encoding="utf-8"))
        sys.stdout.write(comparison(before["modules"], modules))
    else:
        sys.stdout.write(table(modules))
    for name, entered in modules.items() if options.list else ():
        sys.stdout.write("\n".join(["", f"{WALKS[name].title}:", *(f"  {m}" for m in entered), ""]))
    if options.json:
        stored = {"python": platform.python_version(), "modules": modules}
        options.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
