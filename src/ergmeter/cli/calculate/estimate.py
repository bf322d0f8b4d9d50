"""`erg estimate`: before anything runs, does it fit, how long does it take, what does it cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ergmeter.cli import work_options as step
from ergmeter.cli.options import Forms, flag, given_parameters, with_default, with_each, with_forms
from ergmeter.errors import UsageError

_POSITIVE = click.IntRange(min=1, max=10**7)  # of devices and of parts of a step


def _choice(name: str, choices: tuple[str, ...], text: str) -> Callable[..., Any]:
    """Return an option whose default is the first of these choices."""
    return with_default(name, type=click.Choice(choices), default=choices[0], help=text)


_MEMORY = [
    _choice(
        "--dtype",
        ("bf16", "fp16", "fp32", "mixed", "bf16-master"),
        "Type of weights; mixed: 32-bit weights under autocast; bf16-master: plus a 32-bit copy.",
    ),
    with_default(
        "--optimizer",
        default="adamw-fused",
        help="adamw-fused, adamw (foreach), adamw-loop, adamw-32bit, adamw-8bit, paged-adamw,"
        " paged-adamw-8bit, adafactor, muon, lion, sgd, sgd-momentum.",
    ),
    click.option(
        "--quantize",
        type=click.Choice(["nf4", "nf4-double", "int8"]),
        help="Quantise the frozen matrices; with --lora.",
    ),
    with_default(
        "--micro-batches",
        type=_POSITIVE,
        default=1,
        help="Parts that a device's share of a step is computed in (gradient accumulation).",
    ),
    _choice(
        "--attention",
        ("sdpa", "flash", "eager"),
        "torch's SDPA, flash attention, or eager, which keeps probabilities.",
    ),
    _choice("--loss", ("logits", "fused"), "Loss from all logits, or fused with the head."),
    _choice(
        "--output",
        ("freed", "until-step", "until-next"),
        "How long the program keeps the logits: not in the backward pass, until the"
        " optimizer's step, or until the next forward pass (`output = model(...)` in a loop).",
    ),
    flag("--kv-cache", help="The forward pass fills a cache of keys and values (use_cache=True)."),
    flag("--fused", help="Norms and activations run as fused kernels."),
    _choice("--adapter-dtype", ("fp32", "bf16"), "Type of LoRA's matrices; PEFT makes them fp32."),
    flag("--lora-dropout", help="Adapters have dropout."),
]
_DEVICES = [
    step.DEVICE,
    click.option(
        "--num-devices", type=_POSITIVE, help="Devices. [default: the product of the sizes below]"
    ),
    click.option("--data-parallel", type=_POSITIVE, help="[default: the devices that are left]"),
    with_default("--tensor-parallel", type=_POSITIVE, default=1),
    with_default("--pipeline-parallel", type=_POSITIVE, default=1),
    with_default("--context-parallel", type=_POSITIVE, default=1),
    flag("--sequence-parallel", help="Norms split over tensor parallel too."),
    with_default(
        "--zero",
        type=click.IntRange(0, 3),
        default=0,
        help="ZeRO's stage: optimizer, gradients, weights sharded. FSDP is 3.",
    ),
    click.option("--memory-gib", type=float, help="Memory of a device, instead of the table's."),
    with_default("--usable", type=float, default=0.9, help="Share of the memory to plan with."),
]
_PLAN = [
    click.option("--tokens", type=float, help="Tokens to train on: 1e9."),
    click.option("--mfu", type=float, help="MFU to expect: 0.4."),
    click.option("--mfu-from", metavar="RUN", help="Take the MFU of this earlier run instead."),
    click.option("--peak", help="Dense peak of one device, instead of the table's: 989.5T."),
    click.option("--peak-source", help="Where that peak is from."),
    click.option("--watts", type=float, help="Average power of one device."),
    click.option("--power-frac", type=float, help="Average power as a share of TDP: 0.8."),
    click.option(
        "--grid", metavar="NAME", help="Country or region, as `erg grid` lists them: FR, CAMX."
    ),
    click.option("--grid-g-per-kwh", type=float, help="Carbon intensity, instead of --grid."),
    click.option("--grid-source", help="Where that intensity is from."),
    click.option("--pue", type=float, help="Power usage effectiveness of the building."),
    click.option("--pue-source", help="Where that PUE is from."),
    click.option("--price-per-hour", "--price-per-gpu-hour", type=float, help="Of one device."),
    click.option("--currency", default="price units", help="Currency of that price."),
]


_SERVING = [
    flag(
        "--inference",
        help="Estimate serving, not training: weights, and a cache for --batch-size x --seq-len.",
    ),
    step.WEIGHTS_DTYPE,
    step.CACHE_DTYPE,
]


_TAKEN_BY_SERVING = {
    *("model", "seq_len", "batch_size", "source_len", "images", "image_size", "mtp"),
    *("device", "num_devices", "data_parallel", "tensor_parallel", "pipeline_parallel"),
    *("memory_gib", "usable", "inference", "weights_dtype", "cache_dtype"),
    *("as_json", "as_markdown", "page"),
}


def _check_serving() -> None:
    """Refuse options that serving ignores: they would seem to count."""
    for name, option in given_parameters().items():
        if name not in _TAKEN_BY_SERVING:
            instead = "use --weights-dtype" if name in ("dtype", "quantize") else "leave it out"
            raise UsageError(f"{option.opts[0]} is not for --inference; {instead}")


@click.command()
@click.argument("model", metavar="MODEL_CONFIG")
@step.with_batch
@with_each(*_MEMORY, *_DEVICES, *_PLAN, *_SERVING)
@with_forms
def command(
    model: str,
    forms: Forms,
    **options: Any,  # noqa: ANN401  click passes what it parsed
) -> None:
    """Estimate, before anything runs, whether a training fits and what it takes.

    MODEL_CONFIG as for `erg flops`; --batch-size is of a whole step, all devices. Memory follows
    from what autograd keeps; time needs --mfu, energy --watts or --power-frac, and so on: nothing
    is assumed in silence. With --inference: whether weights and caches fit, and how many sequences.

    erg estimate config.json --seq-len 4096 --batch-size 64 --device h100-sxm --num-devices 8
    --zero 3 --checkpointing full --tokens 1e9 --mfu 0.4
    """
    from ergmeter.cli.estimate_options import serving_document, training_document
    from ergmeter.hardware.grid import with_grid

    options = with_grid(options)
    if options["inference"]:
        _check_serving()
        forms.show(serving_document(model, options))
    else:
        forms.show(training_document(model, options))
