"""`erg flops`: what one step of a model costs, by part and under every convention."""

from __future__ import annotations

from typing import Any

import click

from ergmeter.cli import work_options as step
from ergmeter.cli.options import Forms, with_default, with_forms
from ergmeter.errors import FormatError, PluginError, UsageError


@click.command()
@click.argument("model", metavar="MODEL_CONFIG")
@step.with_batch
@step.PHASE
@step.CONTEXT
@step.WEIGHTS_DTYPE
@step.CACHE_DTYPE
@step.CONVENTION
@with_default(
    "--engine",
    type=click.Choice(["analytic", "counted"]),
    default="analytic",
    help="counted: build the model without its weights and run it; needs torch and transformers.",
)
@step.PARAMS
@with_forms
def command(
    model: str,
    engine: str,
    forms: Forms,
    **options: Any,  # noqa: ANN401  click passes what it parsed
) -> None:
    """Count the FLOPs of one step of a model.

    MODEL_CONFIG is a Hugging Face config.json, a directory with one, or a few dimensions:
    hidden=4096,layers=32,heads=32,kv_heads=8,ffn=14336,vocab=128256. No weights are needed.

    Dimensions mean Llama's layers: a gated feed-forward, an untied head, no biases. Add
    gated=false, tied=true, window=4096, or experts=8,top_k=2; or type=gpt2, type=qwen3, ... for
    another family, with the fields of its config.json.
    """
    from ergmeter.flops.source import UnknownArchitectureError
    from ergmeter.views.calculate.flops import flops_document

    if engine == "counted":
        _count(model, options, forms)
        return
    try:
        work = step.work_of(model, options)
    except UnknownArchitectureError as error:
        raise FormatError(f"{error}{_or_counted(model)}") from error
    forms.show(flops_document(work))


def _or_counted(model: str) -> str:
    """Return a hint at --engine counted if that supports the architecture; else empty."""
    from ergmeter.flops.source import read_model

    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        return ""
    is_known = read_model(model).model_type in CONFIG_MAPPING
    return "; or run it: --engine counted" if is_known else ""


def _count(model: str, options: dict[str, Any], forms: Forms) -> None:
    """Count by running the model, and show where the analytic engine differs."""
    from ergmeter.flops.batch import Batch
    from ergmeter.flops.source import read_model
    from ergmeter.views.calculate.flops import counted_document

    training = step.training_of(options)
    seq_len, source_len = options["seq_len"], options["source_len"]
    _check_counted(options)
    if seq_len is None:
        raise UsageError("how long is a sequence? pass --seq-len")
    batch = Batch.of(options["batch_size"], seq_len, lengths=step.lengths_of(options))
    config, train = read_model(model), options["phase"] == "train"
    adapted = None
    try:
        from ergmeter.flops.counted.built_model import adapted_model, count_step, cross_check

        if training.lora:
            full = training.checkpointing == "full"
            adapted = adapted_model(config, training.lora, is_checkpointed=full)
    except ImportError as error:
        packages = "peft" if error.name == "peft" else "torch transformers"
        cure = f"pip install {packages}, or use the analytic engine"
        raise PluginError(f"the counted engine does not load ({error}): {cure}") from error
    counted = count_step(
        config, batch, training, train=train, source_len=source_len, adapted=adapted
    )
    agreed = cross_check(config, counted, batch, training, train=train, source_len=source_len)
    forms.show(counted_document(counted, agreed))


# Options that the counted engine does not support, and why.
_NOT_COUNTED = {
    "images": "it runs text through the model",
    "image_size": "it runs text through the model",
    "mtp": "transformers builds no layers that predict further tokens",
    "context": "it has no cache",
    "weights_dtype": "it counts FLOPs, no bytes",
    "cache_dtype": "it counts FLOPs, no bytes",
    "params": "it has its own count of parameters",
}


def _check_counted(options: dict[str, Any]) -> None:
    """Refuse options that the counted engine would ignore."""
    other = "; leave it out, or use the analytic engine"
    for name, reason in _NOT_COUNTED.items():
        if options[name]:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is not for the counted engine: {reason}{other}")
    if options["phase"] == "decode":
        raise UsageError(
            "the counted engine runs whole sequences, and decoding continues from a cache that it"
            f" does not have{other}"
        )
    if options["convention"] != "exact":
        raise UsageError(f"--convention is for formulas, which the counted engine lacks{other}")
    if options["checkpointing"] == "selective":
        raise UsageError(
            f"the counted engine checkpoints whole layers, as transformers does{other}"
        )
    if options["source_len"] and options["lengths"]:
        raise UsageError("the counted engine takes --source-len or --lengths, not both")
