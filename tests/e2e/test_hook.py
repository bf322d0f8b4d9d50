"""`erg record` of programs that know nothing of ergmeter, against their own count and clock."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.metrics.timeline import loss_series
from ergmeter.records import PHASES, Missing, Reading
from ergmeter.runlog.reader import Run
from ergmeter.units import NS_PER_S
from tests.e2e.clocks import bounds_s
from tests.e2e.conftest import PYTHON, QUICK, TIMEOUT_S, Program, needs, quick, script, warmed
from tests.e2e.recorded_steps import steps
from tests.ports import free_port
from tests.runs import ALL_STEPS, printed_card

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks

WARM = (*QUICK, "--warmup-steps", "1")


@pytest.fixture
def lab(lab: Lab) -> Lab:
    """Where programs begin and end sooner."""
    lab.variables = quick()
    return lab


def truths(printed: bytes) -> list[dict[str, Any]]:
    lines = printed.decode().splitlines()
    return [json.loads(line.removeprefix("TRUTH ")) for line in lines if line.startswith("TRUTH ")]


def value(run: Run, key: str) -> float:
    found = summarize(run, ALL_STEPS).readings[key]
    assert isinstance(found, Reading), (key, found)
    return found.value


def missing(run: Run, key: str) -> str:
    found = summarize(run, ALL_STEPS).readings[key]
    assert isinstance(found, Missing), (key, found)
    return found.reason


def spans_of(run: Run, phase: str) -> int:
    return int((run.steps()["phase"] == PHASES.index(phase)).sum())


def said_of(run: Run) -> list[dict[str, Any]]:
    """What the writers say of their training."""
    return [w.header["training"] for w in run.writers if "training" in w.header]


def no_steps(run: Run) -> str:
    (mark,) = [mark for mark in run.marks if mark.name == "output_unrecognised"]
    return mark.detail


@pytest.fixture(scope="module")
def one_after_the_other(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Nine trainings in one process: each with its truth, and its share of the run."""
    from tests.e2e.conftest import Lab

    lab = Lab(tmp_path_factory.mktemp("trainings"), **quick())
    done = lab.record(*script("hook_trainings"))
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    run = Run.open(lab.path / "run")
    told = truths(done.stdout)
    assert len(run.trainings) == len(told) == 9
    found: dict[str, Any] = {
        one["name"]: (one, run.training(n)) for n, one in enumerate(told, start=1)
    }
    found["run"] = run
    lab.close()
    return found


@pytest.mark.parametrize(
    "name",
    [
        "teacher", "padded", "accumulated", "gan", "halves", "loaded", "uneven", "in_eval_mode",
        "copied",
    ],
)  # fmt: skip
def test_each_of_several_trainings_has_its_own_steps_tokens_and_time(
    one_after_the_other: dict[str, Any], name: str
) -> None:
    truth, run = one_after_the_other[name]
    assert value(run, "steps.count") == truth["steps"]
    window_s = value(run, "time.window_s")
    least_s, most_s = bounds_s([truth])
    assert least_s <= window_s <= most_s
    if truth["tokens"]:
        tokens = truth.get("real", truth["tokens"])
        assert value(run, "tokens.total") == tokens
        assert value(run, "throughput.tokens_per_s") == pytest.approx(tokens / window_s, rel=1e-9)
    if "parameters" in truth:
        assert said_of(run)[0]["parameters"] == truth["parameters"]


def test_padding_is_not_counted_as_tokens(one_after_the_other: dict[str, Any]) -> None:
    truth, run = one_after_the_other["padded"]
    assert truth["real"] < truth["tokens"]
    padding = 1 - truth["real"] / truth["tokens"]
    assert value(run, "tokens.padding_frac") == pytest.approx(padding)


def test_evaluation_and_safetensors_checkpoints_are_timed(
    one_after_the_other: dict[str, Any],
) -> None:
    truth, run = one_after_the_other["accumulated"]
    for key in ("eval_s", "checkpoint_s"):
        within_s, in_all_s = truth[key]
        assert within_s <= value(run, f"time.{key}") <= in_all_s
    # Two evaluations; after each a file of safetensors, and one of torch's.
    assert (spans_of(run, "eval"), spans_of(run, "checkpoint")) == (2, 4)
    assert set(run.steps()["micro_steps"][run.steps()["phase"] == 0].tolist()) == {truth["micro"]}


def test_what_was_not_seen_is_missing_and_not_zero(one_after_the_other: dict[str, Any]) -> None:
    _, run = one_after_the_other["uneven"]
    for key in ("time.eval_s", "time.checkpoint_s", "time.data_s"):
        assert "no " in missing(run, key)


def test_data_is_waited_for_as_long_as_the_program_says(
    one_after_the_other: dict[str, Any],
) -> None:
    truth, run = one_after_the_other["loaded"]
    within_s, in_all_s = truth["data_s"]
    assert within_s <= value(run, "time.data_s") <= in_all_s
    assert spans_of(run, "data") == 20
    assert value(run, "steps.count") == 20


def test_a_slow_step_in_ten_is_in_the_mean_and_in_the_tail(
    one_after_the_other: dict[str, Any],
) -> None:
    _, run = one_after_the_other["uneven"]
    rate, step_s = value(run, "throughput.tokens_per_s"), value(run, "time.step_s")
    assert rate * step_s == pytest.approx(16)
    # Twenty times; less where a busy machine makes the short ones longer.
    assert value(run, "time.step_p95_s") > 2 * value(run, "time.step_median_s")


def test_models_that_share_a_training_are_counted_together(
    one_after_the_other: dict[str, Any],
) -> None:
    """The judge on 3 batches, the maker on 2 of which one is detached; by hand."""
    _, run = one_after_the_other["gan"]
    made, judged = 2 * 16 * 4 * 8, 2 * 16 * 8
    (flops,) = run.flops
    assert flops.model_per_step == 2 * made + 2 * 2 * judged + 3 * judged
    assert [(part.name, part.flops) for part in flops.other_work or ()] == [("other models", made)]


def test_the_run_of_several_refuses_to_be_one(one_after_the_other: dict[str, Any]) -> None:
    assert "9 trainings" in missing(one_after_the_other["run"], "throughput.tokens_per_s")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What programs print without `erg`: of each its errors, and its truth."""
    needs("accelerate", "peft")
    llama = ("light", "accelerate", "transformers.models.llama.modeling_llama")
    programs: dict[str, tuple[list[Any], tuple[str, ...]]] = {
        "compiled": (["hook_plain", 20, "compiled"], ("torch", "torch._dynamo")),
        "accelerate": (["hook_accelerate"], llama),
    }
    done = warmed(
        *(
            Program(script(*words)[1:], tmp_path_factory.mktemp(name), imports)
            for name, (words, imports) in programs.items()
        )
    )
    found = {}
    for name, one in zip(programs, done, strict=True):
        assert one.returncode == 0, one.stderr
        found[name] = (one.stderr, *truths(one.stdout.encode()))
    return found


def test_two_trainings_side_by_side_are_not_two_ranks_and_one_that_is_compiled_learns_as_alone(
    lab: Lab, alone: dict[str, Any]
) -> None:
    compiled, plain = script("hook_plain", 20, "compiled"), script("hook_plain", 30)
    both = " ".join(["(", *compiled, "&", *plain, "& wait )"])
    done = lab.record("bash", "-c", both, options=WARM)
    assert done.stderr == b""
    run = Run.open(lab.path / "run")
    told = {one["steps"]: one for one in truths(done.stdout)}
    assert len(run.trainings) == 2
    for number in (1, 2):
        one = run.training(number)
        truth = told[round(value(one, "steps.count")) + 1]
        assert value(one, "tokens.total") == truth["tokens"] - 4 * 32
        least_s, most_s = bounds_s([truth])
        assert least_s <= value(one, "time.window_s") <= most_s
        assert said_of(one)[0]["parameters"] == truth["parameters"]
    errors, bare = alone["compiled"]
    assert errors == ""
    assert told[20]["losses"] == bare["losses"]


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_ranks_that_a_program_starts_itself_are_one_training(lab: Lab, start: str) -> None:
    done = lab.record(*script("hook_ranks", free_port(), start))
    assert done.returncode == 0, done.stderr.decode()
    two_ranks(lab, steps=20)


def test_lightning_on_two_devices_is_one_training(lab: Lab) -> None:
    """By programs that it starts; ranks that are spawned are above."""
    needs("lightning")
    done = lab.record(*script("hook_lightning"))
    assert done.returncode == 0, done.stderr.decode()
    two_ranks(lab, steps=20)


def two_ranks(lab: Lab, *, steps: int) -> None:
    run = Run.open(lab.path / "run")
    each = [json.loads((lab.path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert len(run.trainings) == 1
    assert [one["world"] for one in said_of(run)] == [2, 2]
    assert set(run.steps()["rank"].tolist()) == {0, 1}
    assert value(run, "steps.count") == steps
    tokens = sum(one["tokens"] for one in each)
    assert value(run, "tokens.total") == tokens
    least_s, most_s = bounds_s(each)
    assert tokens / most_s <= value(run, "throughput.tokens_per_s") <= tokens / least_s


def test_an_accelerate_loop_with_lora_is_seen_and_not_changed(
    lab: Lab, alone: dict[str, Any]
) -> None:
    within = lab.record(*script("hook_accelerate"))
    errors, bare = alone["accelerate"]
    assert within.stderr.decode() == errors
    (truth,) = truths(within.stdout)
    assert truth["losses"] == bare["losses"]
    run = Run.open(lab.path / "run")
    assert value(run, "steps.count") == truth["steps"] == 16
    assert value(run, "tokens.total") == truth["real"]
    least_s, most_s = bounds_s([truth])
    assert truth["real"] / most_s <= value(run, "throughput.tokens_per_s")
    assert value(run, "throughput.tokens_per_s") <= truth["real"] / least_s
    within_s, in_all_s = truth["checkpoint_s"]
    assert within_s <= value(run, "time.checkpoint_s") <= in_all_s
    (said,) = said_of(run)
    assert (said["parameters"], said["parameters_trained"]) == (29_856, 1_024)
    # Of a frozen model the products of its weights' gradients are left out: 4 of 6 FLOPs for each
    # weight that multiplies, which are all but the table of 128 x 32 and the norms of 5 x 32.
    flops = run.flops[0]
    assert flops.tokens_per_step
    per_token = flops.model_per_step / flops.tokens_per_step
    multiplying = 29_856 - 1_024 - 128 * 32 - 5 * 32
    assert 4 * multiplying < per_token < 5 * multiplying


def test_what_a_program_logs_to_trackers_is_kept_and_its_loss_is_the_steps(lab: Lab) -> None:
    """Also where W&B is disabled, in the second training."""
    for name in ("wandb", "mlflow", "tensorboard"):
        needs(name)
    done = lab.record(*script("hook_trackers"))
    assert done.returncode == 0, done.stderr.decode()
    (truth,) = truths(done.stdout)
    run = Run.open(lab.path / "run")
    assert len(run.trainings) == 2
    for number, losses in enumerate(truth["losses"], start=1):
        assert run.training(number).steps()["loss"].tolist() == pytest.approx(losses)
    told = {one.name: one.value for one in run.training(1).reported()}
    assert (told["gpu_hours"], told["rate"]) == (0.5, 0.1)
    assert {"norm", "train/loss"} <= told.keys()
    assert "note" not in told


@pytest.mark.parametrize("kind", ["plain", "table", "bar"])
def test_losses_are_seen_as_programs_print_them_the_first_and_the_last_too(
    lab: Lab, kind: str
) -> None:
    if kind == "bar":
        needs("tqdm")
    done = lab.record(*script("hook_prints", kind))
    assert done.returncode == 0, done.stderr.decode()
    (truth,) = truths(done.stderr)
    run = Run.open(lab.path / "run")
    evidence = evidence_of(run)
    losses = loss_series(evidence)[0].values.tolist()
    assert losses[-1] == truth["losses"][-1]
    assert value(run, "training.loss") == truth["losses"][-1]
    # Lines that come in one read, on a machine that is busy, are one step with the last loss.
    printed = evidence.printed["steps"]
    in_one_read = int(printed.sum()) - len(printed)
    if kind == "bar":  # drawn twice for each step: with the loss before, and with its own
        assert set(losses) <= set(truth["losses"])
        assert len(set(truth["losses"]) - set(losses)) <= in_one_read
    else:
        assert losses[0] == truth["losses"][0]
        lines = iter(truth["losses"])
        assert all(loss in lines for loss in losses), "in the order in which they were printed"
    if kind == "plain":
        assert len(losses) == len(truth["losses"]) - in_one_read
    if kind == "plain":  # its first line begins the first printed step
        assert f" {truth['losses'][0]} to {truth['losses'][-1]} " in printed_card(run)
    if kind == "table":  # no optimizer steps: the lines are the steps
        assert value(run, "steps.count") == 1 + 10 + 10 + 10


def test_evaluations_before_and_after_the_steps_and_all_saves_are_seen_and_the_card_is_whole(
    lab: Lab,
) -> None:
    done = lab.record(*script("hook_phases"), options=())
    assert done.returncode == 0, done.stderr.decode()
    card = done.stderr.decode()
    for words in ("tokens/s", "step time", "whole run", "MFU", "memory"):
        assert words in card, words
    assert "J/token" in card
    assert "finished" in card
    (truth,) = truths(done.stdout)
    told = {
        phase: steps(lab.path / "run", phase=phase) for phase in ("train", "eval", "checkpoint")
    }
    assert len(told["train"]["start_ns"]) == truth["steps"]
    took_s = {
        phase: [
            (end_ns - start_ns) / NS_PER_S
            for start_ns, end_ns in zip(one["start_ns"], one["end_ns"], strict=True)
        ]
        for phase, one in told.items()
    }
    assert len(took_s["eval"]) == len(truth["evals"]) == 2
    for seen_s, in_all_s in zip(took_s["eval"], truth["evals"], strict=True):
        assert 0.2 <= seen_s <= in_all_s  # it sleeps for that long
    assert len(took_s["checkpoint"]) == len(truth["saves"]) == 3
    for seen_s, in_all_s in zip(took_s["checkpoint"], truth["saves"], strict=True):
        assert 0.1 <= seen_s <= in_all_s
    assert told["eval"]["end_ns"][0] <= told["train"]["start_ns"][0]
    assert told["eval"]["start_ns"][1] >= told["checkpoint"]["end_ns"][2]


@pytest.mark.parametrize("framework", ["transformers", "lightning", "pytorch_lightning"])
def test_what_a_trainer_evaluates_and_saves_before_and_after_its_training_is_seen(
    lab: Lab, framework: str
) -> None:
    needs(framework)
    done = lab.record(*script("hook_frameworks", framework))
    assert done.returncode == 0, done.stderr.decode()
    (truth,) = truths(done.stdout)
    run = Run.open(lab.path / "run")
    assert len(run.trainings) == 2  # the loop after it is a training of its own
    of_trainer, of_loop = (run.training(number).steps() for number in (1, 2))
    rows, took_s = by_phase(of_trainer)
    assert len(rows["train"]) == truth["steps"]
    assert len(rows["eval"]) == 2
    assert np.all(took_s[rows["eval"]] >= 0.2)  # it sleeps for that long
    assert np.all(np.sort(took_s[rows["eval"]]) <= np.sort(truth["evals"]))
    assert 0.1 <= took_s[rows["checkpoint"]].item() <= truth["saves"][0]
    first = of_trainer["start_ns"][rows["train"]].min()
    last = of_trainer["end_ns"][rows["train"]].max()
    assert of_trainer["end_ns"][rows["eval"]].min() <= first
    assert of_trainer["start_ns"][rows["eval"]].max() >= last
    assert of_trainer["start_ns"][rows["checkpoint"]].item() >= last
    rows, took_s = by_phase(of_loop)
    assert len(rows["train"]) == truth["loop_steps"]
    is_fabric = framework != "transformers"
    for phase, kind, least_s in (("eval", "loop_evals", 0.2), ("checkpoint", "loop_saves", 0.1)):
        assert len(rows[phase]) == len(truth[kind]) == 2 * is_fabric
        for seen_s, in_all_s in zip(took_s[rows[phase]], truth[kind], strict=True):
            assert least_s <= seen_s <= in_all_s


def by_phase(steps: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The rows of each phase, and how long each row took."""
    rows = {
        phase: np.flatnonzero(steps["phase"] == PHASES.index(phase))
        for phase in ("train", "eval", "checkpoint")
    }
    return rows, (steps["end_ns"] - steps["start_ns"]) / NS_PER_S


def test_a_python_that_is_deaf_is_named_with_the_cure(lab: Lab) -> None:
    lab.record(PYTHON, "-uI", "-c", "print(1)")
    said = no_steps(Run.open(lab.path / "run"))
    assert "Python with -I, -E or -S does not: remove that option" in said


def test_a_python_without_ergmeter_is_told_how_to_get_it(lab: Lab) -> None:
    lab.variables = {}  # nothing on its path
    lab.run(sys.executable, "-m", "venv", "--without-pip", "bare")
    python = lab.path / "bare" / "bin" / "python"
    done = lab.record(python, "-c", "print(1)")
    assert (done.stdout, done.stderr) == (b"1\n", b"")
    assert f"{python} -m pip install ergmeter" in no_steps(Run.open(lab.path / "run"))


def test_without_a_python_or_without_torch_that_is_what_is_said(lab: Lab) -> None:
    lab.record("true", out="true")
    assert "no Python that loads the hook" in no_steps(Run.open(lab.path / "true"))
    lab.record(PYTHON, "-c", "0", out="python")
    assert "its Python loaded no torch" in no_steps(Run.open(lab.path / "python"))


def test_the_hook_can_be_left_out(lab: Lab) -> None:
    lab.variables = {}  # nothing on its path
    print_path = "import os; print(os.environ.get('PYTHONPATH'))"
    done = lab.record(PYTHON, "-c", print_path, options=(*QUICK, "--no-hook"))
    assert done.stdout.strip() == b"None"
    assert "hook" not in no_steps(Run.open(lab.path / "run"))


def test_the_program_sees_its_own_path_and_its_own_sitecustomize(lab: Lab) -> None:
    lab.variables = {}  # nothing on its path
    (lab.path / "mine").mkdir()
    (lab.path / "mine" / "sitecustomize.py").write_text("print('mine')")
    code = "import sys, sitecustomize as s; print([p for p in sys.path if 'boot' in p], s.__file__)"
    line = f'PYTHONPATH="$PYTHONPATH:{lab.path}/mine" exec {PYTHON} -c "{code}"'
    alone = lab.run("bash", "-c", line)
    within = lab.record("bash", "-c", line)
    assert within.stdout == alone.stdout
    assert alone.stdout.startswith(b"mine\n")
    assert within.stderr == b""


def test_a_meter_in_the_program_goes_first(lab: Lab) -> None:
    """Before it the hook looks on; when it begins, that makes way, and nothing is told twice."""
    lines = (
        "import torch; from ergmeter import Meter",
        "model = torch.nn.Embedding(9, 4); opt = torch.optim.SGD(model.parameters(), lr=0.1)",
        "def step(): model(torch.zeros(2, 3, dtype=torch.long)).sum().backward(); opt.step()",
        "for _ in range(5): step()",
        "with Meter() as meter:",
        "    for _ in range(7):",
        "        with meter.step(tokens=100): step()",
    )
    done = lab.record(PYTHON, "-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr.decode()
    steps = Run.open(lab.path / "run").steps()
    assert sorted(steps["tokens_computed"].tolist()) == [6.0] * 5 + [100.0] * 7


def test_the_hook_is_where_a_command_finds_it() -> None:
    from ergmeter.recorder import hook

    first = Path(hook.environment({"PYTHONPATH": "/a"})["PYTHONPATH"].split(":")[0])
    assert (first / "sitecustomize.py").exists()
    assert sorted(path.name for path in first.iterdir() if path.suffix) == ["sitecustomize.py"]


def test_a_hook_that_fails_says_so_and_nothing_else_is_made_of_it(lab: Lab) -> None:
    broken = "import sys; sys.modules['ergmeter.integrations.torch.steps'] = None; import torch"
    done = lab.record(PYTHON, "-c", broken)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert "the hook failed in it (torch: ModuleNotFoundError" in no_steps(
        Run.open(lab.path / "run")
    )


def test_a_program_that_begins_when_the_recorder_has_ended_is_left_alone(lab: Lab) -> None:
    train = (
        "import torch; w = torch.nn.Linear(2, 2); o = torch.optim.SGD(w.parameters(), lr=1.0);"
        " [(w(torch.ones(1, 2)).sum().backward(), o.step()) for _ in range(3)];"
        " print(3, flush=True)"
    )
    late = f'while [ -d run/.hook ]; do sleep 0.1; done; "{PYTHON}" -c "{train}"'
    lab.record("sh", "-c", f"( {late} ) > late.txt 2>&1 < /dev/null &")
    printed = lab.path / "late.txt"
    until_s = time.monotonic() + TIMEOUT_S
    while not printed.read_text() and time.monotonic() < until_s:
        time.sleep(0.1)
    assert printed.read_text() == "3\n"
    assert len(Run.open(lab.path / "run").writers) == 1
    assert not (lab.path / "runs").exists()
