"""The model of a configuration with PEFT's own adapters on it, without memory, to be counted."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import peft
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.targets import ALL_LINEAR, EXPERTS

if TYPE_CHECKING:
    from torch import nn

    from ergmeter.flops.adapters import Lora
    from ergmeter.flops.config import Config

_AUTO: Any = transformers.AutoModelForCausalLM


def adapted_model(config: Config, lora: Lora, *, is_checkpointed: bool) -> nn.Module:
    """The model with PEFT's adapters, on the device that has no memory."""
    fields: dict[str, Any] = json.loads(json.dumps(config.fields))
    fields.pop("quantization_config", None)
    kind = fields.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise FormatError(f"{config.where}: transformers has no architecture {kind!r}")
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = _AUTO.from_config(CONFIG_MAPPING[kind](**fields))
            adapters = peft.LoraConfig(r=lora.r, use_dora=lora.is_dora, **_targets(lora))
            model = peft.get_peft_model(model, adapters)
            if is_checkpointed:
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable()
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        said = str(error).strip().partition("\n")[0][:200]
        raise UsageError(f"{config.where}: PEFT can't put these adapters on it: {said}") from error
    return model


def _targets(lora: Lora) -> dict[str, Any]:
    """The targets as PEFT takes them: modules, and the tensors that experts are held in."""
    modules = [target for target in lora.targets if target.partition(".")[0] != EXPERTS]
    tensors = [target for target in lora.targets if target.startswith(f"{EXPERTS}.")]
    if EXPERTS in lora.targets:
        tensors += [f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"]
    return {
        "target_modules": ALL_LINEAR if modules == [ALL_LINEAR] else modules,
        "target_parameters": tensors or None,
    }
