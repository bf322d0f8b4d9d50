"""The original's files: as many cells as it would make, with the arguments it would give."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from ergmeter.bench.plan.cells import Cell
from ergmeter.bench.plan.plan import UnevenBatch, plan, shared
from ergmeter.errors import UsageError

DEFAULTS = """
use_flash_attn: True
response_template: "\\n### Answer:"
num_train_epochs: 1
gradient_accumulation_steps: 1
weight_decay: 0.01
adam_epsilon: 1e-4
max_steps: 100
"""
CONTENTS = """
framework_configs:
    - shortname: quick-kernels
      plugins: [kernels]
      filename: quick-kernels-sample.yaml
    - shortname: four-bit
      plugins: [four]
      filename: four-bit-sample.yaml
    - shortname: four-bit-quick
      plugins: [four, kernels]
      filename: four-bit-quick-sample.yaml
"""
SCENARIOS = """
scenarios:
    -   name: full
        framework_config:
            -
            - quick-kernels
        arguments:
            learning_rate: 2e-5
            model_name_or_path:
                - 'org/small'
                - 'org/middle'
                - 'org/large'
            torch_dtype: bfloat16
            weight_decay: 0.5
    -   name: adapters
        framework_config:
            - four-bit
            - four-bit-quick
        arguments:
            fp16: True
            learning_rate: 2e-4
            peft_method: lora
            r: 16
            target_modules: ["q_proj", "k_proj"]
            model_name_or_path: ['org/small', 'org/large']
            max_steps: null
    -   name: mixture
        slow: True
        arguments:
            packing: False
            gradient_accumulation_steps: 16
            model_name_or_path: ['org/experts']
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "defaults.yaml").write_text(DEFAULTS)
    (tmp_path / "CONTENTS.yaml").write_text(CONTENTS)
    (tmp_path / "scenarios.yaml").write_text(SCENARIOS)
    return tmp_path / "scenarios.yaml"


def flag(cell: Cell, name: str) -> list[str]:
    """The values that follow a flag of the command."""
    if f"--{name}" not in cell.command:
        return []
    after = cell.command[cell.command.index(f"--{name}") + 1 :]
    values = []
    for word in after:
        if word.startswith("--"):
            break
        values.append(word)
    return values


def test_cells_are_as_many_as_a_hand_count_has(files: Path) -> None:
    made = plan(files, command="sft_trainer")
    # full: 3 models x 2 frameworks x 2 batches x 2 numbers of GPUs = 24;
    # adapters: 2 x 2 x 2 x 2 = 16; the slow one only if named.
    assert Counter(cell.scenario for cell in made.cells) == {"full": 24, "adapters": 16}
    assert made.settings["slow"] == ["mixture"]
    more = plan(files, command="sft_trainer", num_gpus=[1, 2, 4], max_seq_len=[512, 1024])
    # 3 x 2 x 2 x 3 x 2 = 72 and 2 x 2 x 2 x 3 x 2 = 48
    assert Counter(cell.scenario for cell in more.cells) == {"full": 72, "adapters": 48}


def test_cells_come_in_the_originals_order(files: Path) -> None:
    cells = plan(files, command="sft_trainer").cells
    names = ("model_name_or_path", "framework_config", "effective_batch_size", "num_gpus")
    told = [tuple(cell.settings[name] for name in names) for cell in cells[:9]]
    assert told == [
        ("org/small", "none", 4, 1),
        ("org/small", "none", 4, 2),
        ("org/small", "none", 8, 1),
        ("org/small", "none", 8, 2),
        ("org/small", "quick-kernels", 4, 1),
        ("org/small", "quick-kernels", 4, 2),
        ("org/small", "quick-kernels", 8, 1),
        ("org/small", "quick-kernels", 8, 2),
        ("org/middle", "none", 4, 1),
    ]
    assert [cell.index for cell in cells] == list(range(40))


def test_the_command_has_the_arguments_that_the_original_gives(files: Path) -> None:
    # Data that FMS's program made, under its name; ours would have a digest in it.
    cell = plan(files, command="sft_trainer", data_stage=False).cells[1]
    assert cell.command == (
        *("{python}", "-m", "tuning.sft_trainer"),
        *("--model_name_or_path", "org/small"),
        *("--packing", "True"),
        *("--max_seq_len", "4096"),
        *("--training_data_path", "{data}/cache_all.json"),
        *("--use_flash_attn", "True"),
        *("--response_template", "\n### Answer:"),
        *("--num_train_epochs", "1"),
        *("--gradient_accumulation_steps", "1"),
        *("--adam_epsilon", "1e-4"),
        *("--max_steps", "100"),
        *("--learning_rate", "2e-5"),
        *("--torch_dtype", "bfloat16"),
        *("--weight_decay", "0.5"),
        *("--per_device_train_batch_size", "2"),  # 4 on 2 GPUs
        *("--output_dir", "{hf}"),
        *("--skip_memory_metrics", "False"),
    )
    assert cell.launch == "accelerate"
    assert cell.launch_options == ()
    (files.parent / "accelerate.yaml").write_text("num_machines: 1\n")
    cell = plan(files, command="sft_trainer").cells[1]
    assert cell.launch_options == ("--config_file", str(files.parent / "accelerate.yaml"))


def test_a_framework_is_a_file_in_the_environment(files: Path) -> None:
    cells = plan(files, command="sft_trainer").cells
    assert cells[0].environment == {}
    assert cells[4].environment == {
        "ACCELERATION_FRAMEWORK_CONFIG_FILE": str(files.parent / "quick-kernels-sample.yaml")
    }


def test_lists_are_several_values_and_null_removes_a_default(files: Path) -> None:
    cell = plan(files, command="sft_trainer", only=["adapters"]).cells[0]
    assert flag(cell, "target_modules") == ["q_proj", "k_proj"]
    assert cell.settings["target_modules"] == "q_proj k_proj"
    assert flag(cell, "max_steps") == []
    assert "max_steps" not in cell.settings


def test_what_one_scenario_replaces_stays_a_default_for_the_next(files: Path) -> None:
    cells = {cell.scenario: cell for cell in plan(files, command="sft_trainer").cells}
    assert flag(cells["full"], "weight_decay") == ["0.5"]
    assert flag(cells["adapters"], "weight_decay") == ["0.01"]


def test_a_slow_scenario_is_run_by_name_and_packing_false_is_false(files: Path) -> None:
    cells = plan(files, command="sft_trainer", only=["mixture"], packing=None).cells
    assert len(cells) == 4
    assert flag(cells[0], "packing") == ["False"]
    assert cells[0].settings["packing"] is False
    # For compatibility the accumulation has no part in it: 4 on 1 GPU is 4 a device.
    assert flag(cells[0], "per_device_train_batch_size") == ["4"]
    assert flag(cells[0], "gradient_accumulation_steps") == ["16"]
    both = plan(files, command="sft_trainer", only=["full"], packing=[False]).cells
    assert {cell.settings["packing"] for cell in both} == {False}


@pytest.mark.parametrize(
    ("given", "effective", "devices", "added"),
    [
        ({"gradient_accumulation_steps": 1}, 8, 2, {"per_device_train_batch_size": 4}),
        ({"gradient_accumulation_steps": 4}, 8, 1, {"per_device_train_batch_size": 8}),
        ({"per_device_train_batch_size": 2}, 16, 2, {"gradient_accumulation_steps": 4}),
        ({}, 8, 4, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}),
        ({"per_device_train_batch_size": 2}, None, 2, {}),
    ],
)
def test_a_batch_is_shared_by_the_originals_rule(
    given: dict[str, int], effective: int | None, devices: int, added: dict[str, int]
) -> None:
    assert shared(given, effective=effective, devices=devices) == added


@pytest.mark.parametrize(
    ("given", "effective", "devices", "said"),
    [
        ({"gradient_accumulation_steps": 1}, 4, 3, "4 on 3 devices does not divide"),
        ({"gradient_accumulation_steps": 1}, 2, 4, "2 on 4 devices does not divide"),
        ({"per_device_train_batch_size": 3}, 8, 1, "in batches of 3 does not divide"),
        ({"per_device_train_batch_size": 8}, 4, 1, "in batches of 8 does not divide"),
        (
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
            4,
            1,
            "are both given",
        ),
    ],
)
def test_a_batch_that_does_not_divide_is_an_error(
    given: dict[str, int], effective: int, devices: int, said: str
) -> None:
    with pytest.raises(UnevenBatch, match=said):
        shared(given, effective=effective, devices=devices)


def test_an_uneven_matrix_is_told_once_with_its_scenario(files: Path) -> None:
    with pytest.raises(UsageError) as told:
        plan(files, command="sft_trainer", num_gpus=[3], effective_batch_size=[4], only=["full"])
    assert str(told.value) == (
        f"{files}: scenario 'full': effective_batch_size 4 on 3 devices does not divide evenly;"
        " `exclude` leaves such cells out, a constraint (effective_batch_size % num_gpus == 0)"
        " skips them"
    )


def test_an_unknown_framework_is_an_error_with_the_nearest(files: Path) -> None:
    files.write_text(SCENARIOS.replace("- four-bit-quick", "- four-bits-quick"))
    with pytest.raises(UsageError, match=r"'adapters'.*'four-bits-quick'.*mean four-bit-quick"):
        plan(files, command="sft_trainer")


def test_files_by_keypairs_go_before_the_list(files: Path) -> None:
    cells = plan(files, command="sft_trainer", frameworks={"quick-kernels": "/mine.yaml"}).cells
    assert cells[4].environment["ACCELERATION_FRAMEWORK_CONFIG_FILE"] == "/mine.yaml"


def test_a_list_of_frameworks_without_files_is_no_list(files: Path) -> None:
    (files.parent / "CONTENTS.yaml").write_text("framework_configs: [{shortname: a}]\n")
    with pytest.raises(UsageError, match=r"line 1: framework_configs\[0\].filename is missing"):
        plan(files, command="sft_trainer")


def test_data_is_made_once_for_all_models_or_once_for_each_with_a_tokenizer(files: Path) -> None:
    (shared,) = plan(files, command="sft_trainer").settings["data"]
    assert re.fullmatch(r"cache_all_[0-9a-f]{16}\.json", shared["file"])
    files.write_text("data_processing: {dataset_name: org/data, tokenize: True}\n" + SCENARIOS)
    made = plan(files, command="sft_trainer").settings["data"]
    assert [job["file"].rpartition("_")[0] for job in made] == [
        "cache_org_small",
        "cache_org_middle",
        "cache_org_large",
    ]
    assert [job["model"] for job in made] == ["org/small", "org/middle", "org/large"]
    skipped = plan(files, command="sft_trainer", data_stage=False)
    assert skipped.settings["data"] == []
    assert flag(skipped.cells[0], "training_data_path") == ["{data}/cache_org_small.json"]


def test_memory_metrics_of_the_trainer_can_be_left_out(files: Path) -> None:
    cell = plan(files, command="sft_trainer", log_memory_hf=False).cells[0]
    assert flag(cell, "skip_memory_metrics") == ["True"]


def test_a_scenarios_own_word_on_the_trainers_tracker_holds_unless_another_is_asked_for(
    files: Path,
) -> None:
    with_word = "arguments:\n            skip_memory_metrics: true"
    files.write_text(SCENARIOS.replace("arguments:", with_word, 1))
    first = plan(files, command="sft_trainer").cells[0]
    assert flag(first, "skip_memory_metrics") == ["True"]
    asked = plan(files, command="sft_trainer", log_memory_hf=True).cells[0]
    assert flag(asked, "skip_memory_metrics") == ["False"]


# The shape of the file that FMS keeps for one family of models: a model each, one scenario slow,
# with frameworks and an accumulation of its own.
FAMILY = """
scenarios:
    -   name: full
        framework_config: [null, quick-kernels]
        arguments: {learning_rate: 2e-5, model_name_or_path: ['org/small']}
    -   name: adapters
        framework_config: [four-bit]
        arguments:
            peft_method: lora
            model_name_or_path: org/small
            weight_decay: null
    -   name: experts
        slow: True
        framework_config: [null, four-bit-quick]
        arguments:
            packing: False
            gradient_accumulation_steps: 16
            model_name_or_path: [org/experts]
"""


def test_a_file_of_one_family_has_the_cells_of_a_hand_count(files: Path) -> None:
    files.write_text(FAMILY)
    made = plan(files, command="sft_trainer")
    # full: 1 model x 2 frameworks x 2 batches x 2 numbers of GPUs; adapters: 1 x 1 x 2 x 2.
    assert Counter(cell.scenario for cell in made.cells) == {"full": 8, "adapters": 4}
    assert made.settings["slow"] == ["experts"]
    slow = plan(files, command="sft_trainer", only=["experts"]).cells
    told = [
        (cell.settings["framework_config"], cell.num_gpus, *flag(cell, "packing"),
         *flag(cell, "per_device_train_batch_size"), *flag(cell, "gradient_accumulation_steps"))
        for cell in slow
    ]  # fmt: skip
    # 1 model x 2 frameworks x 2 batches x 2 numbers of GPUs; its packing takes the axis away.
    assert told == [
        (framework, gpus, "False", batch, "16")
        for framework in ("none", "four-bit-quick")
        for gpus, batch in ((1, "4"), (2, "2"), (1, "8"), (2, "4"))
    ]
    one = [cell for cell in made.cells if cell.scenario == "adapters"]
    assert {flag(cell, "model_name_or_path")[0] for cell in one} == {"org/small"}
    assert {tuple(flag(cell, "weight_decay")) for cell in one} == {()}
    assert {tuple(flag(cell, "adam_epsilon")) for cell in one} == {("1e-4",)}


def test_a_scenario_limited_to_architectures_skips_the_others_in_the_count(files: Path) -> None:
    kinds = """
model_architectures: {org/small: LlamaForCausalLM, org/middle: MistralForCausalLM,
                      org/large: LlamaForCausalLM}
"""
    limited = SCENARIOS.replace("name: full\n", "name: full\n        architectures: [Llama]\n")
    files.write_text(kinds + limited.replace("[Llama]", "[LlamaForCausalLM]"))
    made = plan(files, command="sft_trainer")
    run = [cell for cell in made.cells if not cell.skip]
    # 2 of 3 models x 2 frameworks x 2 x 2 = 16 are run, 8 are named with the reason; 16 as before.
    assert Counter(cell.scenario for cell in run) == {"full": 16, "adapters": 16}
    skipped = {(cell.settings["model_name_or_path"], cell.skip) for cell in made.cells if cell.skip}
    assert skipped == {
        ("org/middle", "the model is a MistralForCausalLM; the scenario is for LlamaForCausalLM")
    }
    assert len(made.cells) == 40
