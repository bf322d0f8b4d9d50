"""TRL's SFTTrainer with LoRA, measured: one line more, the callback.

python examples/trl_sft.py

A tiny Llama and a tokenizer of a few words, from scratch: nothing is downloaded. Adapters are a
small part of the model, and so are their FLOPs: frozen weights have no gradients of their own.
"""

import os

os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from ergmeter.integrations.huggingface import ErgmeterCallback

WORDS = ["<unk>", "</s>", "the", "a", "cat", "dog", "sees", "hears", "small", "big", "near", "in"]
words = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
)
config = LlamaConfig(
    vocab_size=len(WORDS),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    eos_token_id=1,
    pad_token_id=1,
    bos_token_id=None,
)
texts = [" ".join(WORDS[2 + (3 * n + m) % 10] for m in range(8 + n % 17)) for n in range(120)]
measured = ErgmeterCallback(warmup_steps=3)
trainer = SFTTrainer(
    model=LlamaForCausalLM(config),
    args=SFTConfig(
        output_dir="out",
        per_device_train_batch_size=4,
        num_train_epochs=1,
        max_length=64,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    ),
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    callbacks=[measured],
)
trainer.train()
print(measured.summary().readings["throughput.tokens_per_s"])
print(f"erg report {measured.path}")
