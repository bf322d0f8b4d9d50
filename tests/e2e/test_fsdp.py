"""Models that are sharded over two ranks: the whole is told, and no rank's part of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.source import model_graph
from ergmeter.flops.work import TrainedParts, step_work
from tests.e2e.clocks import bounds_s
from tests.e2e.conftest import SCRIPTS, Program, needs, warmed
from tests.e2e.recorded_steps import steps, sums, trainings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks

needs("transformers")

STEPS, MICRO = 12, 2
KINDS = ("fsdp2", "fsdp1", "fsdp1-flat")


def told(lab: Lab, how: str) -> dict[str, list[dict[str, Any]]]:
    """Each kind's account of itself, by rank."""
    return {
        kind: [json.loads((lab.path / f"{how}-{kind}-{rank}.json").read_text()) for rank in (0, 1)]
        for kind in KINDS
    }


def by_configuration(own: dict[str, Any]) -> float:
    """The FLOPs of a sequence as long as that of a token is on the average of a rank's tokens."""
    length = round(own["squares"] / sum(own["real"]))
    said = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128,
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "tie_word_embeddings": False,
    }  # fmt: skip
    graph = model_graph(ModelConfig(said, where="test"))
    training = TrainedParts(frozen=("layers.0",))
    return step_work(graph, Batch.of(1, length), training=training).chosen.model_per_step


def check(lab: Lab, run: Path, own: list[dict[str, Any]]) -> None:
    for rank, said in enumerate(own):
        rows = steps(run, rank=rank)
        assert rows["index"] == list(range(STEPS))
        assert rows["tokens_computed"] == sums(said["computed"], MICRO)
        assert rows["tokens_real"] == sums(said["real"], MICRO)
        assert rows["loss"] == said["losses"][MICRO - 1 :: MICRO]
        assert said["held"] < 0.6 * said["parameters"]  # a rank has about half of it
    first, second = trainings(run)
    assert first["id"] == second["id"]
    for head in run.glob("*/writer.json"):
        said = json.loads(head.read_text())
        assert said["settings"]["parameters"] == own[0]["parameters"]
        assert said["training"]["parameters"] == own[0]["parameters"]
        assert said["training"]["parameters_trained"] == own[0]["parameters_trained"]
        assert said["flops"][0]["model_per_step"] in [by_configuration(one) for one in own]
    least_s, most_s = bounds_s(own)
    rate = lab.report(str(run))["readings"]["throughput.tokens_per_s"]["value"]
    tokens = sum(sum(one["real"]) for one in own)
    assert tokens / most_s <= rate <= tokens / least_s


def test_sharded_models_are_told_whole_and_train_as_before(lab: Lab) -> None:
    loads = ("light", "torch._dynamo", "transformers.models.llama.modeling_llama")
    (done,) = warmed(Program([SCRIPTS / "fsdp_loop.py", *KINDS], lab.path, loads, ranks=2))
    assert done.returncode == 0, done.stderr
    alone, own = told(lab, "plain"), told(lab, "metered")
    ids = set()
    for kind in KINDS:
        for rank in (0, 1):
            assert own[kind][rank]["losses"] == alone[kind][rank]["losses"]
        check(lab, lab.path / kind, own[kind])
        ids.add(trainings(lab.path / kind)[0]["id"])
    assert len(ids) == len(KINDS)  # three trainings, one after the other
