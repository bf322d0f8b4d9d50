"""Every call of FMS's documents, with the arguments that they have, up to the first cell.

What the cells leave is in tests/e2e/test_bench_fms.py; results that are there already, and how a
call exits, in test_scripts.py.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ergmeter.bench.plan.plan import plan

ROOT = Path(__file__).parents[3]
# The example of FMS's README, as it stands there.
SCENARIO = """
scenarios:

  # benchmark scenario for accelerated peft using AutoGPTQ triton v2
  - name: accelerated-peft-gptq
    framework_config: 
      # one ore more framework configurations that fall within the scenario group.
      # - each entry points to a shortname in CONTENTS.yaml
      - accelerated-peft-autogptq

    # sft_trainer.py arguments critical for correct plugin operation
    arguments:
      fp16: True
      learning_rate: 2e-4
      torch_dtype: float16
      peft_method: lora
      r: 16
      lora_alpha: 16
      lora_dropout: 0.0
      target_modules: "q_proj k_proj v_proj o_proj"
      model_name_or_path: 
        - 'mistralai/Mistral-7B-v0.1'
        - 'mistralai/Mixtral-8x7B-Instruct-v0.1'
        - 'NousResearch/Llama-2-70b-hf'
"""  # noqa: W291
CONTENTS = {
    "framework_configs": [
        {
            "shortname": "accelerated-peft-autogptq",
            "plugins": ["accelerated-peft"],
            "filename": "accelerated-peft-autogptq-sample-configuration.yaml",
        }
    ]
}
FLAGS = (
    *("effective_batch_size_matrix", "num_gpus_matrix", "max_seq_len_matrix", "packing_matrix"),
    *("acceleration_framework_config_keypairs", "run_only_scenarios", "scenarios_config_path"),
    *("defaults_config_path", "dataset_save_path", "accelerate_config", "results_output_path"),
    *("process_port", "no_data_processing", "dry_run", "preload_models", "log_nvidia_smi"),
    "log_memory_hf",
)


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark", ROOT / "scripts" / "benchmark.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of FMS's: its scenarios, and where it has the list of frameworks."""
    benchmarks, samples = tmp_path / "scripts" / "benchmarks", tmp_path / "sample-configurations"
    for folder in (benchmarks, samples):
        folder.mkdir(parents=True)
    (benchmarks / "scenarios.yaml").write_text(SCENARIO)
    (benchmarks / "defaults.yaml").write_text("{gradient_accumulation_steps: 1, max_steps: 100}")
    (samples / "CONTENTS.yaml").write_text(yaml.safe_dump(CONTENTS))
    return benchmarks / "scenarios.yaml"


def flags_of(script: Any, *words: object, **variables: str) -> Namespace:
    """What run_benchmarks.sh hands to benchmark.py."""
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "run_benchmarks.sh", *map(str, words)],
        env={**os.environ, "PYTHON": sys.executable, **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    flags: Namespace = script.parser().parse_args(json.loads(done.stdout.splitlines()[0]))
    return flags


@pytest.fixture(autouse=True)
def _echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, with a Python for the shell script that prints what it is given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[2:]))'"
        ' "$@"\n'
    )
    python.chmod(0o755)


def test_the_shell_script_takes_its_four_arguments_and_later_its_five(
    script: Any, clone: Path, tmp_path: Path
) -> None:
    echo = {"PYTHON": str(tmp_path / "python")}
    small = flags_of(script, **echo)
    assert small.scenarios_config_path.resolve() == ROOT / "scenarios" / "scenarios.yaml"
    assert (small.run_only_scenarios, small.num_gpus) == (["lora"], None)
    assert small.results_output_path == Path("benchmark_outputs")
    assert (small.preload_models, small.log_memory_hf, small.log_nvidia_smi) == (True, True, False)
    every = flags_of(script, "1 2", **echo)
    assert (every.run_only_scenarios, every.num_gpus) == ([], [1, 2])
    four = flags_of(script, "1 2", "out", clone, "accelerated-peft-gptq", **echo)
    assert four.num_gpus == [1, 2]
    assert four.effective_batch_size is None
    assert (four.results_output_path, four.scenarios_config_path) == (Path("out"), clone)
    assert four.run_only_scenarios == ["accelerated-peft-gptq"]
    five = flags_of(script, "1 2", "4 8", "out", clone, "none", **echo)
    assert (five.num_gpus, five.effective_batch_size) == ([1, 2], [4, 8])
    assert (five.results_output_path, five.run_only_scenarios) == (Path("out"), [])
    # An empty filter is all, as there.
    assert flags_of(script, "1", "out", clone, "", **echo).run_only_scenarios == []


@pytest.mark.parametrize(
    ("variable", "value", "flag"),
    [
        ("DRY_RUN", "true", "dry_run"),
        ("NO_DATA_PROCESSING", "true", "no_data_processing"),
        ("MEMORY_LOGGING", "nvidia", "log_nvidia_smi"),
        ("MEMORY_LOGGING", "huggingface", "log_memory_hf"),
    ],
)
def test_a_variable_of_the_shell_script_is_a_flag(
    script: Any, tmp_path: Path, variable: str, value: str, flag: str
) -> None:
    echo = {"PYTHON": str(tmp_path / "python")}
    assert getattr(flags_of(script, "1", **echo, **{variable: value}), flag) is True
    if variable != "MEMORY_LOGGING":
        assert getattr(flags_of(script, "1", **echo, **{variable: "false"}), flag) is False
        done = subprocess.run(
            ["bash", ROOT / "scripts" / "run_benchmarks.sh", "1"],
            env={**os.environ, **echo, variable: "yes"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"{variable} must be true or false; got 'yes'" in done.stderr


def test_the_help_has_every_flag_of_fms(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert [name for name in FLAGS if f"--{name}" not in out] == []


def test_the_flags_do_what_fms_says(script: Any, clone: Path, tmp_path: Path) -> None:
    # As it stands: 3 models x 1 framework x 2 batches x 2 numbers of GPUs.
    words = ["--scenarios_config_path", str(clone)]
    made = script.planned(script.parser().parse_args(words))
    assert len(made.cells) == 12
    assert len({cell.settings["model_name_or_path"] for cell in made.cells}) == 3
    first = made.cells[0]
    assert " ".join(first.command).startswith(
        "{python} -m tuning.sft_trainer --model_name_or_path mistralai/Mistral-7B-v0.1"
        " --packing True --max_seq_len 4096 --training_data_path {data}/"
    )
    assert " --target_modules q_proj k_proj v_proj o_proj --" in " ".join(first.command)
    arguments = dict(itertools.pairwise(first.command))
    expected = {
        "fp16": "True", "learning_rate": "2e-4", "torch_dtype": "float16", "peft_method": "lora",
        "r": "16", "lora_alpha": "16", "lora_dropout": "0.0", "max_steps": "100",
        "per_device_train_batch_size": "4", "gradient_accumulation_steps": "1",
        "skip_memory_metrics": "True", "output_dir": "{hf}",
    }  # fmt: skip
    assert {name: arguments[f"--{name}"] for name in expected} == expected
    tracked = script.planned(script.parser().parse_args([*words, "--log_memory_hf"])).cells[0]
    assert dict(itertools.pairwise(tracked.command))["--skip_memory_metrics"] == "False"
    assert len(script.planned(script.parser().parse_args([*words, "--repeats", "3"])).cells) == 36
    name = "accelerated-peft-autogptq-sample-configuration.yaml"
    file = clone.parents[2] / "sample-configurations" / name
    assert Path(first.environment["ACCELERATION_FRAMEWORK_CONFIG_FILE"]).resolve() == file
    shipped = str(ROOT / "scenarios" / "accelerate.yaml")
    assert made.cells[1].launch_options == ("--config_file", shipped)
    # And with each of the flags that change what is run.
    (tmp_path / "defaults.yaml").write_text("{gradient_accumulation_steps: 2}")
    words += ["--effective_batch_size_matrix", "8", "--num_gpus_matrix", "2", "4"]
    words += ["--max_seq_len_matrix", "512", "--packing_matrix", "False", "--process_port", "29500"]
    words += ["--acceleration_framework_config_keypairs", "accelerated-peft-autogptq", "/a.yaml"]
    words += ["--defaults_config_path", str(tmp_path / "defaults.yaml")]
    words += ["--accelerate_config", "fsdp.yaml", "--run_only_scenarios", "accelerated-peft-gptq"]
    words += ["--no_data_processing", "--dataset_save_path", "kept"]
    chosen = script.planned(script.parser().parse_args(words)).cells
    assert [cell.num_gpus for cell in chosen] == [2, 4] * 3
    text = " ".join(chosen[1].command)
    for part in ("--packing False", "--max_seq_len 512", "--per_device_train_batch_size 2",
                 "--gradient_accumulation_steps 2", "{data}/cache_all.json"):  # fmt: skip
        assert f" {part}" in text
    assert "--max_steps" not in text
    assert chosen[1].launch_options == ("--config_file", "fsdp.yaml")
    assert set(chosen[1].environment.values()) == {"/a.yaml"}


def test_the_readme_scenario_plans_without_the_scripts_too(clone: Path) -> None:
    assert len(plan(clone, command="sft_trainer").cells) == 12


def benchmark(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "benchmark.py", *map(str, words)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_model_that_can_not_be_had_is_one_line_before_the_first_cell(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    scenario = {"name": "a", "arguments": {"model_name_or_path": ["no/such-model"]},
                "command": "true {arguments}"}  # fmt: skip
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"scenarios": [scenario]}))
    done = benchmark("--scenarios_config_path", "a.yaml", "--preload_models")
    assert done.returncode == 1
    assert done.stderr.startswith("benchmark.py: the model no/such-model can't be had: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "benchmark_results").exists()


def test_results_are_where_fms_has_them_and_data_where_it_is_told_to_be(tmp_path: Path) -> None:
    scenario = {
        "name": "a", "command": "true {training_data_path}", "arguments": {},
        "data_processing": {"dataset_name": "rows.jsonl", "response_template": "Response:"},
    }  # fmt: skip
    rows = {"instruction": "Who?", "input": "", "output": "Anna."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"scenarios": [scenario]}))
    done = benchmark("--scenarios_config_path", "a.yaml", "--dataset_save_path", "kept")
    assert done.returncode == 0, done.stderr
    results = tmp_path / "benchmark_results"
    (data,) = (tmp_path / "kept").iterdir()
    assert (results / "data" / data.name).read_bytes() == data.read_bytes()
    for name in ("script.json", "requirements.txt", "raw_summary.csv", "benchmarks.csv"):
        assert (results / name).is_file()
    cell = results / "exp_0"
    for name in ("stdout", "stderr", "results.json", "command.sh"):
        assert (cell / name).is_file()
    assert (cell / "hf").is_dir()
    assert json.loads((results / "script.json").read_text())["dataset_save_path"] == "kept"
