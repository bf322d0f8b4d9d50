"""`erg train`, the make targets and the scripts of SFT-Play's guide, as processes of their own."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tokenizers import Tokenizer

from ergmeter.cli.main import main
from ergmeter.hardware.grid import grid_named
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Reading
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from ergmeter.workloads.sft.config_file import load
from tests.e2e.conftest import (
    PYTHON,
    TIMEOUT_S,
    Lab,
    Program,
    environment,
    eventually,
    quick,
    script,
    warmed,
)
from tests.models import models as kept_models
from tests.nvml.library import Gpu, Library, Script, build

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parents[2]
# What transformers and pyarrow load where they find it, and a training does not use.
LEFT_OUT = ("bitsandbytes", "datasets", "pandas", "scipy", "sklearn")
# What a training loads, before its ranks are forked.
LOADED = ("torch._dynamo", "peft", "transformers.trainer", "ergmeter.workloads.sft.training")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept_models(tmp_path_factory)


def configured(lab: Lab, models: Path, name: str = "run.yaml", **changes: Any) -> str:
    """A small configuration in the lab's directory."""
    whole: dict[str, Any] = {
        "model": {"name": "builtin:tiny", "local_dir": str(models), "max_seq_len": 128},
        "tuning": {"backend": "torch", "lora": {"r": 4, "alpha": 8, "dropout": 0.0}},
        "train": {"batch_size": 2, "max_steps": 6, "output_dir": f"outputs/{Path(name).stem}"},
        "metrics": {"warmup_s": 0, "results_csv": "outputs/ledger.csv"},
    }
    for section, values in changes.items():
        whole[section] = {**whole.get(section, {}), **values}
    (lab.path / name).write_text(yaml.safe_dump(whole))
    return name


def ledger(lab: Lab, path: str = "outputs/ledger.csv") -> list[dict[str, str]]:
    with (lab.path / path).open(newline="") as file:
        return list(csv.DictReader(file))


def training_steps(run: Path) -> int:
    """Rows of other phases have no index."""
    index = Run.open(run).steps()["index"]
    return int((index == index).sum())


def _has_steps(run: Path) -> bool:
    return any(run.glob("[!.]*/steps*")) and Run.open(run).count("steps") > 2


FACTORS: dict[str, Any] = {
    "grid": "FR",
    "pue": 1.2,
    "price_per_kwh": 0.25,
    "price_per_gpu_hour": 2.5,
    "currency": "EUR",
}
APPENDS = """
import sys
from pathlib import Path
from ergmeter.workloads.sft.ledger import COLUMNS, append_row

for number in range(100):
    cells = {**dict.fromkeys(COLUMNS), "run": f"{sys.argv[1]}-{number}", "status": "finished"}
    assert not append_row(Path("outputs/ledger.csv"), cells).problem
"""


def test_two_trainings_at_once_append_a_row_each(lab: Lab) -> None:
    """As they do it when they end, many times: each begins the file where it is not there."""
    both = [lab.start(PYTHON, "-c", APPENDS, name) for name in "ab"]
    assert [one.wait(TIMEOUT_S) for one in both] == [0, 0]
    rows = ledger(lab)
    assert {row["status"] for row in rows} == {"finished"}
    for name in "ab":
        own = [row["run"] for row in rows if row["run"].startswith(name)]
        assert own == [f"{name}-{number}" for number in range(100)]
    assert len(rows) == 200


def test_a_series_trains_each_configuration_until_sigterm_finishes_and_saves_the_one_under_way(
    lab: Lab, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By the script of SFT-Play's name, which is `erg train`, on a scripted GPU. The training gets
    the signal that its series got; who runs when in more rounds is in
    tests/unit/workloads/test_sft_series.py."""
    library: Library = build(tmp_path_factory.mktemp("nvml"))
    watts = 300.0
    script = Script((Gpu(watts, memory_bytes=3e9),), epoch_ns=time.monotonic_ns())
    first = configured(
        lab, models, "a.yaml", train={"batch_size": 4, "max_steps": 60}, metrics=FACTORS
    )
    other = configured(
        lab, models, "b.yaml", train={"max_steps": 20_000, "optim": "sgd"},
        metrics={"sample_interval_s": 0.02, "log_vram_every_s": 1000},
    )  # fmt: skip
    series = lab.start(
        PYTHON, ROOT / "scripts/train.py", "--config", first, "--interleave", other,
        "--repeats", 2, "--cool-down", 0, "--out", "series",
        env=environment(**library.environment(script), **quick(*LEFT_OUT)),
    )  # fmt: skip
    eventually(lambda: _has_steps(lab.path / "series/b-1"), "the first steps of the second")
    series.send_signal(signal.SIGTERM)
    assert series.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    rows = ledger(lab)
    assert [row["optimizer"] for row in rows] == ["torch.AdamW", "torch.SGD"]
    assert [row["seed"] for row in rows] == ["42", "42"]
    assert [row["run"] for row in rows] == ["series/a-1", "series/b-1"]
    assert [row["status"] for row in rows] == ["finished", "stopped"]
    check_energy({name: value for name, value in rows[0].items() if value}, watts)
    check_carbon_and_cost(rows[0], lab.path / "series/a-1")
    assert rows[1]["co2e_g"] == rows[1]["energy_cost"] == rows[1]["gpu_cost"] == ""
    assert "no co2e_g: no grid intensity was given" in rows[1]["notes"]
    stopped = Run.open(lab.path / "series/b-1")
    assert stopped.writers[0].header["probes"]["nvml"]["period_s"] == 0.02
    ((gpu, power),) = stopped.series("power_w").items()
    assert len(stopped.series("memory_bytes")[gpu].t_ns) <= 2 < len(power.t_ns)  # first and last
    assert int(rows[1]["steps"]) == training_steps(stopped.path)
    assert (lab.path / "outputs/b/round-1/adapter_model.safetensors").exists()
    assert not [*(lab.path / "series").glob("*-2")]


def check_energy(row: dict[str, str], watts: float) -> None:
    joules, window_s = float(row["energy_J"]), float(row["window_s"])
    low, high = float(row["energy_low_J"]), float(row["energy_high_J"])
    assert low <= watts * window_s <= high, row
    assert high < 2 * low  # wide where readings came late, and no guess
    tokens = float(row["window_tokens"])
    assert float(row["J_per_token"]) == pytest.approx(joules / tokens, rel=1e-9)
    assert float(row["E10k_J"]) == pytest.approx(1e4 * joules / tokens, rel=1e-9)
    assert float(row["avg_power_W"]) == pytest.approx(joules / window_s, rel=1e-9)
    # In a short window the mean by the counter may be above the readings, which are constant.
    highest = max(watts, float(row["avg_power_W"]))
    assert float(row["peak_power_W"]) == pytest.approx(highest, rel=1e-6)
    assert [float(row[f"vram_{which}_MB"]) for which in ("peak", "avg")] == pytest.approx(
        [3000] * 2
    )
    assert "no energy_J" not in row["notes"]


def check_carbon_and_cost(row: dict[str, str], run: Path) -> None:
    """By hand from the row's energy, and as the card has them."""
    kwh = float(row["energy_J"]) / 3.6e6 * FACTORS["pue"]
    grams = kwh * grid_named("France").g_per_kwh
    assert float(row["co2e_g"]) == pytest.approx(grams, rel=1e-9)
    assert float(row["energy_cost"]) == pytest.approx(kwh * FACTORS["price_per_kwh"], rel=1e-9)
    rent = float(row["gpu_cost"])
    assert 0 < rent <= float(row["wall_s"]) / 3600 * FACTORS["price_per_gpu_hour"]
    assert (row["currency"], row["co2e_g_basis"]) == ("EUR", "assumed")
    assert "France, location-based" in row["co2e_g_note"]
    assert "x PUE 1.2" in row["co2e_g_note"]
    card = summarize(Run.open(run), Settings(window="unbroken")).readings
    for column, key in (
        ("co2e_g", "carbon.co2e_g"),
        ("energy_cost", "cost.energy"),
        ("gpu_cost", "cost.gpu_whole_run"),
    ):
        reading = card[key]
        assert isinstance(reading, Reading)
        assert float(row[column]) == pytest.approx(reading.value, rel=1e-12)


# -- ends before the last step --------------------------------------------------------------------

FINISHING = "[train] finishing this step and saving; a second signal ends it at once"
TOO_LONG = "the whole training would take more than 6 h: "
ADAPTER = "outputs/run/adapter_model.safetensors"
ENDLESS = {"max_steps": 10**9}


def _has_no_pending_signal(pid: int) -> bool:
    """True once a signal was delivered: a second one of its kind would not be a second before."""
    try:
        return "ShdPnd:\t0000000000000000" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


class SlowTraining:
    """`erg train` in a folder of its own, by scripts/slow_steps.py, and how it ended."""

    code: int
    out: str
    err: str

    def __init__(
        self,
        folder: Path,
        models: Path,
        *slow: object,  # what the script does
        options: tuple[object, ...] = (),
        signals: tuple[int, ...] = (),
        to_children: bool = False,
        **changes: Any,
    ) -> None:
        folder.mkdir()
        self.path, self._signals, self._to_children = folder, signals, to_children
        config = configured(Lab(folder), models, **changes)
        words = [*script("slow_steps", *slow)[1:], "--config", config, "--out", "run"]
        words += [str(option) for option in ("--no-report", *options)]
        self.program = Program(words, folder, (*LOADED, "ergmeter.workloads.sft.progress"))

    def signalled(self) -> None:
        """Send its signals once a step is slow, from this process."""
        if self._signals:
            eventually((self.path / "slow").exists, f"the slow step of {self.path.name}")
        for number in self._signals:
            process = psutil.Process(int((self.path / "slow").read_text()))
            children = process.children(recursive=True) if self._to_children else []
            for each in (process, *children):
                each.send_signal(number)
            eventually(partial(_has_no_pending_signal, process.pid), "the signal's delivery")

    @property
    def row(self) -> dict[str, str]:
        (row,) = ledger(Lab(self.path))
        return row

    def is_kept(self) -> bool:
        """True if its run is closed and has every step, as its row has."""
        run = Run.open(self.path / "run")
        is_closed = all(writer.closed for writer in run.writers)
        return is_closed and training_steps(run.path) == int(self.row["steps"])


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SlowTraining]]:
    """They run one after the other, each forked from a process that has loaded what it needs."""
    root, models = tmp_path_factory.mktemp("slow"), kept_models(tmp_path_factory)
    once, twice = (signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)

    def made(name: str, *slow: object, **more: Any) -> SlowTraining:
        return SlowTraining(root / name, models, *slow, **more)

    listed = [
        # Longer than the test, within one call of torch: no handler of Python's runs.
        made("in C", "torch", 2, 8000, 300, options=("--grace", 1), signals=once),
        made("twice", "sleep", 0, 3600, 300, options=("--grace", 3600), signals=twice),
        made("optimizer", "optimizer", 2, 3600, 300, options=("--grace", 0), signals=once),
        made("first step", "sleep", 0, 3600, 0.5, train=ENDLESS),
        made("three steps", "never", 0, 0, 300, options=("--in-series", 4, 60), train=ENDLESS),
        made(
            "anyway", "never", 5, 0, 300, options=("--anyway", "--grace", 3600),
            signals=(signal.SIGINT,), to_children=True, train={**ENDLESS, "dataloader_workers": 2},
        ),
    ]  # fmt: skip
    lab = Lab(root)
    plan = [{**each.program._asdict(), "cwd": str(each.path)} for each in listed]
    warm = lab.start(
        *script("warm", json.dumps(plan)), env=environment(**quick(*LEFT_OUT)),
        stdout=subprocess.PIPE,
    )  # fmt: skip
    for each in listed:
        each.signalled()
    out, _ = warm.communicate(timeout=TIMEOUT_S)
    for each, line in zip(listed, out.splitlines(), strict=True):
        printed = json.loads(line)
        each.code, each.out, each.err = (printed[name] for name in ("code", "out", "err"))
    yield {each.path.name: each for each in listed}
    lab.close()


def test_a_signal_ends_a_step_within_c_once_the_grace_is_over(
    trainings: dict[str, SlowTraining],
) -> None:
    ended = trainings["in C"]
    assert ended.code == 128 + signal.SIGTERM, ended.err
    assert FINISHING in ended.err
    assert "[train] stopped; saved in outputs/run" in ended.out
    assert not (ended.path / "over").exists()
    assert (ended.path / ADAPTER).exists()  # as of the step before
    assert (ended.row["status"], ended.row["steps"]) == ("stopped", "2")
    assert ended.is_kept()
    assert Run.open(ended.path / "run").status == "stopped (SIGTERM)"


def test_a_second_signal_ends_the_step_at_once(trainings: dict[str, SlowTraining]) -> None:
    """It is the first one of all, so there is nothing to save."""
    ended = trainings["twice"]
    assert ended.code == 128 + signal.SIGINT, ended.err
    lines = [line for line in ended.err.splitlines() if "this step" in line]
    assert lines == [FINISHING, "[train] ending this step"]
    assert "[train] stopped (no step was done, so there is nothing to save)" in ended.out
    assert not (ended.path / "over").exists()
    assert not (ended.path / ADAPTER).exists()
    assert (ended.row["status"], ended.row["steps"]) == ("stopped", "0")
    assert ended.is_kept()
    assert Run.open(ended.path / "run").status == "stopped (SIGINT)"


def test_a_step_that_is_ended_within_the_optimizer_leaves_its_row(
    trainings: dict[str, SlowTraining],
) -> None:
    """And no weights, which were changing."""
    ended = trainings["optimizer"]
    assert ended.code == 128 + signal.SIGTERM, ended.err
    assert "[train] ending this step" in ended.err
    assert "[train] stopped (the weights were in use); nothing is saved" in ended.out
    assert not (ended.path / "over").exists()
    assert not (ended.path / ADAPTER).exists()
    assert (ended.row["status"], ended.row["steps"]) == ("stopped", "2")
    assert "the weights were in use" in ended.row["notes"]
    assert ended.is_kept()


def test_a_first_step_that_leaves_no_time_for_the_others_is_ended(
    trainings: dict[str, SlowTraining],
) -> None:
    ended = trainings["first step"]
    assert ended.code == 1, ended.err
    assert f"[train] stopped ({TOO_LONG}its first step took " in ended.out
    assert "or --anyway; no step was done, so there is nothing to save)" in ended.out
    assert not (ended.path / "over").exists()
    assert ended.row["status"] == "stopped"
    assert TOO_LONG in ended.row["notes"]
    assert ended.is_kept()
    assert Run.open(ended.path / "run").status == f"stopped ({TOO_LONG[:-2]})"


def test_a_training_that_would_take_too_long_ends_after_three_steps(
    trainings: dict[str, SlowTraining],
) -> None:
    """As one of a series, which ends with it: that is code 3."""
    ended = trainings["three steps"]
    assert ended.code == 3, ended.err
    assert f"[train] stopped ({TOO_LONG}" in ended.out
    assert "a step (the shortest of the first 3) x 1000000000 steps x 4 trainings; " in ended.out
    assert "or --anyway); saved in outputs/run" in ended.out
    assert (ended.path / ADAPTER).exists()
    assert (ended.row["status"], ended.row["steps"]) == ("stopped", "3")
    assert ended.is_kept()
    assert Run.open(ended.path / "run").status == f"stopped ({TOO_LONG[:-2]})"


def test_anyway_goes_on_and_one_signal_to_all_processes_is_one(
    trainings: dict[str, SlowTraining],
) -> None:
    """The data loader's workers, which get a terminal's Ctrl-C too, are no second signal."""
    ended = trainings["anyway"]
    assert ended.code == 128 + signal.SIGINT, ended.err
    assert f"[train] Warning: {TOO_LONG}" in ended.err
    assert ended.err.count(FINISHING) == 1
    assert "ending this step" not in ended.err
    assert "[train] stopped; saved in outputs/run" in ended.out
    assert ended.row["status"] == "stopped"
    assert int(ended.row["steps"]) > 5
    assert ended.is_kept()


def test_two_ranks_write_one_row(lab: Lab, models: Path) -> None:
    pair = {"prompt": "Who keeps the bees?", "response": "Anna, behind the mill."}
    (lab.path / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 16)
    config = configured(
        lab, models, train={"batch_size": 2, "max_steps": 9}, data={"train_path": "pairs.jsonl"}
    )
    words = [
        ROOT / "src/ergmeter/__main__.py", "train", "--config", config, "--out", "run", "--json",
        "--set", "train.max_steps=4",
    ]  # fmt: skip
    (done,) = warmed(Program(words, lab.path, LOADED, ranks=2), **quick(*LEFT_OUT))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["row"]["steps"] == 4
    rows = ledger(lab)
    assert len(rows) == 1
    assert (rows[0]["world_size"], rows[0]["steps"]) == ("2", "4")
    assert sorted(set(Run.open(lab.path / "run").steps()["rank"])) == [0, 1]
    tokenizer = Tokenizer.from_file(str(next(models.glob("tiny-*/tokenizer.json"))))
    texts = (pair["prompt"], "\n", pair["response"])
    length = sum(len(tokenizer.encode(one, add_special_tokens=False).ids) for one in texts) + 1
    assert float(rows[0]["tokens_processed"]) == 4 * 2 * 2 * length


def test_bad_input_is_one_line(
    lab: Lab, models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(lab, models)
    monkeypatch.chdir(lab.path)
    for words, wanted, code in (
        (("--config", "nowhere.yaml"), "nowhere.yaml", 1),
        (("--config", config, "--set", "train.max_stps=3"), "max_steps", 2),
        (("--config", config, "--set", "train.max_steps"), "KEY=VALUE", 2),
        (("--config", config, "--sink", "tensorbord"), "did you mean 'tensorboard'?", 2),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["train", *words])
        assert ended.value.code == code
        said = capsys.readouterr().err
        assert wanted in said
        assert len(said.splitlines()) == 1, said


# -- the guide's own commands ---------------------------------------------------------------------

SNIPPETS = """
import pandas as pd

df = pd.read_csv('outputs/energy_results.csv')
bnb_runs = df[df['backend'] == 'bnb']
unsloth_runs = df[df['backend'] == 'unsloth']
print(f"BnB avg efficiency: {bnb_runs['J_per_token'].mean():.3f} J/token")
print(f"Unsloth avg efficiency: {unsloth_runs['J_per_token'].mean():.3f} J/token")
print(f"Speedup: {bnb_runs['tok_per_s'].mean() / unsloth_runs['tok_per_s'].mean():.2f}x")
energy_savings = (bnb_runs['E10k_J'].mean() - unsloth_runs['E10k_J'].mean()) / bnb_runs['E10k_J'].mean() * 100
print(f"Energy savings with Unsloth: {energy_savings:.1f}%")
vram_savings = (bnb_runs['vram_peak_MB'].mean() - unsloth_runs['vram_peak_MB'].mean()) / bnb_runs['vram_peak_MB'].mean() * 100
print(f"VRAM savings with Unsloth: {vram_savings:.1f}%")
"""  # noqa: E501  as the guide has them


def test_the_guides_snippets_run_as_they_are(lab: Lab) -> None:
    from ergmeter.workloads.sft.ledger import COLUMNS, append_row

    path = lab.path / "outputs/energy_results.csv"
    for backend, rate in (("bnb", 1000.0), ("unsloth", 2000.0)):
        cells: dict[str, object] = dict.fromkeys(COLUMNS)
        figures = {"tok_per_s": rate, "J_per_token": 300 / rate, "E10k_J": 3e6 / rate}
        cells |= {"backend": backend, "run": backend, "vram_peak_MB": 8e6 / rate, **figures}
        assert not append_row(path, cells).problem
    done = lab.run(sys.executable, "-c", SNIPPETS)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split("\n")[:5] == [
        "BnB avg efficiency: 0.300 J/token",
        "Unsloth avg efficiency: 0.150 J/token",
        "Speedup: 0.50x",  # Unsloth is twice as quick: the formula is upside down
        "Energy savings with Unsloth: 50.0%",
        "VRAM savings with Unsloth: 50.0%",
    ]


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
OF_THE_GUIDE = {
    "measure-torch": "./dev train --config configs/cpu/run_torch.yaml",  # ours, beside the guide's
    "process": "./dev process --config configs/cpu/run_bnb.yaml",
    "measure-bnb": "./dev train --config configs/cpu/run_bnb.yaml",
    "measure-unsloth": "./dev train-unsloth --config configs/cpu/run_unsloth.yaml",
    "train-bnb-tb": "./dev train --config configs/cpu/run_bnb.yaml --set train.tensorboard=true",
    "train-unsloth-tb": (
        "./dev train-unsloth --config configs/cpu/run_unsloth.yaml --set train.tensorboard=true"
    ),
    "compare": "./dev analyze outputs/energy_results.csv",
}


@needs_make
@pytest.mark.parametrize("target", OF_THE_GUIDE)
def test_a_make_target_runs_what_the_page_says(target: str) -> None:
    """Unsloth's two are not run: they set up an environment of its own."""
    done = subprocess.run(
        ["make", "-n", target, "GPU="], cwd=ROOT, capture_output=True, text=True, check=True,
        env=environment(), timeout=TIMEOUT_S,
    )  # fmt: skip
    said, *more = [line.strip() for line in done.stdout.splitlines()]
    if target == "compare":
        assert said == OF_THE_GUIDE[target]
        return
    assert more == [OF_THE_GUIDE[target]]
    if target != "process":
        config = more[0].partition("--config ")[2].partition(" ")[0]
        assert said == f'echo "no GPU here: training the small CPU variant {config}"'


@needs_make
@pytest.mark.parametrize("target", OF_THE_GUIDE)
def test_a_make_target_on_a_machine_with_a_gpu_takes_the_guides_configuration(target: str) -> None:
    done = subprocess.run(
        ["make", "-n", target, "GPU=yes", "OPTIONS=--repeats 3"], cwd=ROOT, capture_output=True,
        text=True, check=True, env=environment(), timeout=TIMEOUT_S,
    )  # fmt: skip
    recipe = OF_THE_GUIDE[target].replace("configs/cpu/", "configs/")
    said, *more = [line.strip() for line in done.stdout.splitlines()]
    if target == "compare":
        assert said == recipe
    elif target == "process":
        assert more == [recipe]
    else:
        assert more == [f"{recipe} --repeats 3"]
        config = recipe.partition("--config ")[2].partition(" ")[0]
        assert said == f'echo "GPU found: training with {config}"'


@pytest.fixture
def clone(lab: Lab, models: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The lab as a clone whose environment is set up, and whose built-in models are made."""
    for name in (
        "Makefile",
        "configs",
        "constraints.txt",
        "dev",
        "pyproject.toml",
        "scripts",
        "tests",
    ):
        (lab.path / name).symlink_to(ROOT / name)
    venv = lab.path / ".venv"
    venv.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (venv / name).symlink_to(Path(sys.prefix) / name)
    files = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    sums = subprocess.run(["cksum"], input=b"".join(files), capture_output=True, check=True)
    (venv / ".set-up").write_text(f"{sums.stdout.decode().strip()} train\n")
    (lab.path / "outputs").mkdir()
    (lab.path / "outputs/models").symlink_to(models)
    monkeypatch.setenv("PATH", f"{Path(PYTHON).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MAKEFLAGS", "GPU=")
    for name, value in quick(*set(LEFT_OUT) - {"bitsandbytes"}).items():
        monkeypatch.setenv(name, value)
    return lab


@needs_make
def test_the_page_does_what_it_says(clone: Lab) -> None:
    """Its blocks one after the other, as they are pasted into a shell in a clone."""
    page = (ROOT / "docs/from-sft-play.md").read_text()
    blocks = re.findall(r"```(bash|text)\n(.*?)```", page, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["bash", "text", *("bash",) * 2, "text", "bash", "text"]
    printed: list[str] = []
    results = []
    for kind, block in blocks:
        if kind == "text":
            assert [line for line in block.splitlines() if line not in printed] == []
            continue
        done = clone.run("bash", "-euc", block)
        assert done.returncode == 0, done.stderr.decode()
        assert b"kernels" not in done.stderr  # bitsandbytes', of the Hub
        printed = [line.rstrip() for line in done.stdout.decode().splitlines()]
        results.append(printed)
    _, formulas, _, wishes = results
    assert not (clone.path / "outputs/energy_results.csv").exists()  # short rows are kept apart
    rows = [*ledger(clone, "outputs/try.csv"), *ledger(clone, "outputs/wishes.csv")]
    assert [(row["backend"], row["steps"]) for row in rows] == [("bnb", "30"), ("torch", "30")]
    columns = re.findall(
        r"`(\w+)`", page.partition("then what was measured:")[2].partition(". ")[0]
    )
    assert [*rows[0]][: len(columns)] == columns
    assert columns[-1] == "vram_avg_MB"
    assert (clone.path / "outputs/cpu-bnb/sample.txt").exists()  # of make process
    assert [*(clone.path / "outputs/cpu-bnb").rglob("events.out.tfevents.*")]
    number = {name: float(rows[0][name]) for name in ("wall_s", "warmup_s", "tok_per_s")}
    theirs = float(rows[0]["tokens_processed"]) / (number["wall_s"] - number["warmup_s"])
    assert formulas == [
        f"their formula: {theirs:.1f} tokens/s; ours: {number['tok_per_s']:.1f};"
        f" the column: {number['tok_per_s']:.1f}"
    ]
    assert number["warmup_s"] > 0
    assert (rows[1]["currency"], rows[1]["gpu_cost"]) == ("EUR", "")
    (run,) = (clone.path / "runs").glob("sinks-*")
    assert Run.open(run).writers[0].header["settings"]["pue"] == 1.2
    assert [*(run / "tensorboard").glob("events.out.tfevents.*")]
    with (run / "figures.csv").open(newline="") as file:
        (final,) = csv.DictReader(file)
    assert final["scope"] == "run"
    assert not [line for line in wishes if "Warning" in line]


def test_the_yaml_of_the_page_is_read(lab: Lab) -> None:
    text = (
        (ROOT / "docs/from-sft-play.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    )
    (lab.path / "run.yaml").write_text(f"include: {ROOT}/configs/cpu/run_torch.yaml\n{text}")
    config = load(lab.path / "run.yaml")
    assert config.train.report_to == ("tensorboard", "csv:rows=final")
    assert config.metrics.grid == "FR"
