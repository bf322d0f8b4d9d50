"""Memory of a step: against peaks recorded on an H200, against hand calculations, and its shape."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from ergmeter.errors import UsageError
from ergmeter.flops.batch import Batch
from ergmeter.flops.estimate.arrangement import OPTIMIZERS
from ergmeter.flops.estimate.estimate import CUBLAS_BYTES
from ergmeter.flops.estimate.memory import Kernels, Memory, Parallel, Setup, step_memory
from ergmeter.flops.graph.adapters import Lora
from ergmeter.flops.source import read_graph
from ergmeter.flops.work import TrainedParts

BILLION = "hidden=2048,layers=22,ffn=5632,heads=32,kv_heads=4,vocab={vocab}"
TINY = "hidden=256,layers=4,ffn=688,heads=4,kv_heads=4,vocab=32000"
ADAPTERS = TrainedParts(Lora(16, ("q_proj", "k_proj", "v_proj", "o_proj")))
CHECKPOINTED = TrainedParts(checkpointing="full")


# How the peaks of an H200 were recorded: a function called the model as it is configured, held its
# output through the backward pass and returned; then torch's AdamW made its step.
RECORDED: dict[str, object] = {
    "optimizer": "adamw",
    "output": "until-step",
    "kernels": Kernels(has_cache=True),
    "workspace_bytes": CUBLAS_BYTES,
}


def memory(
    model: str = TINY,
    *,
    sequences: int = 2,
    length: int = 256,
    training: TrainedParts | None = None,
    **setup: object,
) -> Memory:
    made = Setup(**setup)  # type: ignore[arg-type]
    return step_memory(
        read_graph(model), Batch.of(sequences, length), training=training, setup=made
    )


@pytest.mark.parametrize(
    ("model", "sequences", "length", "training", "quantize", "recorded"),
    [
        pytest.param(BILLION, 8, 2048, TrainedParts(), None, 45_705_421_312, id="full"),
        pytest.param(BILLION, 8, 2048, ADAPTERS, None, 43_024_355_328, id="lora"),
        pytest.param(BILLION, 8, 2048, ADAPTERS, "nf4", 41_814_885_376, id="qlora"),
        pytest.param(TINY, 2, 256, TrainedParts(), None, 439_613_440, id="tiny"),
    ],
)
def test_the_recorded_peaks_of_an_h200(
    model: str,
    sequences: int,
    length: int,
    training: TrainedParts,
    quantize: str | None,
    recorded: int,
) -> None:
    """transformers 5.17, torch 2.11, bf16, AdamW, PEFT; the allocator's own high-water mark."""
    found = memory(
        model.format(vocab=32000),
        sequences=sequences,
        length=length,
        training=training,
        quantize=quantize,
        **RECORDED,
    )
    off = found.peak.total_bytes / recorded - 1
    print(f"{found.peak.total_bytes / 1e9:.3f} GB against {recorded / 1e9:.3f} GB: {off:+.2%}")
    assert found.peak.name == "backward through the loss"
    assert abs(off) < 0.01  # 10 % were asked for


# Measured in the same way on the same kind of device: the largest of both passes, and that of the
# optimizer's step.
MORE = [
    pytest.param(8, 2048, 32000, CHECKPOINTED, {}, 15_754_049_536, 11_068_773_376, id="full ckpt"),
    pytest.param(
        4,
        2048,
        32000,
        TrainedParts(),
        {"dtype": "mixed"},
        38_947_831_808,
        22_069_191_680,
        id="mixed",
    ),
    pytest.param(
        8,
        2048,
        32000,
        CHECKPOINTED,
        {"dtype": "mixed"},
        24_028_391_424,
        22_068_208_640,
        id="mixed ckpt",
    ),
    pytest.param(
        2,
        2048,
        32000,
        TrainedParts(),
        {"kernels": Kernels(attention="eager", has_cache=True)},
        53_588_252_672,
        11_069_723_648,
        id="eager",
    ),
    pytest.param(1, 256, 32000, TrainedParts(), {}, 8_898_301_952, 11_077_295_104, id="short"),
    pytest.param(
        1, 256, 32000, TrainedParts(), {"optimizer": "sgd"}, 4_495_749_120, 4_472_548_352, id="sgd"
    ),
    pytest.param(
        8, 2048, 1000, CHECKPOINTED, {}, 9_748_212_736, 9_798_849_536, id="small vocabulary"
    ),
    pytest.param(
        8,
        2048,
        32000,
        TrainedParts(),
        {"micro_batches": 2},
        28_384_632_832,
        11_068_707_840,
        id="two micro-batches",
    ),
    pytest.param(
        4, 2048, 32000, TrainedParts(), {"dtype": "fp32"}, 98_857_101_312, 22_068_143_104, id="fp32"
    ),
    pytest.param(
        8,
        2048,
        32000,
        TrainedParts(frozen=("self_attn", "embed_tokens", "lm_head", "norm")),
        {},
        39_375_612_928,
        8_357_467_136,
        id="mlp alone",
    ),
]


@pytest.mark.parametrize(
    ("sequences", "length", "vocab", "training", "setup", "passes", "step"), MORE
)
def test_more_peaks_of_an_h200(
    sequences: int,
    length: int,
    vocab: int,
    training: TrainedParts,
    setup: dict[str, object],
    passes: int,
    step: int,
) -> None:
    found = memory(
        BILLION.format(vocab=vocab),
        sequences=sequences,
        length=length,
        training=training,
        **{**RECORDED, **setup},
    )
    assert found.moments[-1].total_bytes == pytest.approx(step, rel=0.002)
    assert max(one.total_bytes for one in found.moments[:-1]) == pytest.approx(passes, rel=0.002)


def test_the_parts_of_the_full_run_by_hand() -> None:
    found = memory(BILLION.format(vocab=32000), sequences=8, length=2048)
    params, rows = 1_100_048_384, 8 * 2048
    held = found.peak.bytes
    assert held["weights"] == 2 * params
    assert held["optimizer"] == 4 * params
    assert held["gradients"] == 0  # freed before the forward pass, not yet there at the loss
    assert held["loss"] == rows * 32000 * (4 + 4 + 4)  # the log-softmax and two gradients
    assert held["output"] == 0  # freed before the backward pass
    norm = 2048 * (4 + 2 + 2) + 4  # in 32 bits, scaled, and its result
    attention = (2048 + 256 + 256 + 2048) * 2 + 32 * 4
    feed = 4 * 5632 * 2
    assert held["activations"] == rows * (22 * (2 * norm + attention + feed) + norm)
    step = found.moments[-1].bytes
    assert step["gradients"] == 2 * params
    assert step["activations"] == 0


def test_stage_3_gathers_two_layers_and_what_is_in_none() -> None:
    found = memory(optimizer="sgd", parallel=Parallel(data=2, zero=3))
    layer = 4 * 256 * 256 + 3 * 256 * 688 + 2 * 256
    outside = 2 * 32000 * 256 + 256
    middle, back, step = (moment.bytes["gathered"] for moment in found.moments)
    assert middle == 2 * (2 * layer + outside)
    # On the way back also the half of the head's gradient that is another device's.
    assert back == middle + 2 * 32000 * 256 / 2
    assert step == 0


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("length", [16, 512])
def test_a_higher_stage_never_holds_more(micro_batches: int, length: int) -> None:
    each = [
        memory(
            sequences=8,
            length=length,
            micro_batches=micro_batches,
            parallel=Parallel(data=4, zero=stage),
        )
        for stage in range(3)
    ]
    for lower, higher in pairwise(each):
        for before, after in zip(lower.moments, higher.moments, strict=True):
            assert after.total_bytes <= before.total_bytes
    assert each[1].moments[0].bytes["gathered"] == each[2].moments[0].bytes["gathered"] == 0


def test_tensor_parallelism_leaves_the_norms_whole() -> None:
    whole, half = memory(), memory(parallel=Parallel(tensor=2))
    norms = 9 * 256
    matrices = 19_548_416 - norms
    assert half.peak.bytes["weights"] == 2 * (matrices / 2 + norms)
    assert half.peak.bytes["loss"] == whole.peak.bytes["loss"] / 2
    rows, layers = 2 * 256, 4
    between = rows * ((2 * layers + 1) * (256 * (4 + 2 + 2) + 4))
    inside = whole.peak.bytes["activations"] - between
    assert half.peak.bytes["activations"] == between + inside / 2
    along = memory(parallel=Parallel(tensor=2, is_sequence_parallel=True))
    assert along.peak.bytes["activations"] == whole.peak.bytes["activations"] / 2


def test_data_parallelism_and_micro_batches_shrink_the_rows_and_nothing_else() -> None:
    small = memory(sequences=2)
    spread = memory(sequences=8, parallel=Parallel(data=4))
    assert spread.peak.bytes == small.peak.bytes
    parts = memory(sequences=8, micro_batches=4)
    assert parts.sequences == 2
    assert parts.peak.bytes["activations"] == small.peak.bytes["activations"]
    assert parts.moments[0].bytes["gradients"] == 2 * 19_548_416  # they wait for the next


def test_a_pipeline_is_judged_by_its_fullest_stage() -> None:
    alone = memory(sequences=8, micro_batches=4)
    staged = memory(sequences=8, micro_batches=4, parallel=Parallel(pipeline=2))
    assert staged.stage == 1  # the head and the logits are there
    assert staged.peak.bytes["weights"] < alone.peak.bytes["weights"]
    deep = memory(
        "hidden=256,layers=8,ffn=688,heads=4,kv_heads=4,vocab=300",
        sequences=64,
        length=512,
        micro_batches=8,
        parallel=Parallel(pipeline=4),
    )
    assert deep.stage == 0  # four micro-batches are under way there, and one at the end
    one = memory(
        "hidden=256,layers=2,ffn=688,heads=4,kv_heads=4,vocab=300", sequences=8, length=512
    )
    between = 8 * 512 * (256 * 8 + 4)  # the last norm, which the first stage does not have
    expected = 4 * (one.moments[0].bytes["activations"] - between)
    assert deep.moments[0].bytes["activations"] == expected


def test_checkpointing_only_ever_shrinks_what_is_kept() -> None:
    kept = {
        mode: memory(
            training=TrainedParts(checkpointing=mode),
            kernels=Kernels(attention="eager"),
        )
        .moments[0]
        .bytes["activations"]
        for mode in ("none", "selective", "full")
    }
    assert kept["full"] < kept["selective"] < kept["none"]
    rows = 2 * 256
    assert kept["none"] - kept["selective"] == 4 * rows * 4 * 256 * (4 + 2)


def test_fused_kernels_keep_less() -> None:
    plain = memory().moments[0].bytes
    fused = memory(kernels=Kernels(norm="fused", feed="fused", loss="fused")).moments[0].bytes
    assert fused["activations"] < 0.8 * plain["activations"]
    assert fused["loss"] < 0.2 * plain["loss"]


@pytest.mark.parametrize(
    ("optimizer", "per_param"),
    [
        ("adamw", 4),
        ("adamw-32bit", 8),
        ("adamw-8bit", 2 * (1 + 4 / 256)),
        ("sgd", 0),
        ("sgd-momentum", 2),
        ("paged-adamw", 0),
    ],
)
def test_an_optimizer_keeps_so_many_bytes_a_parameter(optimizer: str, per_param: float) -> None:
    found = memory(optimizer=optimizer)
    # Norms have too few numbers for 8 bits, and make the difference.
    assert found.peak.bytes["optimizer"] == pytest.approx(per_param * 19_548_416, rel=1e-3)
    assert (found.host_bytes > 0) == optimizer.startswith("paged")


def test_every_optimizer_can_be_asked_for() -> None:
    for name in OPTIMIZERS:
        assert memory(optimizer=name).peak.total_bytes > 0
    factored = memory(optimizer="adafactor").peak.bytes["optimizer"]
    assert 0 < factored < 0.01 * memory().peak.bytes["optimizer"]


def test_four_bits_are_more_than_half_a_byte() -> None:
    matrices = 22 * (2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 5632)
    outputs = 22 * (2 * 2048 + 2 * 256 + 2 * 5632 + 2048)
    rest = 2 * (2 * 32000 * 2048 + 45 * 2048) + 4_505_600 * 4
    expected = {
        "nf4": 0.5625 * matrices,
        "nf4-double": (0.5 + 1 / 64 + 1 / 4096) * matrices,
        "int8": matrices + 4 * outputs,
    }
    for name, quantised in expected.items():
        found = memory(BILLION.format(vocab=32000), training=ADAPTERS, quantize=name)
        assert found.peak.bytes["weights"] == pytest.approx(quantised + rest, rel=1e-9)


def test_bf16_adapters_read_what_is_there_and_copy_nothing() -> None:
    wide = memory(training=ADAPTERS)
    narrow = memory(training=ADAPTERS, kernels=Kernels(adapter_bytes=2))
    dropped = memory(training=ADAPTERS, kernels=Kernels(has_adapter_dropout=True))
    rows = 2 * 256
    shrunk = 4 * rows * (4 * 256 * 4 - 256 * 2 + 4 * 16 * 2)  # attention's result was kept anyway
    assert wide.moments[0].bytes["activations"] - narrow.moments[0].bytes["activations"] == shrunk
    masks = (4 * 4 - 3) * rows * 256  # nothing goes back through the first q, k and v
    assert dropped.moments[0].bytes["activations"] - wide.moments[0].bytes["activations"] == masks


def test_a_tied_head_is_held_once_unless_a_pipeline_parts_it() -> None:
    tied = f"{TINY},tied=true"
    assert memory(tied).peak.bytes["weights"] == 2 * (19_548_416 - 32000 * 256)
    staged = memory(tied, sequences=4, micro_batches=2, parallel=Parallel(pipeline=2))
    assert staged.stage == 1
    layer = 4 * 256 * 256 + 3 * 256 * 688 + 2 * 256
    assert staged.peak.bytes["weights"] == 2 * (2 * layer + 256 + 32000 * 256)


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        ({"quantize": "nf4"}, "quantised weights can't be trained"),
        ({"dtype": "int4"}, "no precision 'int4'"),
        ({"optimizer": "magic"}, "no optimizer 'magic'"),
        ({"micro_batches": 3}, "must be a multiple"),
        ({"parallel": Parallel(pipeline=9)}, "4 layers can't be split into 9 pipeline stages"),
        ({"parallel": Parallel(tensor=3)}, "4 attention heads can't be split evenly over 3"),
        ({"parallel": Parallel(tensor=8)}, "4 attention heads can't be split evenly over 8"),
        ({"parallel": Parallel(context=257)}, "256 tokens can't be split over 257"),
        ({"training": TrainedParts(frozen=("model", "lm_head"))}, "nothing is trained"),
    ],
)
def test_what_makes_no_sense_is_refused(setup: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        memory(**setup)  # type: ignore[arg-type]


def test_an_unknown_quantisation_and_stage_are_refused() -> None:
    with pytest.raises(UsageError, match="no quantisation"):
        memory(training=ADAPTERS, quantize="int3")
    with pytest.raises(UsageError, match="stages 0 to 3"):
        Parallel(zero=4)
    with pytest.raises(UsageError, match="1 device or more"):
        Parallel(tensor=0)


def test_adapters_on_experts_have_no_dropout() -> None:
    mixture = str(Path(__file__).parents[2] / "data" / "configs" / "mixtral-8x7b.json")
    dropping = Kernels(has_adapter_dropout=True)
    with pytest.raises(UsageError, match="no dropout for adapters on experts"):
        memory(mixture, training=TrainedParts(Lora(8, ("experts",))), kernels=dropping)
    assert memory(mixture, training=ADAPTERS, kernels=dropping).peak.total_bytes > 0


def test_fewer_heads_of_keys_than_devices_are_said() -> None:
    grouped = TINY.replace("kv_heads=4", "kv_heads=2")
    found = memory(grouped, parallel=Parallel(tensor=4))
    assert any(
        "2 key-value heads for 4 tensor-parallel devices" in line for line in found.assumptions
    )
    assert not any("heads for" in line for line in memory(grouped).assumptions)


def test_without_attention_channels_are_split() -> None:
    mamba = str(Path(__file__).parents[2] / "data" / "configs" / "mamba-2.8b.json")
    assert memory(mamba, parallel=Parallel(tensor=8)).peak.total_bytes > 0
    with pytest.raises(UsageError, match="2560 channels can't be split evenly over 3"):
        memory(mamba, parallel=Parallel(tensor=3))
