"""Scenarios of our own kind: what they say is what cells get, and what is wrong is told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ergmeter.bench.plan.cells import Cell, Expectation
from ergmeter.bench.plan.plan import plan
from ergmeter.bench.plan.scenarios import BadCondition, Condition
from ergmeter.config_file import usage_error
from ergmeter.errors import FormatError, UsageError

ADAPTERS: dict[str, Any] = {
    "name": "adapters",
    "framework_config": [None, "bnb"],
    "arguments": {
        "model_name_or_path": ["builtin:tiny"],
        "peft_method": "lora",
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "target_modules": "q_proj v_proj",
        "learning_rate": "2e-4",
        "max_steps": 3,
        "gradient_accumulation_steps": 1,
    },
}
AXES = {"effective_batch_size": [4], "num_gpus": [1], "packing": [False], "max_seq_len": [64]}


def written(folder: Path, scenario: dict[str, Any] | list[Any] = ADAPTERS, **top: Any) -> Path:
    listed = scenario if isinstance(scenario, list) else [scenario]
    path = folder / "scenarios.yaml"
    path.write_text(yaml.safe_dump({"axes": AXES, **top, "scenarios": listed}))
    return path


def changed(**keys: Any) -> dict[str, Any]:
    return {**ADAPTERS, **keys}


def arguments(**keys: Any) -> dict[str, Any]:
    return changed(arguments={**ADAPTERS["arguments"], **keys})


def config(cell: Cell) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(cell.files["train.yaml"])
    return found


def wrong(path: Path, **options: Any) -> str:
    with pytest.raises(UsageError) as told:
        plan(path, **options)
    assert all(line.startswith("  ") for line in str(told.value).splitlines()[1:])
    return str(told.value)


def test_arguments_become_the_configuration_of_erg_train(tmp_path: Path) -> None:
    torch, bnb = plan(written(tmp_path, warmup=2)).cells
    assert torch.command == (
        *("{python}", "-m", "ergmeter", "train", "--config", "{out}/train.yaml"),
        *("--out", "{run}", "--no-report"),
    )
    assert config(torch) == {
        "model": {"name": "builtin:tiny", "max_seq_len": 64},
        "data": {"packing": False},
        "tuning": {
            "backend": "torch",
            "mode": "lora",
            "lora": {
                "r": 8,
                "alpha": 16,
                "dropout": 0.0,
                "target_modules": ["q_proj", "v_proj"],
            },
        },
        "train": {
            "lr": 0.0002,
            "max_steps": 3,
            "grad_accum": 1,
            "batch_size": 4,
            "output_dir": "{hf}",
        },
        "metrics": {"results_csv": "{out}/energy_results.csv", "warmup_s": 2.0},
        "seed": 42,
    }
    assert config(bnb)["tuning"]["backend"] == "bnb"
    assert config(bnb)["tuning"]["mode"] == "qlora"
    assert config(bnb)["tuning"]["bits"] == 4


def test_a_cell_knows_its_directory_when_it_starts(tmp_path: Path) -> None:
    cell = plan(written(tmp_path)).cells[0].filled(tmp_path / "results" / "exp_0")
    assert cell.command[-2] == str(tmp_path / "results" / "exp_0" / "run")
    assert config(cell)["train"]["output_dir"] == str(tmp_path / "results" / "exp_0" / "hf")
    assert "{" not in " ".join(cell.command)


@pytest.mark.parametrize(
    ("given", "section", "has"),
    [
        ({"torch_dtype": "bfloat16"}, "train", {"bf16": True}),
        ({"torch_dtype": "bfloat16", "bf16": True}, "train", {"bf16": True}),
        ({"use_flash_attn": True}, "model", {"attn_implementation": "flash_attention_2"}),
        ({"evaluation_strategy": "no"}, "train", {"evaluation_strategy": "no"}),
        ({"train.optim": "adamw_torch_fused"}, "train", {"optim": "adamw_torch_fused"}),
        ({"training_data_path": "my.jsonl"}, "data", {"train_path": "my.jsonl"}),
    ],
)
def test_further_arguments_are_mapped(
    tmp_path: Path, given: dict[str, Any], section: str, has: dict[str, Any]
) -> None:
    found = config(plan(written(tmp_path, arguments(**given))).cells[0])
    assert {name: found[section].get(name) for name in has} == has


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"adam_epsilon": "1e-4"}, "no argument 'adam_epsilon'"),
        ({"learning_rat": 1}, "no argument 'learning_rat'; did you mean learning_rate?"),
        ({"peft_method": "pt"}, "no peft_method 'pt'"),
        ({"torch_dtype": "float16", "bf16": True}, "torch_dtype float16 and bf16"),
        ({"torch_dtype": "bfloat17"}, "did you mean bfloat16?"),
        ({"torch_dtype": "bfloat16", "peft_method": None}, "float32; write torch_dtype: null"),
        ({"logging_strategy": "epoch"}, "logging_strategy 'epoch'"),
        ({"max_seq_length": 65}, "model.max_seq_len is given twice: 64 and 65"),
    ],
)
def test_what_erg_train_cannot_do_is_an_error_with_its_name(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    told = wrong(written(tmp_path, arguments(**given)))
    assert "scenario 'adapters'" in told
    assert said in told


def test_axes_over_any_argument_multiply(tmp_path: Path) -> None:
    path = written(tmp_path, changed(axes={"optim": ["adamw_torch", "sgd"], "r": [4, 8, 16]}))
    cells = plan(path).cells
    assert len(cells) == 2 * 2 * 3  # frameworks, optimizers, ranks
    assert {config(cell)["tuning"]["lora"]["r"] for cell in cells} == {4, 8, 16}
    assert {cell.settings["optim"] for cell in cells} == {"adamw_torch", "sgd"}


def test_batches_written_out_need_no_effective_batch(tmp_path: Path) -> None:
    path = written(tmp_path, changed(axes={"per_device_train_batch_size": [1, 2]}))
    axes = {name: one for name, one in AXES.items() if name != "effective_batch_size"}
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "axes": axes}))
    cells = plan(path).cells
    assert [config(cell)["train"]["batch_size"] for cell in cells] == [1, 2, 1, 2]
    assert "both given" in wrong(path, effective_batch_size=[4])


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    cells = plan(written(tmp_path), num_gpus=[1, 2], max_seq_len=[32]).cells
    assert [cell.num_gpus for cell in cells] == [1, 2, 1, 2]
    assert {cell.settings["max_seq_len"] for cell in cells} == {32}
    assert [cell.launch for cell in cells] == ["plain", "torchrun"] * 2
    assert [config(cell)["train"]["batch_size"] for cell in cells] == [4, 2, 4, 2]


def test_excluded_cells_are_gone_and_included_ones_are_added(tmp_path: Path) -> None:
    scenario = changed(
        exclude=[{"framework_config": "bnb", "num_gpus": [2, 4]}],
        include=[{"num_gpus": 8, "effective_batch_size": 16, "framework_config": "none"}],
    )
    cells = plan(written(tmp_path, scenario), num_gpus=[1, 2, 4]).cells
    told = [(cell.settings["framework_config"], cell.num_gpus) for cell in cells]
    assert told == [("none", 1), ("none", 2), ("none", 4), ("bnb", 1), ("none", 8)]
    assert config(cells[-1])["train"]["batch_size"] == 2


def test_constraints_skip_with_their_reason_also_what_would_not_divide(tmp_path: Path) -> None:
    scenario = changed(
        constraints=[
            {"require": "effective_batch_size % num_gpus == 0", "reason": "uneven"},
            "not (framework_config == 'bnb' and num_gpus > 1)",
        ]
    )
    cells = plan(written(tmp_path, scenario), num_gpus=[1, 2, 3]).cells
    assert [cell.skip for cell in cells] == [
        *("", "", "uneven"),
        *("", "needs not (framework_config == 'bnb' and num_gpus > 1)", "uneven"),
    ]


@pytest.mark.parametrize("text", ["__import__('os')", "x.y > 1", "[a for a in b]", "1 +", "f(1)"])
def test_a_condition_is_nothing_but_a_comparison(text: str) -> None:
    with pytest.raises(BadCondition):
        Condition.of(text)


def test_architectures_limit_a_scenario(tmp_path: Path) -> None:
    models = ["builtin:tiny", "builtin:tiny-seq2seq", "org/other"]
    scenario = arguments(model_name_or_path=models) | {
        "framework_config": [None],
        "architectures": ["LlamaForCausalLM"],
    }
    assert "architecture of org/other is not known" in wrong(written(tmp_path, scenario))
    known = {"org/other": "MistralForCausalLM"}
    cells = plan(written(tmp_path, scenario, model_architectures=known)).cells
    assert [cell.skip for cell in cells] == [
        "",
        "the model is a T5ForConditionalGeneration; the scenario is for LlamaForCausalLM",
        "the model is a MistralForCausalLM; the scenario is for LlamaForCausalLM",
    ]


def test_claims_are_of_all_cells_or_of_some(tmp_path: Path) -> None:
    scenario = changed(
        expects=[
            {"pattern": "kernels? on"},
            {"tuning": "qlora", "when": {"framework_config": "bnb"}},
        ]
    )
    torch, bnb = plan(written(tmp_path, scenario)).cells
    assert torch.expects == (Expectation("pattern", "kernels? on", "kernels? on"),)
    assert bnb.expects == (*torch.expects, Expectation("fact", "tuning", "qlora"))


def test_any_command_by_template(tmp_path: Path) -> None:
    scenario = {
        "name": "mine",
        "command": "python train.py --lr {lr} --out {out} --name 'a {{b}}' {arguments}",
        "launch": "torchrun",
        "axes": {"lr": [0.1, 0.2], "flag": [None, "on"]},
        "environment": {"WORLD": "{num_gpus}", "AT": "{hf}"},
        "arguments": {"sizes": [1, 2]},
        "timeout": "2m",
    }
    path = tmp_path / "scenarios.yaml"
    path.write_text(yaml.safe_dump({"scenarios": [scenario]}))
    cells = plan(path, num_gpus=[2]).cells
    assert len(cells) == 4
    assert cells[0].command == (
        *("python", "train.py", "--lr", "0.1", "--out", "{out}", "--name", "a {b}"),
        *("--sizes", "1", "2"),
    )
    assert cells[3].command[-5:] == ("--flag", "on", "--sizes", "1", "2")
    assert cells[0].environment == {"WORLD": "2", "AT": "{hf}"}
    assert (cells[0].launch, cells[0].timeout_s, cells[0].num_gpus) == ("torchrun", 120.0, 2)


def test_an_axis_that_changes_nothing_is_an_error(tmp_path: Path) -> None:
    scenario = {"name": "mine", "command": "python x.py", "arguments": {}, "axes": {"lr": [1, 2]}}
    path = tmp_path / "scenarios.yaml"
    path.write_text(yaml.safe_dump({"scenarios": [scenario]}))
    assert "axis lr changes nothing" in wrong(path)


def test_settings_of_the_whole_file_hold_for_each_scenario_unless_it_says_otherwise(
    tmp_path: Path,
) -> None:
    other = changed(name="other", timeout=5, repeats=1, environment={"A": "2"})
    path = written(
        tmp_path, [ADAPTERS, other], timeout="1h", repeats=2, environment={"A": "1", "B": "1"}
    )
    cells = plan(path).cells
    of = {cell.scenario: cell for cell in cells}
    assert len(cells) == 2 * 2 + 2
    assert (of["adapters"].timeout_s, of["other"].timeout_s) == (3600.0, 5.0)
    assert of["other"].environment == {"A": "2", "B": "1"}


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        (changed(framework_config=["bnbb"]), "'bnbb' is not known; did you mean bnb?"),
        (changed(framwork_config=["bnb"]), "framwork_config is no key; did you mean framework_con"),
        (changed(repeats=0), "repeats must be 1 or more; got 0"),
        (changed(timeout="soon"), "timeout must be a number of seconds"),
        (changed(slow="yes"), "slow must be true or false; got 'yes'"),
        (changed(launch="acelerate"), "did you mean accelerate?"),
        (changed(axes={"optim": []}), "axes.optim must not be empty; got []"),
        (changed(axes={"num_gpus": ["two"]}), "num_gpus takes whole numbers from 1; got 'two'"),
        (changed(axes={"packing": ["False"]}), "packing takes true and false; got 'False'"),
        (
            changed(exclude=[{"num_gpu": 1}]),
            "'num_gpu' is not one of its settings; did you mean num_gpus",
        ),
        (changed(constraints=["num_gpsu > 1"]), "'num_gpsu' is not one of its settings"),
        (changed(constraints=["import os"]), "is not a valid condition"),
        (changed(expects=[{"pattern": "("}]), "expects[0] pattern '('"),
        (changed(environment={"A": "{num_gpu}"}), "{num_gpu} in the command or environment"),
        (changed(command="python '"), "command"),
        ({"name": "empty"}, "arguments is missing: write `arguments: {}` if there are none"),
        (
            changed(axes={"efective_batch_size": [4]}),
            "axes: erg train has no argument 'efective_batch_size'; did you mean effective_batch_s",
        ),
        (
            changed(expects=[{"atention": "sdpa"}]),
            "expects 'atention', which erg train does not record; did you mean attention?",
        ),
        ({"arguments": {}}, "scenarios[0].name is missing"),
        ([ADAPTERS, ADAPTERS], "there are two of this name"),
    ],
)
def test_what_is_wrong_is_told_in_one_line_with_file_and_nearest(
    tmp_path: Path, scenario: Any, said: str
) -> None:
    path = written(tmp_path, scenario)
    told = wrong(path)
    assert told.startswith(f"{path}: ")
    assert said in told


def test_a_model_whose_folder_is_not_here_is_warned_of(tmp_path: Path) -> None:
    here, gone = tmp_path / "here", tmp_path / "gone"
    here.mkdir()
    models = [str(here), str(gone), "org/name", "builtin:tiny"]
    found = plan(written(tmp_path, arguments(model_name_or_path=models)))
    assert found.warnings == (
        f"scenario 'adapters': its model, the folder {gone}, does not exist here",
    )


def test_a_fact_that_a_program_of_ones_own_tells_is_not_known_before(tmp_path: Path) -> None:
    scenario = {"name": "a", "command": "run {run}", "arguments": {}, "axes": {"num_gpus": [1]}}
    path = tmp_path / "scenarios.yaml"
    path.write_text(yaml.safe_dump({"scenarios": [{**scenario, "expects": [{"atention": "x"}]}]}))
    assert [one.name for one in plan(path).cells[0].expects] == ["atention"]


@pytest.mark.parametrize("command", ["erg train", "sft_trainer"])
@pytest.mark.parametrize("name", ["foak-fast-kernels", "accelerated-peft-bnb"])
def test_a_shortname_of_fms_without_its_list_says_where_the_list_is_looked_for(
    tmp_path: Path, command: str, name: str
) -> None:
    path = written(tmp_path, changed(framework_config=[name]))
    told = wrong(path, command=command)
    assert f"framework_config '{name}' is not known; there are none, torch, bnb" in told
    assert "--command sft_trainer" in told
    places = (tmp_path, tmp_path / "../../sample-configurations")
    there = " or ".join(f"{folder}/CONTENTS.yaml" for folder in places)
    assert f"which is not at {there}: copy it there, or give --contents" in told
    (tmp_path / "CONTENTS.yaml").write_text("framework_configs: []")
    assert "which is not at" not in wrong(path, command=command)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    told = wrong(written(tmp_path, changed(slow=3, repeats=-1), timeot=3))
    lines = [line.partition(": ")[2] for line in told.splitlines()[1:]]
    assert sorted(lines) == [
        "scenario 'adapters': repeats must be 1 or more; got -1",
        "scenario 'adapters': slow must be true or false; got 3",
        "timeot is no key; did you mean timeout?",
    ]


def test_an_error_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "scenarios.yaml"
    path.write_text("scenarios:\n- name: a\n  arguments: {}\n  axes:\n    lr: []\n")
    assert wrong(path) == (f"{path}: line 5: scenario 'a': axes.lr must not be empty; got []")
    path.write_text("scenarios:\n- {name: a, arguments: {}}\nrepeats: 1\nrepeats: 2\n")
    assert wrong(path) == f"{path}, line 4: 'repeats' is also in line 3; keep one"


def test_problems_of_one_kind_are_told_once_with_their_number(tmp_path: Path) -> None:
    """As of FMS's files with erg train, which reads none of its frameworks' files."""
    problems = ["scenario 'a': packing takes true and false"]
    for scenario, name in (("a", "one"), ("a", "two"), ("b", "one"), ("b", "one")):
        problems.append(f"scenario {scenario!r}: framework_config {name!r} is not known")
    problems += [f"problem {number}" for number in range(21)]
    assert str(usage_error(tmp_path / "scenarios.yaml", problems)).splitlines() == [
        f"{tmp_path / 'scenarios.yaml'}:",
        "  scenario 'a': framework_config 'one' is not known (and 2 more like it)",
        "  scenario 'a': packing takes true and false",
        *(f"  problem {number}" for number in range(18)),
        "  and 3 others",
    ]


def test_an_unknown_scenario_is_an_error_with_the_nearest(tmp_path: Path) -> None:
    told = wrong(written(tmp_path), only=["adaptors"])
    assert told.endswith("there is no scenario 'adaptors'; did you mean adapters?")


def test_a_file_that_is_no_yaml_says_so(tmp_path: Path) -> None:
    path = tmp_path / "scenarios.yaml"
    path.write_text("scenarios: [")
    with pytest.raises(UsageError, match=r"scenarios.yaml, line 1, column 13 is not YAML: .*node"):
        plan(path)
    with pytest.raises(FormatError, match="no file at"):
        plan(tmp_path / "none.yaml")


def test_cells_are_excluded_by_what_follows_from_their_settings(tmp_path: Path) -> None:
    by_batch = changed(exclude=[{"per_device_train_batch_size": 2}])
    cells = plan(written(tmp_path, by_batch), num_gpus=[1, 2]).cells
    assert [cell.num_gpus for cell in cells] == [1, 1]  # 4 on 2 GPUs are 2 on each
    bare = {name: one for name, one in ADAPTERS.items() if name != "framework_config"}
    for none in ("none", None):
        by_framework = {**bare, "exclude": [{"framework_config": none, "num_gpus": 2}]}
        cells = plan(written(tmp_path, by_framework), num_gpus=[1, 2]).cells
        assert [cell.num_gpus for cell in cells] == [1]


def mine(folder: Path, **keys: Any) -> Path:
    path = folder / "scenarios.yaml"
    path.write_text(yaml.safe_dump({"scenarios": [{"name": "mine", "arguments": {}, **keys}]}))
    return path


def test_a_framework_that_does_not_reach_the_command_is_an_error(tmp_path: Path) -> None:
    three = {"framework_config": [None, "bnb", "unsloth"]}
    told = wrong(mine(tmp_path, command="python x.py {arguments}", **three))
    assert "framework_config bnb, unsloth changes nothing" in told
    named = plan(mine(tmp_path, command="python x.py {framework_config} {arguments}", **three))
    assert [cell.command[-1] for cell in named.cells] == ["none", "bnb", "unsloth"]


def test_arguments_that_the_command_does_not_take_are_an_error(tmp_path: Path) -> None:
    given = {"arguments": {"lr": 0.1, "decay": 0.2}, "axes": {"width": [64]}}
    told = wrong(mine(tmp_path, command="python x.py {lr}", **given))
    assert "the command takes no decay, width: write {decay} or {arguments} into it" in told
    told = wrong(mine(tmp_path, command="python x.py"), max_seq_len=[32])
    assert "takes no max_seq_len" in told
    (cell,) = plan(mine(tmp_path, command="python x.py {lr} {arguments}", **given)).cells
    assert cell.command[2:] == ("0.1", "--width", "64", "--decay", "0.2")


def test_an_apostrophe_in_a_word_quotes_nothing(tmp_path: Path) -> None:
    problems = ["it can't be A and won't run", "it can't be B and won't run"]
    problems += ["name 'x' is not known", 'name "it\'s" is not known']
    assert str(usage_error(tmp_path / "scenarios.yaml", problems)).splitlines()[1:] == [
        "  name 'x' is not known (and 1 more like it)",
        "  it can't be A and won't run",
        "  it can't be B and won't run",
    ]
