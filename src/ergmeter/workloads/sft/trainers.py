"""Which Trainer runs it: transformers' for all backends, TRL's where it is asked for.

The trap: a trainer that does work for one backend and not for the other. TRL's SFTTrainer takes the
entropy and the accuracy of every batch from its logits, which Unsloth's fused loss never makes: the
comparison would be of that. So the plain Trainer is the default, and `train.trainer: trl` is for
those who train with TRL anyway.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ergmeter.errors import PluginError
from ergmeter.workloads.sft.arguments import training_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.workloads.sft.backends import LoadedModel
    from ergmeter.workloads.sft.config.sections import SftConfig
    from ergmeter.workloads.sft.data.prepared import Prepared


def trainer(
    config: SftConfig, loaded: LoadedModel, data: Prepared, *, callbacks: Sequence[object]
) -> Any:  # noqa: ANN401
    """A Trainer that is ready to train this model on this data."""
    kind, arguments_kind, more = _kinds(config)
    arguments = training_arguments(config, arguments_kind, examples=data.examples)
    for name, value in more.items():
        setattr(arguments, name, value)
    made = kind(
        model=loaded.model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=data.evaluation if config.train.evaluation_strategy != "no" else None,
        data_collator=data.collate,
        processing_class=loaded.tokenizer,
        callbacks=[*callbacks, *_stopping(config)],
    )
    _only_ours(made)
    return made


def _kinds(config: SftConfig) -> tuple[Any, Any, dict[str, Any]]:
    import transformers  # noqa: PLC0415  after Unsloth, where that is asked for

    if config.model.type == "seq2seq":
        return transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments, {}
    if config.train.trainer != "trl":
        return transformers.Trainer, transformers.TrainingArguments, {}
    try:
        trl = importlib.import_module("trl")
    except ImportError as error:
        raise PluginError("train.trainer trl needs TRL: pip install 'ergmeter[train]'") from error
    # What is handed over is tokenised, cut and packed already.
    prepared = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
    return trl.SFTTrainer, trl.SFTConfig, prepared


def _stopping(config: SftConfig) -> list[object]:
    patience = config.train.early_stopping_patience
    if patience is None:
        return []
    from transformers import EarlyStoppingCallback  # noqa: PLC0415

    return [EarlyStoppingCallback(early_stopping_patience=patience)]


def _only_ours(made: Any) -> None:  # noqa: ANN401
    """transformers prints every log as a dict; the progress bar shows the same."""
    from transformers import PrinterCallback  # noqa: PLC0415

    made.remove_callback(PrinterCallback)
