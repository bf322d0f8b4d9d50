"""A training's YAML: read as it is meant, or everything that is wrong with it at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ergmeter.errors import UsageError
from ergmeter.hardware.grid import grid_named
from ergmeter.runlog.settings import Settings
from ergmeter.workloads.sft.config_file import SftConfig, load

CONFIGS = Path(__file__).parents[3] / "configs"
MODEL = "model: {name: 'builtin:tiny'}\n"
# The guide's sections, as they stand in it, over what its base file had beside them.
GUIDE = """
model: {name: org/model, type: causal, max_seq_len: 2048}
metrics:
  enable_energy_logging: true
  sample_interval_s: 0.05       # 50ms sampling rate
  warmup_s: 60.0               # 60s warmup period
  log_vram_every_s: 1.0        # VRAM sampling every 1s
  results_csv: "outputs/energy_results.csv"
tuning:
  backend: bnb
  lora:
    r: 32
    alpha: 32          # Matched with Unsloth
    dropout: 0.05
train:
  bf16: false
  fp16: true
  optim: paged_adamw_8bit  # BnB optimized optimizer
"""


GUIDE_UNSLOTH = """
tuning:
  backend: unsloth
  lora:
    r: 32              # Matched with BnB
    alpha: 32
    dropout: 0.05
train:
  bf16: true           # Unsloth prefers bfloat16
  fp16: false
  optim: adamw_torch   # Standard optimizer for Unsloth
"""


def written(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def read(folder: Path, text: str, **changes: object) -> SftConfig:
    return load(written(folder, text), changes=changes)


def wrong(folder: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(written(folder, text))
    return str(caught.value).removeprefix(f"{folder / 'run.yaml'}: ")


def test_the_guide_s_sections_are_read_as_they_are(tmp_path: Path) -> None:
    config = read(tmp_path, GUIDE)
    assert config.metrics.results_csv == Path("outputs/energy_results.csv")
    assert (config.metrics.sample_interval_s, config.metrics.warmup_s) == (0.05, 60.0)
    assert (config.tuning.backend, config.tuning.lora.r, config.tuning.lora.dropout) == (
        "bnb", 32, 0.05,
    )  # fmt: skip
    assert (config.train.fp16, config.train.optim) == (True, "paged_adamw_8bit")
    assert config.model.max_seq_len == 2048
    other = read(tmp_path, MODEL + GUIDE_UNSLOTH)
    assert (other.tuning.backend, other.tuning.lora.dropout) == ("unsloth", 0.05)
    assert (other.train.bf16, other.train.fp16, other.train.optim) == (True, False, "adamw_torch")


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    config = read(tmp_path, MODEL)
    assert (config.task_mode, config.seed, config.tuning.mode) == ("sft", 42, "lora")
    assert config.train.output_dir == Path("outputs/run")
    assert config.train.max_steps is None
    assert config.data.train_path is None
    assert config.has_validation


def test_the_original_s_other_names_mean_the_same(tmp_path: Path) -> None:
    train = read(
        tmp_path,
        MODEL + "train: {learning_rate: 3e-4, lr_scheduler_type: cosine, num_train_epochs: 2,"
        " per_device_train_batch_size: 2, gradient_accumulation_steps: 8, eval_strategy: epoch,"
        " dataloader_num_workers: 2}",
    ).train
    # 3e-4 without a dot is text to YAML 1.1.
    assert (train.lr, train.lr_scheduler, train.epochs) == (0.0003, "cosine", 2.0)
    assert (train.batch_size, train.grad_accum, train.dataloader_workers) == (2, 8, 2)
    assert train.evaluation_strategy == "epoch"


def test_no_is_no_also_where_yaml_makes_it_false(tmp_path: Path) -> None:
    train = read(tmp_path, MODEL + "train:\n  save_strategy: no\n  evaluation_strategy: no").train
    assert (train.save_strategy, train.evaluation_strategy) == ("no", "no")


def test_an_included_file_lies_below_key_by_key(tmp_path: Path) -> None:
    written(tmp_path, MODEL + "train: {lr: 1.0, batch_size: 7}\nseed: 1", "base.yaml")
    written(tmp_path, "include: base.yaml\ntrain: {lr: 2.0}\nseed: 2", "middle.yaml")
    config = read(tmp_path, "include: middle.yaml\nseed: 3")
    assert (config.train.lr, config.train.batch_size, config.seed) == (2.0, 7, 3)
    assert config.merged == {
        "model": {"name": "builtin:tiny"}, "train": {"lr": 2.0, "batch_size": 7}, "seed": 3,
    }  # fmt: skip


def test_a_setting_lies_over_the_included_one_by_whichever_name(tmp_path: Path) -> None:
    written(tmp_path, MODEL + "train: {lr: 1.0, gradient_accumulation_steps: 4}", "base.yaml")
    path = written(tmp_path, "include: base.yaml\ntrain: {learning_rate: 2.0}")
    train = load(path, changes={"train.grad_accum": 2}).train
    assert (train.lr, train.grad_accum) == (2.0, 2)


def test_an_include_is_looked_for_beside_the_file_and_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, MODEL + "seed: 5", "configs/base.yaml")
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, "include: configs/base.yaml", "configs/run.yaml")
    assert load(path).seed == 5  # as the original wrote it
    path.write_text("include: base.yaml")
    assert load(path).seed == 5
    path.write_text("include: nowhere.yaml")
    with pytest.raises(UsageError, match=r"nowhere\.yaml is neither at"):
        load(path)


def test_files_that_include_each_other_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "include: run.yaml", "base.yaml")
    assert "circle" in wrong(tmp_path, "include: base.yaml")


def test_null_brings_the_default_back(tmp_path: Path) -> None:
    written(tmp_path, MODEL + "train: {max_steps: 5}", "base.yaml")
    assert read(tmp_path, "include: base.yaml\ntrain: {max_steps: null}").train.max_steps is None


def test_changes_lie_over_the_file(tmp_path: Path) -> None:
    config = read(tmp_path, MODEL, **{"train.max_steps": 5, "tuning.lora.r": 4, "seed": 9})
    assert (config.train.max_steps, config.tuning.lora.r, config.seed) == (5, 4, 9)
    with pytest.raises(UsageError, match=r"train\.max_step is no key.*train\.max_steps"):
        read(tmp_path, MODEL, **{"train.max_step": 5})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trian: {lr: 1}", "trian is no key; did you mean train?"),
        ("train: {learning_rat: 1}", "did you mean train.learning_rate?"),
        ("train: {max_seq_len: 1}", "train.max_seq_len is no key; did you mean model.max_seq_len?"),
        ("tuning: {lora: {rang: 1}}", "did you mean tuning.lora.rank?"),
        ("metrics: {zzz: 1}", "metrics.zzz is no key; there are enable_energy_logging,"),
        ("mode: sft", "write task_mode"),
        ("train: {load_best_model_at_end: true}", "has no use here"),
        ("seed: many", "line 2: seed must be a whole number; got 'many'"),
        ("seed: true", "seed must be a number; got True"),
        ("seed: -1", "seed must be 0 or more; got -1"),
        ("train: {batch_size: auto}", "the sides of a comparison could differ"),
        ("train: {batch_size: 2.5}", "got 2.5"),
        ("train: {lr: fast}", "train.lr must be a number; got 'fast'"),
        ("train: {lr: 0}", "train.lr must be above 0; got 0"),
        ("train: {lr: .nan}", "train.lr must be a number"),
        ("train: {bf16: 1}", "train.bf16 must be true or false; got 1"),
        ("train: {save_strategy: step}", "did you mean steps?"),
        ("train: {lr: 1, learning_rate: 2}", "are the same setting; keep one"),
        ("train: 5", "train must have keys and values; got 5"),
        ("tuning: {bits: 3}", "must be one of 4, 8"),
        ("tuning: {lora: {dropout: 1}}", "below 1; got 1"),
        ("datasets: {}", "datasets must be a list"),
        ("datasets: [{path: a}]", "datasets[0].type is missing"),
        ("report_to: wandb", "report_to is no key; did you mean train.report_to?"),
        ("metrics: {sinks: wandb}", "metrics.sinks is no key; did you mean train.sinks?"),
        (
            "train: {report_to: [jsonl, tensorbord]}",
            "train.report_to has a bad entry: no sink 'tensorbord'; did you mean 'tensorboard'?",
        ),
        (
            "train: {report_to: {wandb: {projekt: a}}}",
            "the sink 'wandb' has no option 'projekt'; did you mean project?",
        ),
        ("train: {report_to: ['wandb:a']}", "'a' is not OPTION=VALUE; give NAME:OPTION=VALUE"),
        ("train: {report_to: 5}", "a sink is NAME, NAME:OPTION=VALUE,"),
        ("train: {sinks_every_s: 0}", "train.sinks_every_s must be above 0"),
        ("metrics: {pue: high}", "metrics.pue must be a number; got 'high'"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_to_write(
    tmp_path: Path, text: str, said: str
) -> None:
    assert said in wrong(tmp_path, MODEL + text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: {fp16: true, bf16: true}", "both true"),
        ("tuning: {bits: 4}", "tuning.bits 4 needs tuning.backend bnb or unsloth"),
        ("tuning: {mode: qlora}", "qlora needs 4-bit"),
        ("tuning: {mode: full, bits: 4, backend: bnb}", "full can't train weights of 4 bits"),
        ("tuning: {mode: qlora, bits: 8, backend: bnb}", "qlora is 4-bit"),
        ("tuning: {backend: bnb}", "is the same as torch"),
        ("train: {optim: paged_adamw_32bit}", "needs bitsandbytes"),
        ("train: {optim: adamw_bnb_8bit}", "needs bitsandbytes"),
        ("train: {save_strategy: steps}", "needs train.save_steps"),
        ("train: {evaluation_strategy: steps}", "needs train.eval_steps"),
        ("train: {evaluation_strategy: epoch}\ndata: {train_path: a.jsonl}", "give data.val_path"),
        ("train: {early_stopping_patience: 2}", "needs train.evaluation_strategy"),
        ("train: {warmup_ratio: 0.1, warmup_steps: 5}", "both given"),
        ("data: {val_path: a.jsonl}", "without data.train_path"),
        ("data: {train_path: a.jsonl, val_path: a.jsonl}", "is no evaluation"),
        ("data: {pad_to_multiple_of: 100}", "does not divide"),
        ("data: {packing: true}\ntask_mode: cpt", "fills its blocks anyway"),
        ("data: {packing: true}\ntuning: {backend: unsloth}", "attention may mix the documents"),
        ("data: {template_path: t.txt}\ntask_mode: cpt", "is for sft"),
        ("block_size: 64", "is for task_mode cpt"),
        ("block_size: 1024\ntask_mode: cpt", "more than model.max_seq_len 512"),
        ("task_mode: cpt_mixed", "needs datasets"),
        ("datasets: [{path: a, type: cpt}]", "is for task_mode cpt_mixed"),
        (
            "train: {report_to: csv}\nmetrics: {enable_energy_logging: false}",
            "train.report_to needs metrics.enable_energy_logging: true",
        ),
        (
            "metrics: {grid: Frence}",
            "metrics: no grid is named 'Frence'; did you mean FRA (France)?",
        ),
        (
            "metrics: {grid: FRA, grid_g_per_kwh: 5}",
            "metrics: give grid or grid_g_per_kwh, not both",
        ),
        ("metrics: {pue: 0.5}", "metrics: pue must be a number of 1 or more; got 0.5"),
        ("metrics: {price_per_kwh: -1}", "metrics: price_per_kwh must be a number of 0 or more"),
        ("model: {name: 'builtin:tiny', type: seq2seq}", "write model.type: causal"),
        ("model: {name: 'builtin:tini'}", "did you mean builtin:tiny?"),
        ("model: {name: a/b, type: seq2seq}\ndata: {packing: true}", "one document a row"),
        ("model: {name: a/b, type: seq2seq}\ntask_mode: cpt", "takes sft"),
        (
            "model: {name: a/b, attn_implementation: sdpa}\ntuning: {backend: unsloth}",
            "model.attn_implementation: Unsloth chooses its own",
        ),
    ],
)
def test_what_can_t_hold_together_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in wrong(tmp_path, text if text.startswith("model") else MODEL + text)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    said = wrong(tmp_path, MODEL + "sed: 1\ntrain: {lr: x, fp16: true, bf16: true}")
    assert said.splitlines()[1:] == [
        "  line 3: train.lr must be a number; got 'x'",
        "  line 2: sed is no key; did you mean seed?",
        "  train.fp16 and train.bf16 are both true; keep one",
    ]


def test_an_error_has_the_file_and_line_of_its_key_by_whichever_name(tmp_path: Path) -> None:
    base = written(tmp_path, MODEL + "train:\n  learning_rate: x", "base.yaml")
    said = wrong(tmp_path, "include: base.yaml\nseed: 1\ntrain:\n  fp16: 2")
    assert said.splitlines()[1:] == [
        f"  {base}, line 3: train.lr must be a number; got 'x'",
        "  line 4: train.fp16 must be true or false; got 2",
    ]


def test_without_a_model_there_is_no_training(tmp_path: Path) -> None:
    assert "model.name is missing" in wrong(tmp_path, "seed: 1")


def test_a_key_that_stands_twice_is_an_error_with_both_lines(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run.yaml, line 5: 'lr' is also in line 3"):
        read(tmp_path, MODEL + "train:\n  lr: 1\n  seed: 1\n  lr: 2")


@pytest.mark.parametrize("text", ["train: [", "- a", "just text"])
def test_what_is_no_yaml_of_sections_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"run\.yaml"):
        read(tmp_path, text)


def test_qlora_is_four_bits(tmp_path: Path) -> None:
    assert read(tmp_path, MODEL + "tuning: {mode: qlora, backend: bnb}").tuning.bits == 4


def test_a_mixture_names_its_sources(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        MODEL + "task_mode: cpt_mixed\ndatasets:\n"
        "  - {name: books, path: b.jsonl, type: cpt, weight: 0.75}\n"
        "  - {path: builtin, type: chat, weight: 0.25}",
    )
    books, ours = config.datasets
    assert (books.name, books.path, books.type, books.weight) == (
        "books", Path("b.jsonl"), "cpt", 0.75,
    )  # fmt: skip
    assert (ours.path, ours.type) == (None, "chat")


@pytest.mark.parametrize("folder", [CONFIGS, CONFIGS / "cpu"])
def test_the_shipped_configurations_differ_where_the_backend_is_the_question_only(
    folder: Path,
) -> None:
    def fields(name: str) -> dict[str, object]:
        config = load(folder / f"run_{name}.yaml")
        parts = ("model", "tuning", "train", "data", "metrics")
        return {
            f"{part}.{key}": value
            for part in parts
            for key, value in dict(getattr(config, part)).items()
        } | {"seed": config.seed, "task_mode": config.task_mode}

    all_three = [fields(name) for name in ("torch", "bnb", "unsloth")]
    assert [one["tuning.backend"] for one in all_three] == ["torch", "bnb", "unsloth"]
    differing = {key for key in all_three[0] if len({str(one[key]) for one in all_three}) > 1}
    precision = set() if folder.name == "cpu" else {"train.bf16", "train.fp16"}  # the guide's
    assert differing == {
        *("tuning.backend", "tuning.mode", "tuning.bits", "train.optim", "train.output_dir"),
        *precision,
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["bnb", "unsloth"])
def test_the_shipped_configurations_have_the_guides_values(tmp_path: Path, backend: str) -> None:
    guide = yaml.safe_load(GUIDE)
    ours = load(CONFIGS / f"run_{backend}.yaml").model_dump()
    assert {key: str(ours["metrics"][key]) for key in guide["metrics"]} == {
        key: str(value) for key, value in guide["metrics"].items()
    }
    sections = yaml.safe_load(GUIDE_UNSLOTH) if backend == "unsloth" else guide
    for section in ("tuning", "train"):
        theirs = sections[section]
        lora = theirs.pop("lora", {})
        assert {key: ours[section][key] for key in theirs} == theirs
        assert {key: ours[section]["lora"][key] for key in lora} == lora
    small = load(CONFIGS / "cpu" / f"run_{backend}.yaml").model_dump()  # what the page says of it
    assert {key: small["tuning"]["lora"][key] for key in ("r", "alpha", "dropout")} == {
        "r": 32, "alpha": 32, "dropout": 0.05,
    }  # fmt: skip
    assert (small["train"]["bf16"], small["train"]["fp16"]) == (False, False)
    optimizers = {"bnb": "adamw_bnb_8bit", "unsloth": "adamw_torch"}
    assert small["train"]["optim"] == optimizers[backend]


@pytest.mark.parametrize(
    ("text", "sinks"),
    [
        ("report_to: wandb", ("wandb",)),
        ("sinks: [wandb, tensorboard]", ("wandb", "tensorboard")),
        ("report_to: ['csv:path=a.csv,rows=final']", ("csv:path=a.csv,rows=final",)),
        (
            "report_to: [{mlflow: {experiment: a}}, jsonl]",
            (("mlflow", {"experiment": "a"}), "jsonl"),
        ),
        ("report_to: {wandb: {project: a}, jsonl: }", (("wandb", {"project": "a"}), ("jsonl", {}))),
        ("report_to: none", ()),
        ("report_to: [none]", ()),
        ("report_to: []", ()),
        ("report_to: null", ()),
    ],
)
def test_sinks_are_named_as_a_meter_takes_them(
    tmp_path: Path, text: str, sinks: tuple[object, ...]
) -> None:
    assert read(tmp_path, f"{MODEL}train: {{{text}}}").train.report_to == sinks


def test_factors_of_carbon_and_cost_are_those_of_a_meter(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        MODEL + "metrics: {grid: NO, pue: 1.2, price_per_kwh: 0.3, price_per_gpu_hour: 2.5,"
        " currency: EUR, warmup_s: 5}",
    )
    assert config.metrics.declared == {
        "grid": "NO", "pue": 1.2, "price_per_kwh": 0.3, "price_per_gpu_hour": 2.5,
        "currency": "EUR", "warmup_s": 5.0,
    }  # fmt: skip
    settings = Settings.declared(None, config.metrics.declared)
    assert settings.grid_g_per_kwh == grid_named("Norway").g_per_kwh  # to YAML, NO is False


def test_reading_a_configuration_loads_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from ergmeter.workloads.sft.config_file import load;"
        f"load(Path({str(CONFIGS / 'run_bnb.yaml')!r}));"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
