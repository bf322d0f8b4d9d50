"""Counts a step for the command line: builds its model from a config and runs it without data.

Documents of a packed or padded batch are run separately, those of equal length together. Otherwise
pairs across documents would be counted: without values it is unknown how a kernel separates them.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.analytic import Parts, step_flops, total
from ergmeter.flops.batch import Batch, Pairs
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.counted.count import count, run_once, text_inputs
from ergmeter.flops.counted.op_totals import AnalyticComparison, CountedStep, agreement, summed
from ergmeter.flops.graph.adapters import ALL_LINEAR, EXPERTS, Lora
from ergmeter.flops.source import UnknownArchitectureError, model_graph
from ergmeter.flops.work import TrainedParts, trained_graph, writes
from ergmeter.units import scaled

# A model with PEFT's own adapters, without memory.

_AUTO: Any = transformers.AutoModelForCausalLM


def adapted_model(config: ModelConfig, lora: Lora, *, is_checkpointed: bool) -> nn.Module:
    """Return the model with PEFT's adapters, on torch's meta device (without memory)."""
    import peft  # noqa: PLC0415  only adapters need it

    made = _config(config.fields)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = _AUTO.from_config(made)
            adapters = peft.LoraConfig(r=lora.r, use_dora=lora.is_dora, **_targets(lora))
            model = peft.get_peft_model(model, adapters)
            if is_checkpointed:
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable()
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        message = str(error).strip().partition("\n")[0][:200]
        raise UsageError(
            f"{config.where}: PEFT can't put these adapters on it: {message}"
        ) from error
    adapted: nn.Module = model
    return adapted


def _targets(lora: Lora) -> dict[str, Any]:
    """Return the targets as PEFT's arguments: modules, and expert tensors as parameters."""
    modules = [target for target in lora.targets if target.partition(".")[0] != EXPERTS]
    tensors = [target for target in lora.targets if target.startswith(f"{EXPERTS}.")]
    if EXPERTS in lora.targets:
        tensors += [f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"]
    return {
        "target_modules": ALL_LINEAR if modules == [ALL_LINEAR] else modules,
        "target_parameters": tensors or None,
    }


# A model built by transformers without its weights: seconds and no memory at any size.


def count_config(
    config: Mapping[str, Any] | transformers.PretrainedConfig,
    *,
    batch_size: int,
    seq_len: int,
    source_len: int | None = None,
    train: bool = True,
    trainable: Callable[[str], bool] | None = None,
    checkpointing: bool = False,
    attention: str | None = None,
) -> CountedStep:
    """Count one step of the model in a config: fields of a `config.json`, or transformers' object.

    `trainable(name)`: True for trained parameters. `checkpointing`: turn gradient checkpointing on.
    `attention`: the implementation ("eager", "sdpa"), if not the default.
    Raises FormatError for an architecture that transformers does not have.
    """

    def build() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        model: Any = _builder(made)(copy.deepcopy(made), attn_implementation=attention)
        if checkpointing:
            model.gradient_checkpointing_enable()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trainable is None or trainable(name))
        return model, (), text_inputs(model, batch_size, seq_len, source_len)

    with _quietly():
        made = _config(config)
        return run_once(build, train=train)


@contextmanager
def _quietly() -> Iterator[None]:
    """Silences transformers' advice on kernels, which are not run here."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


def _config(config: Mapping[str, Any] | transformers.PretrainedConfig) -> Any:  # noqa: ANN401
    if isinstance(config, transformers.PretrainedConfig):
        return config
    fields = json.loads(json.dumps(dict(config)))
    kind = fields.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise FormatError(
            f"transformers {transformers.__version__} has no architecture {kind!r};"
            " a newer version may"
        )
    # What is quantized on disk counts as the plain layers it stands for.
    fields.pop("quantization_config", None)
    try:
        return CONFIG_MAPPING[kind](**fields)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise FormatError(f"transformers does not accept this {kind} configuration: {error}") from (
            error
        )


def _builder(config: Any) -> Callable[..., nn.Module]:  # noqa: ANN401
    """Return a function that builds the model: its class in `architectures`, else an AutoModel."""
    listed = getattr(config, "architectures", None) or [""]
    named: Any = getattr(transformers, listed[0], None)
    config_class = getattr(named, "config_class", None)
    if isinstance(config_class, type) and isinstance(config, config_class):
        build: Callable[..., nn.Module] = named._from_config
        return build
    for name in ("ForCausalLM", "ForSeq2SeqLM", "ForMaskedLM", "ForImageTextToText", ""):
        auto = getattr(transformers, f"AutoModel{name}")
        if type(config) in auto._model_mapping:
            break
    builder: Callable[..., nn.Module] = auto.from_config
    return builder


# The count of a step.

_ONE_BY_ONE = "documents are run one by one, padding between them not at all"


def count_step(
    config: ModelConfig,
    batch: Batch,
    how: TrainedParts,
    *,
    train: bool = True,
    source_len: int | None = None,
    adapted: nn.Module | None = None,
) -> CountedStep:
    """Count a step of the model in a configuration by running it without data.

    `adapted`: the model with its adapters, if there are any (`adapted_model`).
    """
    shapes = [(document.count, document.new) for document in batch.documents]
    if adapted is not None:
        counts = [
            count(adapted, batch_size=rows, seq_len=length, train=train) for rows, length in shapes
        ]
    else:
        trainable = _by_name(config, how) if how.frozen and train else None
        counts = [
            count_config(
                config.fields,
                batch_size=rows,
                seq_len=length,
                source_len=source_len,
                train=train,
                trainable=trainable,
                checkpointing=train and how.checkpointing == "full",
            )
            for rows, length in shapes
        ]
    return counts[0] if batch.is_grid else _together(counts)


def _together(counts: list[CountedStep]) -> CountedStep:
    """Return the sum of several counts of one model."""
    rows = summed(row for counted in counts for row in counted.rows.items())
    missed = sum((Counter(counted.calls_not_counted) for counted in counts), Counter[str]())
    first = counts[0]
    assumptions = (*first.assumptions, _ONE_BY_ONE)
    return CountedStep(rows, first.params, first.params_trained, dict(missed), assumptions)


def _by_name(config: ModelConfig, how: TrainedParts) -> Callable[[str], bool]:
    """Return a test of parameter names: True if the graph's node of the parameter is trained."""
    graph, trainable = trained_graph(model_graph(config), how)
    trained = {node.name: trainable(node) for node in graph if node.params}

    def trains(name: str) -> bool:
        module = name
        while module and module not in trained:
            module = module.rpartition(".")[0]
        if module:
            return trained[module]
        return not any(f".{frozen}." in f".{name}." for frozen in how.frozen)

    return trains


def cross_check(
    config: ModelConfig,
    counted: CountedStep,
    batch: Batch,
    training: TrainedParts,
    *,
    train: bool,
    source_len: int | None,
) -> AnalyticComparison:
    """Compare the count with the analytic count of the same step.

    The counted run computes all attention pairs, and the head at every prompt position.
    """
    try:
        plain = model_graph(config)
    except UnknownArchitectureError as error:
        return AnalyticComparison(f"{config.where}: {error.said}")
    except FormatError as error:
        return AnalyticComparison(str(error))
    graph, trained = trained_graph(plain, training)
    is_prompt = not train and writes(graph)

    def analytic(pairs: Pairs, *, last_logits: bool = False) -> Parts:
        return step_flops(
            graph,
            Batch.of(
                batch.sequences,
                batch.seq_len,
                lengths=_lengths(batch),
                source_len=source_len,
                last_logits=last_logits,
                facts=graph.facts,
            ),
            trainable=trained if train else None,
            checkpointing=training.checkpointing,
            pairs=pairs,
        )

    needed = total(analytic("needed", last_logits=is_prompt)).model
    head = " and the head on the last token alone" if is_prompt else ""
    return AnalyticComparison(
        f"of what was run, {agreement(analytic('computed'), counted).sentence}; exact, with just"
        f" the pairs that the mask and windows let meet{head}, is {scaled(needed, 'FLOP')}"
        f" ({100 * (needed / counted.total.model - 1):+.1f} %)",
        needed,
    )


def _lengths(batch: Batch) -> list[int] | None:
    """Return document lengths if a batch does not consist of full sequences."""
    if batch.is_grid:
        return None
    return [document.new for document in batch.documents for _ in range(document.count)]
