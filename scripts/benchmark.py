"""`python scripts/benchmark.py`, with the flags of FMS's benchmark.py: `erg bench` behind them.

Where a flag is not given, the scenarios' own axes hold, and after them FMS's defaults. Scenarios
that name no command run `sft_trainer`, as FMS's do. A directory of results is taken up again.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ergmeter import registry
from ergmeter.bench import results
from ergmeter.bench.execute import driver, launching, nvidia_smi_logger, results_directory, state
from ergmeter.bench.execute import launching as secrets
from ergmeter.bench.overview import varying
from ergmeter.bench.plan import data as datastage
from ergmeter.bench.plan import erg_train
from ergmeter.bench.plan.cells import BenchPlan
from ergmeter.bench.plan.plan import plan
from ergmeter.cli.compare.bench import wrong
from ergmeter.compat import fms
from ergmeter.errors import ErgmeterError, PluginError
from ergmeter.views import bench as bench_plan
from ergmeter.views import bench as bench_run

SCENARIOS = Path(__file__).parents[1] / "scenarios" / "scenarios.yaml"
INTERRUPTED = 130


def truth(text: str) -> bool:
    """True or False; FMS took every text for True."""
    words = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"must be True or False; got {text!r}")
    return words[text.lower()]


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        prog="benchmark.py",
        description=(__doc__ or "").splitlines()[0],
        epilog="docs/migrating-from-fms.md says what is different.",
    )
    many: dict[str, Any] = {"nargs": "+", "metavar": "N"}
    made.add_argument(
        "--effective_batch_size_matrix", dest="effective_batch_size", type=int, **many,
        help="samples of a step over all GPUs; default: the file's axis, else 4 8",
    )  # fmt: skip
    made.add_argument(
        "--num_gpus_matrix", dest="num_gpus", type=int, **many,
        help="GPUs of a cell; default: the file's axis, else 1 2",
    )  # fmt: skip
    made.add_argument(
        "--max_seq_len_matrix", dest="max_seq_len", type=int, **many,
        help="longest sequence; default: the file's axis, else 4096",
    )  # fmt: skip
    made.add_argument(
        "--packing_matrix", dest="packing", type=truth, nargs="+", metavar="BOOL",
        help="True, False or both; default: the file's axis, else True",
    )  # fmt: skip
    add = made.add_argument
    add("--acceleration_framework_config_keypairs", nargs="+", default=[], metavar="NAME FILE",
        help="files of frameworks, before those of CONTENTS.yaml")  # fmt: skip
    add("--run_only_scenarios", nargs="+", default=[], metavar="NAME",
        help="just these, slow ones too; default: all but slow ones")  # fmt: skip
    add("--scenarios_config_path", type=Path, default=SCENARIOS,
        help="the file of scenarios; default: %(default)s")  # fmt: skip
    add("--defaults_config_path", type=Path, help="default: defaults.yaml beside the scenarios")
    add("--dataset_save_path", type=Path, help="where data is kept; default: data/ of the results")
    add("--accelerate_config", type=Path, help="default: accelerate.yaml beside the scenarios")
    add("--results_output_path", type=Path, default=Path("benchmark_results"),
        help="of results; taken up again if it is there; default: %(default)s")  # fmt: skip
    add("--process_port", type=int, help="no effect: each cell gets a free port")
    add("--no_data_processing", action="store_true", help="leave the data stage out")
    add("--dry_run", action="store_true", help="show what would be started, and start nothing")
    add("--preload_models", action="store_true", help="look each model up before the first cell")
    add("--log_nvidia_smi", action="store_true", help="an nvidia-smi process beside each cell")
    add("--nvidia_smi_keywords", default=",".join(nvidia_smi_logger.KEYWORDS), help="what it logs")
    add("--nvidia_smi_interval", type=float, default=nvidia_smi_logger.INTERVAL_S, help="seconds")
    add("--log_memory_hf", action="store_true", help="the Trainer's tracker, in every cell")
    add("--command", help="of all scenarios, whatever they name; default: theirs, else sft_trainer")
    add("--repeats", type=int, help="run each cell so many times")
    add("--move_aside", action="store_true", help="keep earlier results under another name")
    add("--cool_down", type=float,
        help="seconds between two cells; default: 15 where there are GPUs, else 0")  # fmt: skip
    return made


def planned(given: argparse.Namespace) -> BenchPlan:
    """The plan that the flags ask for."""
    pairs = given.acceleration_framework_config_keypairs
    return plan(
        given.scenarios_config_path,
        num_gpus=given.num_gpus,
        effective_batch_size=given.effective_batch_size,
        packing=given.packing,
        max_seq_len=given.max_seq_len,
        only=given.run_only_scenarios,
        repeats=given.repeats,
        command=given.command,
        otherwise="sft_trainer",
        defaults=given.defaults_config_path,
        frameworks=dict(zip(pairs[::2], pairs[1::2], strict=True)),
        accelerate_config=given.accelerate_config,
        log_memory_hf=given.log_memory_hf,
        data_stage=not given.no_data_processing,
        check=wrong,
    )


def logged(given: argparse.Namespace) -> nvidia_smi_logger.Query | None:
    """What nvidia-smi is to log beside the cells; None if it is not asked for."""
    if not given.log_nvidia_smi:
        return None
    if nvidia_smi_logger.lack():
        sys.stderr.write(
            f"--log_nvidia_smi: {nvidia_smi_logger.lack()}; cells run without its log\n"
        )
    return nvidia_smi_logger.Query(
        nvidia_smi_logger.parsed(given.nvidia_smi_keywords), given.nvidia_smi_interval
    )


def preload(made: BenchPlan) -> None:
    """Look each model up before hours of the others."""
    names = {str(cell.settings.get("model_name_or_path", "builtin:")) for cell in made.cells}
    for name in sorted(one for one in names if not one.startswith("builtin:")):
        importlib.import_module("transformers").AutoConfig.from_pretrained(name)


def run(given: argparse.Namespace, made: BenchPlan) -> int:
    """Have the cells run; 1 if one of them failed, or is not what its scenario expects."""
    out: Path = given.results_output_path
    query = logged(given)
    script = {name: _plain(value) for name, value in sorted(vars(given).items())}
    rest_s = launching.cool_down_s(given.cool_down)
    launcher = registry.load("launchers", "local")(launching.LaunchOptions(cool_down_s=rest_s))
    own = state.at_work(out)  # what an earlier driver left running is no stranger on the GPUs
    launcher.check([cell for cell in made.cells if not cell.skip], own=own)
    aside = given.move_aside
    before = {*out.parent.glob(f"{out.name}-*")}
    made = results_directory.opened(out, made, resume=not aside, move_aside=aside, script=script)
    for moved in {*out.parent.glob(f"{out.name}-*")} - before if aside else ():
        say(f"the earlier results are now in {moved}")
    for line in made.warnings:
        say(line)
    nvidia_smi_logger.ask(out, query)
    progress = driver.prepare(out, made, cool_down_s=rest_s)
    cells = driver.remaining(out, progress, seed=0)
    data = out / "data"
    if given.dataset_save_path is not None and not data.exists():
        given.dataset_save_path.mkdir(parents=True, exist_ok=True)
        data.symlink_to(given.dataset_save_path.resolve())
    if cells and not given.no_data_processing:
        datastage.prepare(made, data, say=say)
    is_done = driver.drive(out, progress, cells, launcher, teller(progress, out))
    fms.collected(results.batches(out), out)
    say(bench_run.counts(progress.counts, broken=progress.broken))
    return int(bool(progress.failed)) if is_done else INTERRUPTED


def say(line: str) -> None:
    """At once: whoever watches a log of hours wants to see it grow."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def teller(progress: driver.BenchProgress, out: Path) -> Callable[[driver.BenchProgress], None]:
    """Says what becomes of each cell, with the settings that tell it from others."""
    told: dict[int, str] = {index: one.status for index, one in progress.states.items()}
    names = varying(progress.plan.cells)

    def tell(now: driver.BenchProgress) -> None:
        for line in bench_run.news(now, told, names, out=out):
            say(line)

    return tell


def _plain(value: Any) -> Any:  # noqa: ANN401  of argparse
    return str(value) if isinstance(value, Path) else value


def main() -> int:
    """Plan, and run unless that is not wanted."""
    flags = parser()
    given = flags.parse_args()
    if len(given.acceleration_framework_config_keypairs) % 2:
        flags.error("--acceleration_framework_config_keypairs takes pairs: a name and its file")
    try:
        made = planned(given)
        secrets.export_secrets(made.keys)
        has_gpus = bool(launching.gpus_here())
        lacks = erg_train.missing_packages(made.cells, has_gpus=has_gpus)
        if given.dry_run:
            sys.stderr.write(f"benchmark.py: {lacks}\n" if lacks else "")
            for cell in made.cells:
                at = state.directory_of(given.results_output_path, cell).resolve()
                how = launching.command_line(launching.start(cell, at, has_gpus=has_gpus))
                say(bench_plan.heading(cell))
                say(f"# skipped: {cell.skip}" if cell.skip else how)
            return 0
        if lacks:
            raise PluginError(lacks)
        if given.preload_models:
            preload(made)
        return run(given, made)
    except ErgmeterError as error:
        sys.stderr.write(f"benchmark.py: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
