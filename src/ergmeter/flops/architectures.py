"""FLOPs of the model a configuration describes: transformers builds it, without its weights.

Seconds and no memory for a model of any size, because nothing in it has values.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ergmeter.errors import FormatError
from ergmeter.flops.counted import count_built

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ergmeter.flops.tally import Counted


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
) -> Counted:
    """The FLOPs of one step of the model in a `config.json`, or in transformers' own object.

    `trainable` says by name which parameters are trained, `checkpointing` switches gradient
    checkpointing on, `attention` is an implementation ("eager", "sdpa") in place of the usual one.
    FormatError for an architecture that transformers does not have.
    """
    with _quietly():
        made = _config(config)
    key = (made.model_type, made.to_json_string(use_diff=False), attention)

    def build() -> nn.Module:
        return _builder(made)(copy.deepcopy(made), attn_implementation=attention)

    with _quietly():
        return count_built(
            key,
            build,
            batch_size=batch_size,
            seq_len=seq_len,
            source_len=source_len,
            train=train,
            trainable=trainable,
            checkpointing=checkpointing,
        )


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' advice on kernels, which nobody is about to run."""
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
    """What builds the model: the class in `architectures`, else one that writes text if any."""
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
    found: Callable[..., nn.Module] = auto.from_config
    return found
