"""FMS's entry points: what becomes of results that are there; they plan as `erg bench` does."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from ergmeter.bench.execute import state
from ergmeter.errors import UsageError

SCRIPTS = Path(__file__).parents[3] / "scripts"


def scenarios(folder: Path, **keys: Any) -> Path:
    scenario = {"name": "mine", "command": "true {x}", "arguments": {}, "axes": {"x": [1]}}
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"scenarios": [{**scenario, **keys}]}))
    return path


def benchmarks(
    results: Path, file: Path, *more: str, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SCRIPTS / "run_benchmarks.sh", "1", results, file, *more],
        env={**os.environ, "PYTHON": python},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A folder with results, and what the script said when it made them."""

    folder: Path
    said: str

    def copied(self, folder: Path) -> Path:
        return shutil.copytree(self.folder / "results", folder / "results")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Of one cell, where there were results before."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "results" / "exp_0").mkdir(parents=True)
    (folder / "results" / "exp_0" / "old").touch()
    told = benchmarks(folder / "results", scenarios(folder))
    assert told.returncode == 0, told.stderr
    return Made(folder, told.stdout)


def test_results_stay_where_they_are_if_the_plan_is_unsound(tmp_path: Path) -> None:
    results = tmp_path / "results"
    (results / "exp_0").mkdir(parents=True)
    told = benchmarks(results, scenarios(tmp_path, command="true"))
    assert told.returncode == 2
    assert "takes no x" in told.stderr
    assert (results / "exp_0").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "results"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "thesis.tex").touch()
    told = benchmarks(results, scenarios(tmp_path))
    assert told.returncode == 2
    assert "holds no results" in told.stderr
    assert [path.name for path in results.iterdir()] == ["thesis.tex"]


def test_results_are_moved_aside_for_a_plan_that_is_sound(made: Made) -> None:
    (aside,) = made.folder.glob("results-*")
    assert f"the earlier results are now in {aside}" in made.said
    assert (aside / "exp_0" / "old").exists()
    assert (made.folder / "results" / "plan.json").exists()
    assert not (made.folder / "results" / "exp_0" / "old").exists()


def test_no_overwrite_goes_on_with_what_is_there(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = made.copied(tmp_path)
    ended = (results / "exp_0" / "status.json").read_bytes()
    monkeypatch.setenv("NO_OVERWRITE", "true")
    told = benchmarks(results, scenarios(tmp_path, axes={"x": [1, 2]}))
    assert told.returncode == 0, told.stderr
    assert f"1 cell added to {results}: exp_1\n" in told.stdout
    assert "exp_1 running (mine x=2 #1)\nexp_1 ok after " in told.stdout
    assert "exp_0" not in told.stdout.split("2 of 2 cells ended: 2 ok")[0]
    assert (results / "exp_0" / "status.json").read_bytes() == ended
    assert list(tmp_path.glob("results-*")) == []
    (results / "plan.json").unlink()
    told = benchmarks(results, scenarios(tmp_path))
    assert told.returncode == 2
    assert "has no plan.json to go on with" in told.stderr


def test_a_cell_that_is_not_what_it_claims_fails_the_script(tmp_path: Path) -> None:
    path = scenarios(tmp_path, expects=[{"pattern": "flash attention on"}])
    told = benchmarks(tmp_path / "results", path)
    assert told.returncode == 1
    assert "1 of 1 cells ended: 1 ok, 1 of them not what it claims (see report)\n" in told.stdout


def shell(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SCRIPTS / "run_benchmarks.sh", *map(str, words)],
        env={**os.environ, "PYTHON": sys.executable, "DRY_RUN": "true"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["1,2"], "NUM_GPUS_MATRIX takes numbers with spaces between them, such as '1 2'"),
        (["1", "mine.yaml", "results"], "RESULT_DIR is the file mine.yaml; the order is NUM_GPUS"),
        (["1", "results", "nothing"], "no scenarios at nothing; the order is NUM_GPUS RESULT_DIR"),
        (["1", "results", "."], "SCENARIOS_CONFIG is the folder .; the order is NUM_GPUS RESULT"),
        (["--num_gpus", "1"], "takes the options --command and --contents; got '--num_gpus'"),
        (["1", "--command"], "--command needs a value"),
        (["1", "r", "mine.yaml", "lora", "extra", "x"], "too many arguments from 'extra' on; the"),
        (["1", "4", "r", "mine.yaml", "lora", "extra"], "too many arguments from 'extra' on; the"),
    ],
)
def test_arguments_in_the_wrong_place_are_told_in_a_line(
    tmp_path: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scenarios(tmp_path)
    told = shell(*words)
    assert told.returncode == 2
    assert said in told.stderr
    assert told.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "understood"),
    [
        (["1", "2", "r", "mine.yaml"], "GPUs 1; effective batch 2; scenarios all but slow ones of"),
        (["1 2", "r", "mine.yaml", "mine"], "GPUs 1 2; effective batch as in the scenarios; scen"),
    ],
)
def test_a_line_shows_how_the_arguments_were_read(
    tmp_path: Path, words: list[str], understood: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list without its quotes is read as two arguments: `1 2` is one GPU and a batch of 2."""
    monkeypatch.chdir(tmp_path)
    scenarios(tmp_path, command="true {arguments}")
    told = shell(*words)
    assert told.returncode == 0, told.stderr
    first = told.stderr.splitlines()[0]
    assert first.startswith(f"run_benchmarks.sh: {understood}")
    assert first.endswith("of mine.yaml; results in r")


NAMES = ("analyze_energy", "benchmark", "calculate_training_metrics", "train")


@pytest.mark.parametrize("name", NAMES)
def test_a_python_without_ergmeter_gets_one_line(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-I", SCRIPTS / f"{name}.py", "--help"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("ergmeter is not installed in this Python; in a clone: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nope"], "unrecognized arguments: --nope"),
        (["--num_gpus_matrix", "x"], "argument --num_gpus_matrix: invalid int value: 'x'"),
    ],
)
def test_a_wrong_flag_is_one_line(words: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "benchmark.py", *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"benchmark.py: {message}; see --help\n"


def test_help_is_of_the_script_itself() -> None:
    told = shell("--help")
    assert (told.returncode, told.stderr) == (0, "")
    assert "NUM_GPUS_MATRIX RESULT_DIR SCENARIOS_CONFIG SCENARIOS_FILTER" in told.stdout
    assert "NO_OVERWRITE=true" in told.stdout
    assert "set -eu" not in told.stdout


COMMAND = "/opt/fms/bin/python -m tuning.sft_trainer {arguments}"


@pytest.mark.parametrize(
    "options",
    [("--command", COMMAND, "--contents", "x.yaml"), (f"--command={COMMAND}", "--contents=x.yaml")],
)
def test_a_command_and_a_list_of_frameworks_reach_the_program(
    tmp_path: Path, script: Any, options: tuple[str, ...]
) -> None:
    done = benchmarks(tmp_path / "results", scenarios(tmp_path), *options, python="echo")
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[0]
    assert f"--contents{'=' if '=' in options[-1] else ' '}x.yaml" in line
    assert COMMAND in line
    # As the shell hands them on, each is one argument.
    (tmp_path / "x.yaml").write_text("framework_configs: [{shortname: a, filename: a.yaml}]")
    path = scenarios(tmp_path, framework_config=["a"], axes={}, command="x {arguments}")
    words = ["--scenarios_config_path", str(path), "--contents", str(tmp_path / "x.yaml")]
    cells = script.planned(script.parser().parse_args([*words, "--command", COMMAND])).cells
    assert cells[0].command[:3] == ("/opt/fms/bin/python", "-m", "tuning.sft_trainer")
    file = cells[0].environment["ACCELERATION_FRAMEWORK_CONFIG_FILE"]
    assert file == str(tmp_path / "a.yaml")


def test_a_dry_run_says_which_cell_is_which(tmp_path: Path) -> None:
    told = shell("1", tmp_path / "results", scenarios(tmp_path, axes={"x": [1, 2]}))
    assert told.returncode == 0, told.stderr
    heads = [line for line in told.stdout.splitlines() if line.startswith("#")]
    assert heads == [f"# exp_{n}: mine, repeat 1: num_gpus=1, x={n + 1}" for n in (0, 1)]


def test_results_are_not_moved_from_under_a_cell_that_still_runs(
    made: Made, tmp_path: Path
) -> None:
    """Its runner outlived the driver, and would write its end into the new results."""
    results = made.copied(tmp_path)
    (results / "exp_0" / "old").touch()
    runner = state.Process.of(os.getpid())
    state.write(results / "exp_0", state.CellState().begun(runner))
    told = benchmarks(results, scenarios(tmp_path))
    assert told.returncode == 2
    assert "exp_0 of" in told.stderr
    assert "is running" in told.stderr
    assert (results / "exp_0" / "old").exists()
    assert state.read(results / "exp_0").worker == runner
    assert list(tmp_path.glob("results?*")) == []


FMS = {"model_name_or_path": "org/model", "r": 4, "gradient_accumulation_steps": 1}


def of_fms(folder: Path, **arguments: Any) -> Path:
    """Scenarios as FMS's own are: they name no command."""
    path = scenarios(folder, arguments={**FMS, **arguments}, axes={})
    file = yaml.safe_load(path.read_text())
    del file["scenarios"][0]["command"]
    path.write_text(yaml.safe_dump(file))
    return path


@pytest.mark.parametrize(("gpus", "accelerate"), [(["2"], 2), ([], 0)])
def test_a_dry_run_shows_what_the_named_machine_runs(
    tmp_path: Path, gpus: list[str], accelerate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here is no GPU; two were named, or none. A newline in an argument is none of a heading."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("ERGMETER_FMS_PYTHON", "/none/python")
    path = of_fms(tmp_path, response_template="\n### Response:")
    words = ["--num_gpus_matrix", *gpus] if gpus else []
    done = subprocess.run(
        [sys.executable, SCRIPTS / "benchmark.py", "--scenarios_config_path", path, "--dry_run",
         "--results_output_path", tmp_path / "results", *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    heads = [line for line in done.stdout.splitlines() if line.startswith("# ")]
    assert len(heads) == (2 if gpus else 4)
    assert all("response_template=\\n### Response:, " in line for line in heads)
    assert done.stdout.count("-m accelerate.commands.launch") == accelerate
    assert done.stdout.count("-m torch.distributed.run") == (0 if gpus else 2)
    assert ("this machine has none, so torchrun" in done.stderr) == bool(gpus)
    shipped = SCRIPTS.parent / "scenarios" / "accelerate.yaml"
    assert done.stdout.count(f"--config_file {shipped}") == accelerate
    assert done.stderr.count("fms-hf-tuning") == 1  # which is not here, once for all cells
    assert COMMAND.partition(" ")[2] in done.stderr


def test_sft_trainer_is_installed_or_one_line_says_what_to_do(
    tmp_path: Path, script: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before the first cell: with an index that has it, and with none."""
    python = tmp_path / ".venv-fms" / "bin" / "python"
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "FMS_PYTHON", python)
    monkeypatch.setenv("ERGMETER_FMS_PYTHON", str(python))
    results = tmp_path / "results"
    words = ["benchmark.py", "--scenarios_config_path", str(of_fms(tmp_path, use_flash_attn=True)),
             "--results_output_path", str(results), "--install_sft_trainer"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    (tmp_path / "dev").write_text("#!/bin/sh\necho no index >&2\nexit 1\n")
    (tmp_path / "dev").chmod(0o755)
    assert script.main() == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "no index"
    assert lines[1].startswith("benchmark.py: fms-hf-tuning could not be installed, see above")
    assert "--command '/path/of/python -m tuning.sft_trainer {arguments}'" in lines[1]
    assert len(lines) == 2
    # A Python that has it, and not all that the arguments ask for.
    package = tmp_path / "site" / "tuning"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "dev").write_text(
        f'#!/bin/sh\nmkdir -p {python.parent}\nprintf "#!/bin/sh\\nPYTHONPATH={package.parent}'
        f' exec {sys.executable} \\"\\$@\\"\\n" >{python}\nchmod +x {python}\n'
    )
    assert script.main() == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"benchmark.py: {python} lacks flash_attn: install flash-attn there")
    assert not results.exists()


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark", SCRIPTS / "benchmark.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_erg_train_would_refuse_stops_the_plan(tmp_path: Path, script: Any) -> None:
    arguments = {"model_name_or_path": "builtin:tiny", "learning_rate": -1}
    path = scenarios(tmp_path, command="erg train", axes={}, arguments=arguments)
    given = script.parser().parse_args(["--scenarios_config_path", str(path)])
    with pytest.raises(UsageError, match=r"train\.lr must be above 0"):
        script.planned(given)


def test_cells_that_still_run_are_no_strangers(
    tmp_path: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        def __init__(self, _options: object) -> None: ...

        def check(self, _cells: object, *, own: Collection[int] = ()) -> None:
            raise UsageError(f"own {sorted(own)}")

    monkeypatch.setattr(script.registry, "load", lambda *_: Refusing)
    monkeypatch.setattr(script.state, "at_work", lambda _: {7, 8})
    words = ["--scenarios_config_path", str(scenarios(tmp_path)), "--results_output_path"]
    given = script.parser().parse_args([*words, str(tmp_path / "results")])
    with pytest.raises(UsageError, match=r"own \[7, 8\]"):
        script.run(given, script.planned(given))


@pytest.mark.parametrize(
    ("asked", "is_logged", "has_tracker"),
    [("nvidia", True, False), ("all", True, True), ("huggingface", False, True)],
)
def test_memory_logging_is_told_to_the_program(
    tmp_path: Path,
    script: Any,
    asked: str,
    is_logged: bool,
    has_tracker: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEMORY_LOGGING", asked)
    told = benchmarks(tmp_path / "results", scenarios(tmp_path), python="echo")
    assert told.returncode == 0, told.stderr
    words = told.stdout.splitlines()[0].split()
    assert words[0].endswith("benchmark.py")
    given = script.parser().parse_args(words[1:])
    assert (given.log_nvidia_smi, given.log_memory_hf) == (is_logged, has_tracker)
    assert given.nvidia_smi_keywords.split(",") == ["timestamp", "name", "index", "memory.used"]
    assert given.nvidia_smi_interval == 1.0


def test_no_log_of_nvidia_smi_is_made_unless_it_is_asked_for(made: Made) -> None:
    results = made.folder / "results"
    assert json.loads((results / "nvidia_smi.json").read_text()) is None
    assert not (results / "exp_0" / "gpu_memory_logs.json").exists()


def test_memory_logging_takes_other_keywords_and_another_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMORY_LOGGING", "nvidia")
    monkeypatch.setenv("NVIDIA_SMI_KEYWORDS", "uuid,memory.used")
    monkeypatch.setenv("NVIDIA_SMI_INTERVAL", "0.5")
    results = tmp_path / "results"
    assert benchmarks(results, scenarios(tmp_path)).returncode == 0
    asked = json.loads((results / "nvidia_smi.json").read_text())
    assert asked == {"keywords": ["uuid", "memory.used"], "interval_s": 0.5}
    assert (results / "exp_0" / "gpu_memory_logs.json").exists()


@pytest.mark.parametrize(("flags", "has_tracker"), [(["--log_memory_hf"], True), ([], False)])
def test_the_trainers_tracker_is_on_in_cells_of_erg_train_where_it_is_asked_for(
    tmp_path: Path, script: Any, flags: list[str], has_tracker: bool
) -> None:
    arguments = {"model_name_or_path": "builtin:tiny", "learning_rate": 0.001}
    path = scenarios(tmp_path, command="erg train", axes={}, arguments=arguments)
    given = script.parser().parse_args(["--scenarios_config_path", str(path), *flags])
    written = yaml.safe_load(script.planned(given).cells[0].files["train.yaml"])
    assert written["metrics"].get("hf_memory", False) is has_tracker
