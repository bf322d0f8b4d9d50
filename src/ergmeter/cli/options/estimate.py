"""Options of `erg estimate`: how a step is run, on what, and what is stated of it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ergmeter.cli.options.work import CACHE_DTYPE, WEIGHTS_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable

_ONE = click.IntRange(min=1, max=10**7)  # of devices and of parts of a step
_DTYPES = ("bf16", "fp16", "fp32", "mixed", "bf16-master")

_MEMORY = [
    click.option(
        "--dtype",
        type=click.Choice(_DTYPES),
        default="bf16",
        show_default=True,
        help="Of weights; mixed: 32-bit weights under autocast; bf16-master: a 32-bit copy beside.",
    ),
    click.option(
        "--optimizer",
        default="adamw-fused",
        show_default=True,
        help="adamw-fused, adamw (foreach), adamw-loop, adamw-32bit, adamw-8bit, paged-adamw,"
        " paged-adamw-8bit, adafactor, muon, lion, sgd, sgd-momentum.",
    ),
    click.option(
        "--quantize",
        type=click.Choice(["nf4", "nf4-double", "int8"]),
        help="The frozen matrices, with --lora.",
    ),
    click.option(
        "--micro-batches",
        type=_ONE,
        default=1,
        show_default=True,
        help="Parts that a device's share of a step is computed in (gradient accumulation).",
    ),
    click.option(
        "--attention",
        type=click.Choice(["sdpa", "flash", "eager"]),
        default="sdpa",
        show_default=True,
        help="torch's, flash attention, or written out with its probabilities kept.",
    ),
    click.option(
        "--loss",
        type=click.Choice(["logits", "fused"]),
        default="logits",
        show_default=True,
        help="From whole logits, or fused with the head.",
    ),
    click.option(
        "--output",
        type=click.Choice(["freed", "until-step", "until-next"]),
        default="freed",
        show_default=True,
        help="How long the program holds the logits: not in the backward pass, until the"
        " optimizer's step, or until the next forward pass (`output = model(...)` in a loop).",
    ),
    click.option(
        "--kv-cache",
        is_flag=True,
        help="The forward pass fills a cache of keys and values (use_cache=True).",
    ),
    click.option("--fused", is_flag=True, help="Norms and activations in kernels of their own."),
    click.option(
        "--adapter-dtype",
        type=click.Choice(["fp32", "bf16"]),
        default="fp32",
        show_default=True,
        help="Of LoRA's matrices; PEFT makes them fp32.",
    ),
    click.option("--lora-dropout", is_flag=True, help="Adapters have dropout."),
]
_DEVICES = [
    click.option("--device", help="By its driver's name or an alias; `erg peaks` lists them."),
    click.option("--num-devices", type=_ONE, help="How many. [default: what the sizes below need]"),
    click.option("--data-parallel", type=_ONE, help="[default: the devices that are left]"),
    click.option("--tensor-parallel", type=_ONE, default=1, show_default=True),
    click.option("--pipeline-parallel", type=_ONE, default=1, show_default=True),
    click.option("--context-parallel", type=_ONE, default=1, show_default=True),
    click.option("--sequence-parallel", is_flag=True, help="Norms split over tensor parallel too."),
    click.option(
        "--zero",
        type=click.IntRange(0, 3),
        default=0,
        show_default=True,
        help="ZeRO's stage: optimizer, gradients, weights sharded. FSDP is 3.",
    ),
    click.option("--memory-gib", type=float, help="Of one device, instead of the table's."),
    click.option(
        "--usable", type=float, default=0.9, show_default=True, help="Share of it to plan with."
    ),
]
_PLAN = [
    click.option("--tokens", type=float, help="To train on, as in 1e9."),
    click.option("--mfu", type=float, help="The utilisation to expect, as in 0.4."),
    click.option("--mfu-from", metavar="RUN", help="The utilisation of an earlier run, instead."),
    click.option("--peak", help="Dense peak of one device, instead of the table's: 989.5T."),
    click.option("--peak-source", help="Where that peak is from."),
    click.option("--watts", type=float, help="Average power of one device."),
    click.option("--power-frac", type=float, help="The same, as a share of its TDP: 0.8."),
    click.option(
        "--grid", metavar="NAME", help="Country or region, as `erg grid` lists them: FR, CAMX."
    ),
    click.option("--grid-g-per-kwh", type=float, help="Of the electricity, instead of --grid."),
    click.option("--grid-source", help="Where that intensity is from."),
    click.option("--pue", type=float, help="Of the building."),
    click.option("--pue-source", help="Where that PUE is from."),
    click.option("--price-per-hour", "--price-per-gpu-hour", type=float, help="Of one device."),
    click.option("--currency", default="price units", help="What that price is in."),
]


_SERVING = [
    click.option(
        "--inference",
        is_flag=True,
        help="To serve, not to train: weights, and a cache for --batch-size x --seq-len.",
    ),
    WEIGHTS_DTYPE,
    CACHE_DTYPE,
]


_TAKEN_BY_SERVING = {
    *("model", "seq_len", "batch_size", "source_len", "images", "image_size", "mtp"),
    *("device", "num_devices", "data_parallel", "tensor_parallel", "pipeline_parallel"),
    *("memory_gib", "usable", "inference", "weights_dtype", "cache_dtype", "as_json"),
}


def check_serving(context: click.Context) -> None:
    """Refuse what was given and serving makes no use of: else it would pass for counted."""
    from ergmeter.errors import UsageError

    for option in context.command.params:
        name = option.name or ""
        if name in _TAKEN_BY_SERVING or (
            context.get_parameter_source(name) is ParameterSource.DEFAULT
        ):
            continue
        instead = "say --weights-dtype" if name in ("dtype", "quantize") else "leave it out"
        raise UsageError(f"{option.opts[0]} is not for --inference; {instead}")


def with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add all of them to a command, which gets a grid that is named as its figure and source."""

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:  # noqa: ANN401  click passes what it parsed
        from ergmeter.hardware.grid import with_grid

        return function(**with_grid(given))

    for option in reversed([*_MEMORY, *_DEVICES, *_PLAN, *_SERVING]):
        wrapped = option(wrapped)
    return wrapped
