"""EfficientLLM's module by its original path: in Megatron-LM's training loop, by two lines.

The loop is scripts/megatron_lm: Megatron's functions in its order, on CPU, with a clock of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ergmeter.compat import efficientllm
from ergmeter.integrations import guard
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Reading
from ergmeter.runlog.reader import Run
from tests.e2e.conftest import PYTHON, SCRIPTS, Program, environment, erg, quick, warmed
from tests.runs import ALL_STEPS

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "megatron"
LOOP = SCRIPTS / "megatron_lm"
PARAMETERS = 64 * 16 + 16 * 64 + 64  # an embedding, and a layer with its bias
MICRO, GLOBAL, LENGTH = 2, 8, 16
TOKENS, SAMPLES = GLOBAL * LENGTH, GLOBAL  # of an iteration of one rank


def python_path(*folders: Path) -> dict[str, str]:
    """The variables of a program that has these folders first."""
    variables = quick("transformers", "bitsandbytes", "sklearn")
    joined = os.pathsep.join([*map(str, folders), variables["PYTHONPATH"]])
    return {**variables, "PYTHONPATH": joined}


def megatron_section() -> str:
    page = (ROOT / "docs" / "from-efficientllm.md").read_text()
    return page.partition("## Two minutes: Megatron-LM\n")[2].partition("\n## ")[0]


def two_lines() -> str:
    """As the page has them."""
    (lines,) = re.findall(r"```python\n(.*?)```", megatron_section(), re.DOTALL)
    assert len([line for line in lines.splitlines() if line]) == 2
    return str(lines)


def blocks_of(output: str) -> dict[int, dict[str, str]]:
    """The lines of each block by iteration and label."""
    blocks: dict[int, dict[str, str]] = {}
    for line in output.splitlines():
        if line.startswith("[EfficientLLM Metrics] Iteration "):
            block = blocks[int(line.split()[-1].rstrip(":"))] = {}
        elif line.startswith("  "):
            label, _, amount = line.strip().partition(": ")
            block[label] = amount
    return blocks


def value(run: Path, key: str) -> float:
    found = summarize(Run.open(run), ALL_STEPS).readings[key]
    assert isinstance(found, Reading), found
    return found.value


def test_two_lines_measure_megatrons_loop(tmp_path: Path) -> None:
    program = (LOOP / "pretrain_gpt.py").read_text()
    lines = two_lines().replace("\n", "\n    ")
    patched = tmp_path / "pretrain_qwen.py"
    patched.write_text(program.replace("    pretrain(", f"    {lines}pretrain("))
    folders = [tmp_path / name for name in ("with", "without")]
    for folder in folders:
        folder.mkdir()
    options = ("--train-iters", 30, "--eval-interval", 7, "--overflow-at", 4)
    sizes = ("--micro-batch-size", MICRO, "--global-batch-size", GLOBAL, "--seq-length", LENGTH)
    words = (*sizes, *options, "--tensorboard-dir", "tensorboard")
    loads = ("torch.utils.tensorboard", "ergmeter.metrics.live.totals")
    done, without = warmed(
        Program([patched, *words], folders[0], loads),
        Program([LOOP / "pretrain_gpt.py", *words], folders[1], loads),
        LOOP_LOG="log.json", **python_path(FOLDER, LOOP),
    )  # fmt: skip
    for one in (done, without):
        assert one.returncode == 0, one.stderr
    steps, bare = (json.loads((folder / "log.json").read_text()) for folder in folders)
    # The loop does what it does without them, to the last bit.
    assert [step["loss"] for step in steps] == [step["loss"] for step in bare]
    assert "EfficientLLM" not in without.stdout
    assert f"initialized for model with {PARAMETERS:,} parameters\n" in done.stdout
    (run,) = (folders[0] / "runs").iterdir()
    assert done.stdout.endswith(f"[EfficientLLM] erg report runs/{run.name}\n")
    check_steps(run, steps)
    blocks = blocks_of(done.stdout)
    check_blocks(blocks, steps)
    check_tensorboard(folders[0] / "tensorboard", blocks)


def check_steps(run: Path, steps: list[dict[str, float]]) -> None:
    """By the loop's own clock: each iteration took between these two times."""
    rows = Run.open(run).steps()
    for start_ns, end_ns, step in zip(rows["start_ns"], rows["end_ns"], steps, strict=True):
        assert step["least_s"] <= (end_ns - start_ns) / 1e9 <= step["most_s"]
    assert value(run, "tokens.total") == 30 * TOKENS
    assert value(run, "throughput.samples_per_s") * value(run, "time.window_s") == pytest.approx(
        30 * SAMPLES
    )


def check_blocks(blocks: dict[int, dict[str, str]], steps: list[dict[str, float]]) -> None:
    assert list(blocks) == [10, 20, 30]
    for iteration, block in blocks.items():
        assert block["Loss"] == f"{steps[iteration - 1]['loss']:.6f}"
        if "no accelerator" in block["PCU (Ratio)"]:
            assert "set EFFICIENTLLM_PROFILE_STEPS=3" in block["AL computation (Seconds)"]
    # By hand: tokens and samples of ten iterations over the time inside them, which the loop's own
    # clock bounds. The block has three digits of TT and ST, and four decimals of AL.
    first = blocks[10]
    most, least = (sum(step[name] for step in steps[:10]) for name in ("most_s", "least_s"))
    for label, amount in (("TT (Tokens/Param/Sec)", TOKENS), ("ST (Samples/Param/Sec)", SAMPLES)):
        rate = float(first[label]) * PARAMETERS
        assert 10 * amount / most * 0.99 <= rate <= 10 * amount / least * 1.01, label
    assert least / 10 - 1e-4 <= float(first["AL (Seconds)"]) <= most / 10 + 1e-4


def check_tensorboard(folder: Path, blocks: dict[int, dict[str, str]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    points = accumulator.Scalars("efficientllm/al_seconds")
    assert [point.step for point in points] == list(blocks)
    for point in points:
        printed = float(blocks[point.step]["AL (Seconds)"])
        assert point.value == pytest.approx(printed, abs=6e-5)


def test_the_documented_launch_command_on_two_ranks(lab: Lab) -> None:
    """As the page has it, with the guide's arguments: 1 000 000 tokens are 15 iterations."""
    shutil.copytree(FOLDER, lab.path / "examples" / "megatron")
    (commands,) = re.findall(r"```bash\n(.*?)```", megatron_section(), re.DOTALL)
    assert f"./run_mcore_qwen.sh {GUIDE}\n" in commands.replace("\\\n    ", "")
    here = {"/path/to/Megatron-LM": LOOP, "/path/to/output": lab.path / "output"}
    for documented, folder in here.items():
        commands = commands.replace(documented, str(folder))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    done = lab.run(
        "bash", "-ec", commands,
        env=environment(
            **quick("transformers", "bitsandbytes", "sklearn"),
            PATH=f"{Path(PYTHON).parent}:{os.environ['PATH']}", GPUS_PER_NODE="2", MASTER_PORT=port,
            EFFICIENTLLM_LOG_INTERVAL="5", EFFICIENTLLM_PROFILE_STEPS="2",
        ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    blocks = blocks_of(done.stdout.decode())
    assert list(blocks) == [5, 10, 15]  # of the last rank alone
    waiting = "- (steps are profiled after the first 11)"
    assert blocks[10]["AL computation (Seconds)"] == waiting
    for name in ("computation", "communication"):
        part = blocks[15][f"AL {name} (Seconds)"]
        if part != waiting:  # on a slow machine the last block has the metrics of the one before
            assert 0 <= float(part) <= float(blocks[15]["AL (Seconds)"])
    (run,) = lab.runs()
    # Each rank's own tokens add up to the global batches.
    assert value(run, "tokens.total") == 15 * 32 * 2048
    for name in ("computation", "communication"):
        _, printed, _ = erg("report", run, "--metric", f"AL ({name})", "--window", "unbroken")
        assert " s" in printed
        assert 0 < value(run, f"profile.{name}_s") <= value(run, "time.in_step_s")


# The guide's line, and Pai-Megatron-Patch's names for its arguments.
GUIDE = (
    "dsw 7B 4 32 5e-5 5e-6 2048 2048 bf16 1 1 1 false false false false full false 500 "
    "/path/to/dataset /path/to/valid none 1000000 50000 /path/to/output"
)
NAMES = (
    *("ENV", "SIZE", "BATCH", "GLOBAL_BATCH", "LR", "MIN_LR", "SEQ_LEN", "PAD_LEN", "PR"),
    *("TP", "PP", "CP", "SP", "DO", "FL", "SFT", "AC", "OPTIMIZER_OFFLOAD", "SAVE_INTERVAL"),
    *("DATASET", "VALID_DATASET", "CHECKPOINT", "TOKENS", "WARMUP_TOKENS", "OUTPUT"),
)


def launched(lab: Lab, code: int = 0, /, **changes: str) -> list[str]:
    """What torchrun gets from the guide's line with these changes, a word a line."""
    torchrun = lab.path / "torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    words = dict(zip(NAMES, GUIDE.split(), strict=True)) | changes
    path = f"{lab.path}:{os.environ['PATH']}"
    variables = {"MEGATRON_PATH": str(LOOP), "GPUS_PER_NODE": "8", "MASTER_PORT": "29500"}
    done = lab.run(
        FOLDER / "run_mcore_qwen.sh", *words.values(), env=environment(PATH=path, **variables)
    )
    assert done.returncode == code, done.stderr.decode()
    return (done.stdout or done.stderr).decode().splitlines()


def values_of(words: list[str], option: str) -> list[str]:
    """The words after an option, up to the next; nothing where it is not there."""
    if option not in words:
        return []
    after = words[words.index(option) + 1 :]
    ends = [number for number, word in enumerate(after) if word.startswith("--")]
    return after[: ends[0]] if ends else after


def test_each_documented_argument_of_the_launch_reaches_megatron(lab: Lab) -> None:
    words = launched(lab)
    of_the_guide = {
        "--nproc_per_node": "8", "--num-layers": "28", "--hidden-size": "3584",  # Qwen2.5 7B
        "--micro-batch-size": "4", "--global-batch-size": "32", "--lr": "5e-5", "--min-lr": "5e-6",
        "--seq-length": "2048", "--tensor-model-parallel-size": "1",
        "--pipeline-model-parallel-size": "1", "--context-parallel-size": "1",
        "--recompute-granularity": "full", "--save-interval": "500",
        "--data-path": "/path/to/dataset", "--save": "/path/to/output/checkpoint",
        "--tensorboard-dir": "/path/to/output/tensorboard",
        # 1 000 000 and 50 000 tokens in steps of 32 x 2048.
        "--train-iters": "15", "--lr-decay-iters": "15", "--lr-warmup-iters": "0",
    }  # fmt: skip
    assert {name: values_of(words, name)[:1] for name in of_the_guide} == {
        name: [value] for name, value in of_the_guide.items()
    }
    assert values_of(words, "--nproc_per_node")[1:] == [
        str(FOLDER / "pretrain.py"), str(LOOP / "pretrain_gpt.py"),
    ]  # fmt: skip
    # Each that is false in the guide adds an option where it is true.
    absent = {"SP": "--sequence-parallel", "DO": "--use-distributed-optimizer",
              "FL": "--attention-backend"}  # fmt: skip
    for name, option in absent.items():
        assert option not in words
        assert option in launched(lab, **{name: "true"})
    assert "--bf16" in words
    assert "--load" not in words  # the checkpoint is `none`
    changed = launched(
        lab, SIZE="0.5B", TP="2", PP="3", CP="4", AC="sel", PR="fp8", CHECKPOINT="/from",
        TOKENS="6553600", WARMUP_TOKENS="655360",
    )  # fmt: skip
    found = {
        name: values_of(changed, f"--{name}-model-parallel-size") for name in ("tensor", "pipeline")
    }
    assert found == {"tensor": ["2"], "pipeline": ["3"]}
    assert values_of(changed, "--context-parallel-size") == ["4"]
    assert values_of(changed, "--fp8-format") == ["hybrid"]
    assert values_of(changed, "--load") == ["/from"]
    assert values_of(changed, "--hidden-size") == ["896"]
    for name, iterations in (("--train-iters", "100"), ("--lr-warmup-iters", "10")):
        assert values_of(changed, name) == [iterations]
    assert "--recompute-activations" in changed
    assert "--untie-embeddings-and-output-weights" in words
    assert "--untie-embeddings-and-output-weights" not in changed
    # The two that are Pai-Megatron-Patch's alone, and what is no value of an argument.
    for name, value in (
        ("SFT", "true"), ("OPTIMIZER_OFFLOAD", "true"), ("SIZE", "8B"), ("PR", "int8"),
        ("AC", "yes"), ("ENV", "aws"),
    ):  # fmt: skip
        (line,) = launched(lab, 2, **{name: value})
        assert line.startswith("run_mcore_qwen.sh: "), name


def test_a_launch_that_cant_be_is_refused(lab: Lab) -> None:
    script = FOLDER / "run_mcore_qwen.sh"
    done = lab.run(script, "dsw", "7B")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"run_mcore_qwen.sh: 25 arguments needed, got 2" in done.stderr
    done = lab.run(script, *["x"] * 25, env=environment(MEGATRON_PATH=""))
    assert done.returncode == 2
    assert done.stderr == b"run_mcore_qwen.sh: set MEGATRON_PATH to the folder of Megatron-LM\n"


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {"MEGATRON_PATH": "/nowhere"},
            "no Megatron-LM at MEGATRON_PATH=/nowhere: no folder megatron/training there",
        ),
        ({"PRETRAIN": "/nowhere.py"}, "no program at /nowhere.py: set PRETRAIN"),
        ({"PATH": "/usr/bin:/bin"}, "no torch here: torchrun is not on PATH"),
        (quick("torch"), "no torch here: python can't import it"),
        (
            {**quick(), "CUDA_VISIBLE_DEVICES": ""},
            "no GPU here: set GPUS_PER_NODE to start that many ranks anyway",
        ),
        ({"GPUS_PER_NODE": "two"}, "GPUS_PER_NODE is two: must be 1 or more"),
    ],
    ids=["no Megatron-LM", "no program", "no torchrun", "no torch", "no GPU", "no number"],
)
def test_what_is_not_here_is_one_line_and_torchrun_does_not_start(
    variables: dict[str, str], line: str, lab: Lab
) -> None:
    path = f"{Path(PYTHON).parent}:{os.environ['PATH']}"
    given = {"MEGATRON_PATH": str(LOOP), "GPUS_PER_NODE": "", "PATH": path, **variables}
    done = lab.run(FOLDER / "run_mcore_qwen.sh", *GUIDE.split(), env=environment(**given))
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode() == f"run_mcore_qwen.sh: {line}\n"


@contextmanager
def unloaded() -> Iterator[None]:
    """`megatron_patch` is found anew, and forgotten afterwards."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron_patch"]:
        del sys.modules[name]


@pytest.fixture
def measure_megatron(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(guard, "_warned", set())
    monkeypatch.syspath_prepend(str(FOLDER))
    with unloaded():
        yield importlib.import_module("megatron_patch.efficientllm_metrics").measure_megatron


def test_without_megatron_the_two_lines_end_with_one(measure_megatron: Any) -> None:
    with pytest.raises(SystemExit) as ended:  # which prints the line, with exit code 1
        measure_megatron()
    assert ended.value.code == (
        "measure_megatron: Megatron-LM can't be imported: No module named 'megatron'; install it,"
        " or put its folder on PYTHONPATH"
    )


class Loop2023:
    """Of 2023: four results, no iteration for the step, another rate before the iteration."""

    __name__ = "megatron.training"

    def __init__(self, **sizes: int) -> None:
        self.args = SimpleNamespace(micro_batch_size=2, seq_length=8, **sizes)
        self.train, self.train_step, self.training_log = self._train, self._step, self._log

    def get_args(self) -> SimpleNamespace:
        return self.args

    def get_num_microbatches(self) -> int:
        return 3

    def get_tensorboard_writer(self) -> None:
        return None

    def _train(self, forward_step_func: object, model: list[torch.nn.Module]) -> int:
        for iteration in range(1, 11):
            losses, skipped, norm, zeros = self.train_step(forward_step_func, None, model)
            assert (skipped, norm, zeros) == (0, 1.0, None)
            assert self.training_log(losses, {}, 0.1, 0.2, iteration, 1.0)
        return 10

    def _step(self, *_: object) -> tuple[dict[str, float], int, float, None]:
        return {"lm loss": 2.5}, 0, 1.0, None

    def _log(
        self,
        loss_dict: dict[str, float],
        total_loss_dict: dict[str, float],
        learning_rate: float,
        decoupled_learning_rate: float,
        iteration: int,
        loss_scale: float,
    ) -> bool:
        assert (total_loss_dict, loss_scale) == ({}, 1.0)
        assert learning_rate < decoupled_learning_rate
        return bool(loss_dict) and iteration > 0


def test_a_loop_of_another_year_is_measured_too(
    measure_megatron: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop2023()
    measure_megatron(loop)
    measure_megatron(loop)  # again: nothing is wrapped twice
    assert loop.train(None, [torch.nn.Linear(10, 10), torch.nn.Linear(10, 5)]) == 10
    out = capsys.readouterr().out
    assert "for model with 165 parameters" in out
    assert list(blocks_of(out)) == [10]
    assert blocks_of(out)[10]["Loss"] == "2.500000"
    run = Path(out.split("erg report ")[1].strip())
    assert value(run, "tokens.total") == 10 * 2 * 3 * 8
    assert value(run, "steps.count") == 10


def test_a_model_that_is_cut_needs_its_size_to_be_given(
    measure_megatron: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop2023(tensor_model_parallel_size=2, context_parallel_size=2)
    measure_megatron(loop)
    loop.train(None, [torch.nn.Linear(10, 10)])
    printed = capsys.readouterr()
    assert "tensor_model_parallel_size is 2: a rank has a part of the model" in printed.err
    absent = "- (the number of parameters was not given to initialize_efficientllm_metrics)"
    assert blocks_of(printed.out)[10]["TT (Tokens/Param/Sec)"] == absent
    # Two ranks share each sequence.
    run = Path(printed.out.split("erg report ")[1].strip())
    assert value(run, "tokens.total") == 10 * 2 * 3 * 8 / 2
    loop = Loop2023(tensor_model_parallel_size=2)
    measure_megatron(loop, model_parameters=7_615_616_512)
    loop.train(None, [torch.nn.Linear(10, 10)])
    out = capsys.readouterr().out
    assert "for model with 7,615,616,512 parameters" in out
    assert float(blocks_of(out)[10]["TT (Tokens/Param/Sec)"]) > 0


def test_a_module_without_the_loop_is_refused_by_name(measure_megatron: Any) -> None:
    def nothing(model: object) -> None:
        del model

    loop = SimpleNamespace(__name__="x", train=nothing, train_step=nothing, training_log=nothing)
    with pytest.raises(RuntimeError, match="x has no get_args, get_num_microbatches") as refused:
        measure_megatron(loop)
    assert "training_log(loss_dict=), training_log(iteration=)" in str(refused.value)


def test_pai_megatron_patchs_other_modules_are_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "Pai-Megatron-Patch" / "megatron_patch"
    theirs.mkdir(parents=True)
    (theirs / "__init__.py").touch()
    (theirs / "arguments.py").touch()
    ours = FOLDER / "megatron_patch" / "efficientllm_metrics.py"
    for folders in ([FOLDER, theirs.parent], [theirs.parent]):
        with monkeypatch.context() as patch:
            for folder in reversed(folders):
                patch.syspath_prepend(str(folder))
            with unloaded():
                metrics = importlib.import_module("megatron_patch.efficientllm_metrics")
                arguments = importlib.import_module("megatron_patch.arguments")
                assert callable(metrics.measure_megatron)
                # The names that the guide imports, and the one that it forgets.
                for name in (
                    "initialize_efficientllm_metrics",
                    "finalize_efficientllm_metrics",
                    "get_metrics_collector",
                    "should_log_metrics",
                ):
                    assert getattr(metrics, name) is getattr(efficientllm, name)
                assert arguments.__file__ == str(theirs / "arguments.py")
        # Then copied to where the original was, without a folder of ours.
        (theirs / "efficientllm_metrics.py").write_bytes(ours.read_bytes())
