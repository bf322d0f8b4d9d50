"""What was trained and on what: from the YAML, with the command line before it."""

from __future__ import annotations

from typing import Any

import pytest

from ergmeter.errors import FormatError, UsageError
from ergmeter.neuron.analysis import AnalysisRequest, check_request
from ergmeter.neuron.score import Baseline
from ergmeter.neuron.training_job import TrainingFile, read_job

DATA = {"global_batch_size": 64, "micro_batch_size": 1, "seq_length": 4096}


def file(**parts: Any) -> TrainingFile:
    return TrainingFile({"data": DATA, **parts}, where="job.yaml")


def test_the_yaml_is_read_and_the_command_line_wins() -> None:
    yaml = file(trainer={"devices": 32, "num_nodes": 4}, precision={"type": "fp32"})
    job = read_job(yaml)
    assert (job.batch_size, job.seq_len, job.nodes, job.devices) == (64, 4096, 4, 32)
    assert job.dtype == "fp32"
    job = read_job(yaml, batch_size=8, seq_len=128, nodes=2, devices=16, dtype="bf16")
    assert (job.batch_size, job.seq_len, job.nodes, job.devices) == (8, 128, 2, 16)
    assert job.dtype == "bf16"


def test_what_nobody_says_is_noted() -> None:
    job = read_job(file())
    assert (job.nodes, job.devices, job.lora, job.checkpointing) == (1, None, None, "none")
    assert any("1 is assumed" in note for note in job.notes)
    assert any("bf16 and its peak are assumed" in note for note in job.notes)


def test_a_key_that_is_misspelt_is_named_with_what_was_meant() -> None:
    yaml = file(trainr={"devices": 16}, model={"num_layer": 8})
    notes = read_job(yaml).notes
    assert "trainr is not read; did you mean trainer?" in notes
    assert "model.num_layer is not read; did you mean num_layers?" in notes
    yaml = TrainingFile({"data": {"global_batch_size": 64, "seq_lenght": 4096}}, where="job.yaml")
    with pytest.raises(FormatError) as caught:
        read_job(yaml)
    assert str(caught.value) == (
        "job.yaml: the key data.seq_length is missing; add it, or pass --seq-len;"
        " data.seq_lenght is not read; did you mean seq_length?"
    )


@pytest.mark.parametrize("said", ["fp8", "weird", "manual", 8, "${none.of.it}"])
def test_a_precision_that_is_not_known_is_noted_and_none_of_the_trainer_s(said: object) -> None:
    job = read_job(file(precision={"type": said}))
    assert job.dtype == "bf16"
    assert any(note.startswith(f"precision.type is {said}, which is not") for note in job.notes)
    for known in ("bf16SR", "mixed_precision", "mixed_precisionSR", "autocast", "fp32"):
        notes = read_job(file(precision={"type": known})).notes
        assert not any("precision" in note for note in notes)


def test_lora_is_read_with_the_trainer_s_defaults_and_fused_layers_taken_apart() -> None:
    peft = {"enabled": True, "lora_rank": 8, "target_modules": ["qkv_proj", "o_proj"]}
    job = read_job(file(model_alignment_strategy={"peft": peft}))
    assert job.lora is not None
    assert (job.lora.r, job.lora.targets) == (8, ("q_proj", "k_proj", "v_proj", "o_proj"))
    job = read_job(file(model_alignment_strategy={"peft": {"enabled": True}}))
    assert job.lora is not None
    assert (job.lora.r, job.lora.targets) == (16, ("q_proj", "k_proj", "v_proj"))
    assert any("lora_rank is not given: 16" in note for note in job.notes)
    assert read_job(file(model_alignment_strategy={"peft": {"enabled": False}})).lora is None


def test_targets_that_are_no_list_are_refused_by_name() -> None:
    peft = {"enabled": True, "target_modules": "${x}"}
    with pytest.raises(FormatError, match=r"peft\.target_modules must be a list"):
        read_job(file(model_alignment_strategy={"peft": peft}))


def test_replicas_and_micro_batches_follow_from_the_layout() -> None:
    layout = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2}
    job = read_job(file(trainer={"devices": 32, "num_nodes": 2}, distributed_strategy=layout))
    assert (job.replicas, job.pipeline_stages) == (4, 2)  # 64 cores / 16 of a model
    assert job.micro_batches == 16  # 64 sequences / 4 replicas / 1 at a time


def test_dimensions_that_the_yaml_sets_are_taken_and_minus_one_is_not() -> None:
    job = read_job(file(model={"num_layers": 4, "hidden_size": -1}))
    assert job.overrides == {"num_hidden_layers": 4}


def test_a_second_length_packing_and_other_objectives_are_noted() -> None:
    strategy = {"sft": {"packing": True}, "dpo": {"kl_beta": 0.01}}
    model = {"encoder_seq_length": 8192, "activations_checkpoint_granularity": "full"}
    job = read_job(file(model=model, model_alignment_strategy=strategy))
    said = " ".join(job.notes)
    assert job.checkpointing == "full"
    for word in ("model.encoder_seq_length is 8192", "sft.packing", "alignment by dpo"):
        assert word in said
    assert "encoder_seq_length" not in " ".join(read_job(file(model=model), seq_len=8192).notes)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_size_on_the_command_line_must_be_above_0(value: float) -> None:
    with pytest.raises(UsageError, match="--throughput must be a number above 0"):
        check_request(AnalysisRequest("a", "b", throughput=value))


def test_the_original_takes_a_0_as_not_given_and_nothing_less() -> None:
    check_request(AnalysisRequest("a", "b", throughput=0, batch_size=0), is_original=True)
    with pytest.raises(UsageError, match="--batch-size must be a number above 0; got -1"):
        check_request(AnalysisRequest("a", "b", batch_size=-1), is_original=True)


def test_a_baseline_must_be_a_number() -> None:
    for value in ("nan", "0", "-5"):
        with pytest.raises(UsageError, match=f"--base-mfu must be a number above 0; got {value}"):
            check_request(AnalysisRequest("a", "b", baseline=Baseline(mfu_percent=float(value))))
    check_request(AnalysisRequest("a", "b", baseline=Baseline(mfu_percent=-5)), is_original=True)
