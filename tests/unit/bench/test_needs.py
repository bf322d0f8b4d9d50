"""What cells import and this interpreter lacks is said once, before any of them starts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ergmeter.bench.execute import launching
from ergmeter.bench.plan.erg_train import missing_packages
from ergmeter.bench.plan.plan import plan

Erg = Callable[..., tuple[int, str, str]]
AXES = {"effective_batch_size": [4, 8], "num_gpus": [1], "packing": [False], "max_seq_len": [64]}


def scenarios(folder: Path, **keys: Any) -> Path:
    arguments = {"model_name_or_path": "builtin:tiny", "learning_rate": 0.001}
    arguments |= keys.pop("arguments", {})
    path = folder / "scenarios.yaml"
    made = {"name": "a", "arguments": arguments, "axes": AXES, **keys}
    path.write_text(yaml.safe_dump({"scenarios": [made]}))
    return path


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these were not installed."""
    for name in ("torch", "transformers", "peft", "bitsandbytes", "trl", "tuning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("ERGMETER_FMS_PYTHON", "/none/python")


LORA = {"peft_method": "lora", "r": 4, "lora_alpha": 8}


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        ({}, "torch, transformers: pip install 'ergmeter[train]'"),
        ({"arguments": LORA}, "torch, transformers, peft: pip"),
        ({"arguments": LORA, "framework_config": ["bnb"]}, "torch, transformers, peft, bitsandb"),
        ({"arguments": {"optim": "adamw_bnb_8bit"}}, "torch, transformers, bitsandbytes: pip"),
        ({"arguments": {"train.trainer": "trl"}}, "torch, transformers, trl: pip"),
        ({"command": "sft_trainer"}, "/none/python: `./dev fms` puts fms-hf-tuning there"),
        ({"command": "run {arguments}", "launch": "torchrun"}, "torch: pip install"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, keys: dict[str, Any], missing: str) -> None:
    cells = plan(scenarios(tmp_path, **keys)).cells
    told = missing_packages(cells, has_gpus=False)
    assert told.startswith(f"for these cells {sys.executable} lacks {missing}")


@pytest.mark.usefixtures("bare")
def test_of_a_program_of_ones_own_nothing_is_asked(tmp_path: Path) -> None:
    assert (
        missing_packages(plan(scenarios(tmp_path, command="run {arguments}")).cells, has_gpus=True)
        == ""
    )
    elsewhere = scenarios(tmp_path, environment={"PYTHONPATH": "/mine"})
    assert missing_packages(plan(elsewhere).cells, has_gpus=True) == ""


def test_unsloth_has_an_interpreter_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERGMETER_UNSLOTH_PYTHON", str(tmp_path / "python"))
    path = scenarios(tmp_path, framework_config=["unsloth"], arguments=LORA)
    assert f"lacks {tmp_path}/python: `./dev unsloth` makes it" in missing_packages(
        plan(path).cells, has_gpus=True
    )
    monkeypatch.setenv("ERGMETER_UNSLOTH_PYTHON", sys.executable)
    assert missing_packages(plan(path).cells, has_gpus=True) == ""


def test_sft_trainer_has_an_interpreter_of_its_own_which_starts_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And --command names another, of which nothing is asked here."""
    arguments = {"gradient_accumulation_steps": 1}
    axes = {**AXES, "num_gpus": [2]}
    path = scenarios(tmp_path, command="sft_trainer", arguments=arguments, axes=axes)
    monkeypatch.setenv("ERGMETER_FMS_PYTHON", str(tmp_path / "python"))
    lacks = missing_packages(plan(path).cells, has_gpus=True)
    assert lacks.count("lacks") == 1
    assert f"lacks {tmp_path}/python: `./dev fms` puts fms-hf-tuning there" in lacks
    assert "--command '/path/of/python -m tuning.sft_trainer {arguments}'" in lacks
    own = plan(path, command="/opt/python -m tuning.sft_trainer {arguments}")
    assert missing_packages(own.cells, has_gpus=True) == ""
    for made, python in ((plan(path), str(tmp_path / "python")), (own, "/opt/python")):
        for has_gpus, launcher in ((True, "accelerate.commands.launch"),
                                   (False, "torch.distributed.run")):  # fmt: skip
            words = launching.start(made.cells[0], tmp_path / "exp_0", has_gpus=has_gpus).words
            recorded = words[words.index("--") + 1 :]
            assert recorded[:3] == (python, "-m", launcher)
            ranks = recorded[recorded.index("--") + 1 :]
            assert ranks[:3] == (python, "-m", "tuning.sft_trainer")


def test_a_run_stops_before_its_first_cell_and_a_plan_says_it(
    erg: Erg, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    path = scenarios(tmp_path)
    code, _, err = erg("bench", "run", path, "--out", tmp_path / "out")
    assert code == 1
    assert err.count("lacks transformers: pip install 'ergmeter[train]'") == 1
    assert not (tmp_path / "out").exists()
    for words in (("plan", path), ("run", path, "--out", tmp_path / "out", "--dry-run")):
        code, _, err = erg("bench", *words)
        assert code == 0
        assert "lacks transformers" in err
