"""TRL's trainers on texts of known lengths, each with the callback or without it.

    hf_trl.py with|without

Writes what each came to, as the trainer says it, to told.json. Runs go to runs/SCENARIO.
"""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

IS_MEASURED = sys.argv[1] == "with"
LENGTHS = [5 + 7 * number % 11 for number in range(24)]
told: dict[str, Any] = {}

words = {f"w{number}": number for number in range(255)} | {"</s>": 255}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
# No pad token of its own: the end of a text is taken for it.
processing = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>", unk_token="w0"
)


def llama() -> LlamaForCausalLM:
    set_seed(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def text(length: int, first: int = 1) -> str:
    return " ".join(f"w{(first + number) % 200}" for number in range(length))


def callbacks(scenario: str) -> list[TrainerCallback]:
    if not IS_MEASURED:
        return []
    from ergmeter.integrations.huggingface import ErgmeterCallback

    return [ErgmeterCallback(f"runs/{scenario}", probes=["process"], peak_flops_per_s=1e12)]


def arguments(scenario: str) -> dict[str, Any]:
    return {
        "output_dir": f"out/{scenario}",
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "max_length": 32,
    }


def adapters() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def told_of(scenario: str, trainer: Any) -> None:
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    tokens = [line["num_tokens"] for line in trainer.state.log_history if "num_tokens" in line]
    told[scenario] = {"losses": losses, "tokens": tokens}
    if hasattr(trainer.model, "get_nb_trainable_parameters"):
        told[scenario]["parameters"] = trainer.model.get_nb_trainable_parameters()


def sft(scenario: str, *, peft: LoraConfig | None = None, **more: Any) -> None:
    texts = [{"text": text(length - 1, first)} for first, length in enumerate(LENGTHS)]
    trainer = SFTTrainer(
        model=llama(),
        args=SFTConfig(**(arguments(scenario) | more)),
        train_dataset=Dataset.from_list(texts),  # one more token is the end
        processing_class=processing,
        peft_config=peft,
        callbacks=callbacks(scenario),
    )
    told_of(scenario, trainer)


def dpo() -> None:
    pairs = [
        {"prompt": text(3), "chosen": " " + text(length), "rejected": " " + text(4)}
        for length in LENGTHS[:12]
    ]
    trainer = DPOTrainer(
        model=llama(),
        args=DPOConfig(**arguments("dpo")),
        train_dataset=Dataset.from_list(pairs),
        processing_class=processing,
        peft_config=adapters(),
        callbacks=callbacks("dpo"),
    )
    told_of("dpo", trainer)


sft("lora", peft=adapters(), gradient_accumulation_steps=2)
sft("free", padding_free=True, max_length=None)
sft("packed", packing=True)
dpo()
Path("told.json").write_text(json.dumps(told))
