"""`python scripts/benchmark.py`, with the flags of FMS's benchmark.py: `erg bench` behind them.

Where a flag is not given, the scenarios' own axes hold, and after them FMS's defaults. Scenarios
that name no command run `sft_trainer`, as FMS's do. A directory of results is taken up again.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from ergmeter import registry
from ergmeter.bench import datastage, exports, hidden, launching, monitor, results, smi, state
from ergmeter.bench.cells import Plan
from ergmeter.bench.place import Place
from ergmeter.bench.plan import plan
from ergmeter.cli.bench_options import wrong
from ergmeter.errors import ErgmeterError

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
    made = argparse.ArgumentParser(prog="benchmark.py", description=(__doc__ or "").splitlines()[0])
    for name in ("effective_batch_size", "num_gpus", "max_seq_len"):
        made.add_argument(f"--{name}_matrix", dest=name, type=int, nargs="+")
    made.add_argument("--packing_matrix", dest="packing", type=truth, nargs="+")
    made.add_argument("--acceleration_framework_config_keypairs", nargs="+", default=[])
    made.add_argument("--run_only_scenarios", nargs="+", default=[])
    made.add_argument("--scenarios_config_path", type=Path, default=SCENARIOS)
    made.add_argument("--defaults_config_path", type=Path)
    made.add_argument("--dataset_save_path", type=Path)
    made.add_argument("--accelerate_config", type=Path)
    made.add_argument("--results_output_path", type=Path, default=Path("benchmark_results"))
    made.add_argument("--process_port", type=int, help="no effect: each cell gets a free port")
    made.add_argument("--no_data_processing", action="store_true")
    made.add_argument("--dry_run", action="store_true")
    made.add_argument("--preload_models", action="store_true")
    made.add_argument(
        "--log_nvidia_smi", action="store_true", help="an nvidia-smi process beside each cell"
    )
    made.add_argument("--nvidia_smi_keywords", default=",".join(smi.KEYWORDS), help="what it logs")
    made.add_argument("--nvidia_smi_interval", type=float, default=smi.INTERVAL_S, help="seconds")
    made.add_argument(
        "--log_memory_hf", action="store_true", help="the Trainer's tracker, in every cell"
    )
    made.add_argument("--command", help="of all scenarios, whatever they name")
    made.add_argument("--repeats", type=int)
    made.add_argument(
        "--move_aside", action="store_true", help="keep earlier results under another name"
    )
    made.add_argument("--cool_down", type=float, default=15.0, help="seconds between two cells")
    return made


def planned(given: argparse.Namespace) -> Plan:
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


def logged(given: argparse.Namespace) -> smi.Query | None:
    """What nvidia-smi is to log beside the cells; None if it is not asked for."""
    if not given.log_nvidia_smi:
        return None
    if smi.lack():
        sys.stderr.write(f"--log_nvidia_smi: {smi.lack()}; cells run without its log\n")
    return smi.Query(smi.parsed(given.nvidia_smi_keywords), given.nvidia_smi_interval)


def preload(made: Plan) -> None:
    """Look each model up before hours of the others."""
    names = {str(cell.settings.get("model_name_or_path", "builtin:")) for cell in made.cells}
    for name in sorted(one for one in names if not one.startswith("builtin:")):
        importlib.import_module("transformers").AutoConfig.from_pretrained(name)


def run(given: argparse.Namespace, made: Plan) -> int:
    """Have the cells run; 1 if one of them failed."""
    out: Path = given.results_output_path
    query = logged(given)
    script = {name: _plain(value) for name, value in sorted(vars(given).items())}
    launcher = registry.load("launchers", "local")(launching.Options(cool_down_s=given.cool_down))
    own = state.at_work(out)  # what an earlier driver left running is no stranger on the GPUs
    launcher.check([cell for cell in made.cells if not cell.skip], own=own)
    aside = given.move_aside
    opening = state.Opening(resume=not aside, move_aside=aside, script=script)
    before = {*out.parent.glob(f"{out.name}-*")}
    made = state.opened(out, made, opening)
    for moved in {*out.parent.glob(f"{out.name}-*")} - before if aside else ():
        sys.stdout.write(f"the earlier results are now in {moved}\n")
    state.claim_driver(out)
    smi.ask(out, query)
    progress = monitor.prepare(out, made)
    cells = monitor.remaining(out, progress, seed=0)
    data = out / "data"
    if given.dataset_save_path is not None and not data.exists():
        given.dataset_save_path.mkdir(parents=True, exist_ok=True)
        data.symlink_to(given.dataset_save_path.resolve())
    if cells and not given.no_data_processing:
        datastage.prepare(made, data, say=print)
    with Place(out) as place:
        is_done = monitor.drive(place, progress, cells, launcher, lambda _progress: None)
        out = place.path if place.has_moved else out
    exports.collected(results.batches(out), out)
    if not is_done:
        return INTERRUPTED
    ended = [progress.states[cell.index] for cell in made.cells]
    for cell, one in zip(made.cells, ended, strict=True):
        sys.stdout.write(f"exp_{cell.index} {cell.scenario}: {one.status} {one.reason}".rstrip())
        sys.stdout.write("\n")
    return int(any(one.status not in ("ok", "skipped") for one in ended))


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
        hidden.hand_over(made.keys)
        if given.dry_run:
            has_gpus = bool(launching.gpus_here())
            for cell in made.cells:
                at = state.directory_of(given.results_output_path, cell).resolve()
                how = launching.command_line(launching.start(cell, at, has_gpus=has_gpus))
                sys.stdout.write(f"# {at.name}: {cell.skip or cell.scenario}\n{how}\n")
            return 0
        if given.preload_models:
            preload(made)
        return run(given, made)
    except ErgmeterError as error:
        sys.stderr.write(f"benchmark.py: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
