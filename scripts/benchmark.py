"""`python scripts/benchmark.py`, with the flags of FMS's benchmark.py: `erg bench` behind them.

Where a flag is not given, the scenarios' own axes hold, and after them FMS's defaults. Scenarios
that name no command run `sft_trainer`, as FMS's do. A directory of results is taken up again.

What the Python of `sft_trainer` lacks is looked up there, once before the first cell.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

try:
    from ergmeter import registry
    from ergmeter.bench import results
    from ergmeter.bench.execute import (
        driver,
        launching,
        nvidia_smi_logger,
        results_directory,
        state,
    )
    from ergmeter.bench.overview import varying
    from ergmeter.bench.plan import data as datastage
    from ergmeter.bench.plan import erg_train
    from ergmeter.bench.plan.cells import PYTHON, BenchPlan, Cell, own_python
    from ergmeter.bench.plan.plan import plan
    from ergmeter.bench.plan.scenarios import ACCELERATE, CONFIG_VARIABLE
    from ergmeter.cli.compare.bench import wrong
    from ergmeter.compat import fms
    from ergmeter.errors import ErgmeterError, PluginError
    from ergmeter.views import bench as bench_plan
    from ergmeter.views import bench as bench_run
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "ergmeter":
        raise
    sys.exit(
        "ergmeter is not installed in this Python; in a clone: pip install '.[train]', or"
        " tox -e run-benches"
    )

ROOT = Path(__file__).resolve().parents[1]
SCENARIOS = ROOT / "scenarios" / "scenarios.yaml"
FMS_PYTHON = ROOT / ".venv-fms" / "bin" / "python"  # `./dev fms` makes it
INTERRUPTED = 130
LOOK_UP_S = 120
# Prints those of its arguments that are no modules.
LOOK_UP = "import sys; from importlib.util import find_spec; print(*filter(lambda n: not find_spec(n), sys.argv[1:]))"  # noqa: E501
OTHER_PYTHON = "--command '/path/of/python -m tuning.sft_trainer {arguments}'"
CURES = {
    "tuning": f"it is fms-hf-tuning's; name a Python that has it by {OTHER_PYTHON}",
    "flash_attn": "install flash-attn there, which needs nvcc, or write `use_flash_attn: false`"
    " into the arguments",
    "fms_acceleration": "install fms-acceleration and the plugin of the framework there",
}


def truth(text: str) -> bool:
    """True or False; FMS took every text for True."""
    words = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"must be True or False; got {text!r}")
    return words[text.lower()]


class Parser(argparse.ArgumentParser):
    """Reports an error in one line; argparse prints the usage before it."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = Parser(
        prog="benchmark.py",
        description=(__doc__ or "").splitlines()[0],
        epilog="docs/from-fms.md says what is different.",
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
    add("--contents", type=Path, metavar="FILE",
        help="shortnames and their files; default: CONTENTS.yaml beside the scenarios, or in"
        " ../../sample-configurations of their folder")  # fmt: skip
    add("--accelerate_config", type=Path,
        help="default: accelerate.yaml beside the scenarios, else in scenarios/")  # fmt: skip
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
    add("--install_sft_trainer", action="store_true",
        help="put fms-hf-tuning into .venv-fms first, if cells need it and lack it")  # fmt: skip
    add("--repeats", type=int, help="run each cell so many times")
    add("--move_aside", action="store_true", help="keep earlier results under another name")
    add("--cool_down", type=float,
        help="seconds between two cells; default: 15 where there are GPUs, else 0")  # fmt: skip
    return made


def planned(given: argparse.Namespace) -> BenchPlan:
    """The plan that the flags ask for."""
    pairs = given.acceleration_framework_config_keypairs
    beside = given.scenarios_config_path.with_name(ACCELERATE)
    configs = (given.accelerate_config, beside if beside.is_file() else None)
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
        contents=given.contents,
        frameworks=dict(zip(pairs[::2], pairs[1::2], strict=True)),
        accelerate_config=next(filter(None, configs), SCENARIOS.with_name(ACCELERATE)),
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
        try:
            importlib.import_module("transformers").AutoConfig.from_pretrained(name)
        except ImportError:
            say("--preload_models: there is no transformers here, so no model is looked up")
            return
        except (OSError, ValueError) as error:
            why = str(error).strip().splitlines()[0]
            raise ErgmeterError(f"the model {name} can't be had: {why}") from error


def lacking(python: str, names: Iterable[str]) -> list[str]:
    """Those of these modules that a Python has not; all of them where it does not run."""
    names = list(names)
    if shutil.which(python) is None:
        return names
    words = [python, "-c", LOOK_UP, *names]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LOOK_UP_S, check=False)
    return done.stdout.split() if done.returncode == 0 else names


def imported(cells: Iterable[Cell]) -> dict[str, set[str]]:
    """The modules that cells of sft_trainer import, by their Python."""
    modules: dict[str, set[str]] = {}
    for cell in cells:
        # Who sets the path of a cell's modules knows what is on it.
        if not cell.is_of_fms or cell.skip or "PYTHONPATH" in cell.environment:
            continue
        python = own_python("tuning") if cell.command[0] == PYTHON else cell.command[0]
        names = modules.setdefault(python, set())
        names.add("tuning")
        if str(cell.settings.get("use_flash_attn")).lower() == "true":
            names.add("flash_attn")
        if CONFIG_VARIABLE in cell.environment:
            names.add("fms_acceleration")
    return modules


def install(cells: Iterable[Cell]) -> None:
    """Put fms-hf-tuning where cells look for it, unless they find it or look elsewhere."""
    if str(FMS_PYTHON) not in imported(cells) or not lacking(str(FMS_PYTHON), ["tuning"]):
        return
    say(
        f"nothing here has fms-hf-tuning: it goes into {FMS_PYTHON.parents[1]}, some GB, in minutes"
    )
    words = [str(ROOT / "dev"), "fms"]
    if subprocess.run(words, env={**os.environ, "PYTHON": sys.executable}, check=False).returncode:
        raise PluginError(
            "fms-hf-tuning could not be installed, see above: name a Python that has it by"
            f" {OTHER_PYTHON}"
        )


def lacks_of_fms(cells: Iterable[Cell]) -> str:
    """What the Pythons of sft_trainer lack, in one line; nothing where they have all."""
    lines = []
    for python, names in imported(cells).items():
        if shutil.which(python) is None:
            lines.append(f"there is no {python}; name a Python that has tuning by {OTHER_PYTHON}")
            continue
        lines += [
            f"{python} lacks {name}: {CURES[name]}" for name in lacking(python, sorted(names))
        ]
    return "; ".join(lines)


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
    os.environ.setdefault("ERGMETER_FMS_PYTHON", str(FMS_PYTHON))
    try:
        made = planned(given)
        os.environ.update(made.keys)  # for the processes that cells are
        on_gpus = given.dry_run and given.num_gpus is not None
        has_gpus, notes = launching.dry_run_gpus(made.cells, on_gpus=on_gpus)
        if given.install_sft_trainer and not given.dry_run:
            install(made.cells)
        lacks = erg_train.missing_packages(made.cells, has_gpus=has_gpus)
        lacks = lacks or lacks_of_fms(made.cells)
        if given.dry_run:
            for line in (*notes, *filter(None, [lacks])):
                sys.stderr.write(f"benchmark.py: {line}\n")
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
    except OSError as error:  # such as of data that can't be fetched
        sys.stderr.write(f"benchmark.py: {' '.join(str(error).split())}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
