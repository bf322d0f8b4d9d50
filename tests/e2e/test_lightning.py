"""Lightning's Trainer, real, on 1 and 2 devices: its own count beside what a callback told."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.clocks import bounds_s
from tests.e2e.conftest import Program, needs, reported, script, warmed
from tests.e2e.recorded_steps import steps, sums, trainings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.frameworks

needs("lightning")

STEPS, MICRO = 12, 4
FIT = "lightning_trainer"
_CHANCE = re.compile(r"\d+(\.\d+)? ?s\b")
HOW = ("plain", "metered")
LLAMA = "transformers.models.llama.modeling_llama"
LOADED = ("torch._dynamo", LLAMA, "lightning.fabric", "lightning.pytorch")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """What each script printed, and where: on one device alone and with the callback, on two with
    it, whose second process Lightning starts itself; and loops of Fabric."""
    programs: dict[str, list[Any]] = {
        "alone": [FIT, "alone", "plain"],
        "within": [FIT, "within", "metered"],
        "two": [FIT, "within", "metered", "ddp", 2],
        "fabric": ["fabric_loop", *HOW],
    }
    folders = {name: tmp_path_factory.mktemp(name) for name in programs}
    done = warmed(
        *(Program(script(*words)[1:], folders[name], LOADED) for name, words in programs.items())
    )
    for one in done:
        assert one.returncode == 0, one.stderr
    printed = (one.stdout + one.stderr for one in done)
    return dict(zip(programs, zip(folders.values(), printed, strict=True), strict=True))


def run_in(folder: Path) -> Path:
    """The only run there."""
    (header,) = folder.rglob("run.json")
    return header.parent


def means(losses: list[float]) -> list[float]:
    """Of each step, over its micro-batches: what is trained on."""
    return [sum(losses[at : at + MICRO]) / MICRO for at in range(0, len(losses), MICRO)]


def truth(folder: Path, name: str, ranks: int = 1) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


def check(run: Path, own: list[dict[str, Any]]) -> None:
    """Tokens, steps, losses, times and parameters, each against the program's own."""
    for rank, said in enumerate(own):
        rows = steps(run, rank=rank)
        assert rows["index"] == list(range(STEPS))
        assert rows["micro_steps"] == [MICRO] * STEPS
        assert rows["tokens_computed"] == sums(said["computed"], MICRO)
        assert rows["tokens_real"] == sums(said["real"], MICRO)
        # The first of each row bears no loss: the model compares it with nothing.
        assert sum(rows["tokens_loss"]) == sum(said["real"]) - 4 * MICRO * STEPS
        assert rows["loss"] == pytest.approx(means(said["losses"]), rel=1e-6)
        assert rows["learning_rate"] == [1e-3] * STEPS
    readings = reported(run)["readings"]
    least_s, most_s = bounds_s(own)
    tokens = sum(sum(one["real"]) for one in own)
    assert readings["steps.count"]["value"] == STEPS
    assert readings["tokens.total"]["value"] == tokens
    assert tokens / most_s <= readings["throughput.tokens_per_s"]["value"] <= tokens / least_s
    for name in ("eval_s", "checkpoint_s"):  # of the rank that took longest
        within_s, in_all_s = (max(one[name][at] for one in own) for at in (0, 1))
        assert 0 < within_s <= readings[f"time.{name}"]["value"] <= in_all_s
    for one in trainings(run):
        assert one["world"] == len(own)
        assert one["parameters"] == one["parameters_trained"] == own[0]["parameters"]


def test_a_callback_sees_steps_tokens_losses_evaluation_and_checkpoints(
    fitted: dict[str, tuple[Path, str]],
) -> None:
    folder, within = fitted["within"]
    without, alone = fitted["alone"]
    assert _CHANCE.sub("TIME", within) == _CHANCE.sub("TIME", alone)
    own = truth(folder, "within")
    assert own[0]["losses"] == truth(without, "alone")[0]["losses"]
    assert len(own[0]["losses"]) == STEPS * MICRO
    run = run_in(folder)  # though the callback is there twice
    check(run, own)
    assert "compute.model_flops_per_token" in reported(run)["readings"]


def test_two_devices_without_torchrun_are_one_training_of_two_ranks(
    fitted: dict[str, tuple[Path, str]],
) -> None:
    folder, _ = fitted["two"]
    run = run_in(folder)
    check(run, truth(folder, "within", 2))
    first, second = trainings(run)
    assert first["id"] == second["id"]


def test_a_loop_of_fabric_is_seen_by_one_line(fitted: dict[str, tuple[Path, str]]) -> None:
    folder, _ = fitted["fabric"]
    alone, own = (json.loads((folder / f"{how}.json").read_text()) for how in HOW)
    assert own["losses"] == alone["losses"]
    run = run_in(folder)
    rows = steps(run)
    assert rows["index"] == list(range(20))
    assert rows["micro_steps"] == [MICRO] * 20
    assert rows["tokens_computed"] == sums(own["computed"], MICRO)
    assert rows["tokens_real"] == sums(own["real"], MICRO)
    assert rows["loss"] == own["losses"][MICRO - 1 :: MICRO]  # of the last, as it was told
    assert trainings(run)[0]["parameters"] == own["parameters"]
    readings = reported(run)["readings"]
    within_s, in_all_s = own["eval_s"]
    assert within_s <= readings["time.eval_s"]["value"] <= in_all_s
    (least_s, most_s), tokens = bounds_s([own]), sum(own["real"])
    assert tokens / most_s <= readings["throughput.tokens_per_s"]["value"] <= tokens / least_s
