"""Trainings of transformers' Trainer, each with the callback or without it.

    hf_callback.py with|without

Writes what each came to, as the Trainer says it, to told.json. Runs go to runs/SCENARIO.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import light  # type: ignore[import-not-found]  # noqa: F401
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

IS_MEASURED = sys.argv[1] == "with"
PAD = 0  # also a real token: the tokenizer has no pad and takes its end for one
told: dict[str, Any] = {}


class Texts(torch.utils.data.Dataset[list[int]]):
    """Text n has 5 + 7 n mod 11 tokens, ending with the end token; a third of it is prompt."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> list[int]:
        length = 5 + 7 * index % 11
        drawn = torch.Generator().manual_seed(index)
        return [*torch.randint(1, 256, (length - 1,), generator=drawn).tolist(), PAD]


def padded(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, texts))
    rows = [(text, longest - len(text)) for text in texts]
    return {
        "input_ids": torch.tensor([text + [PAD] * empty for text, empty in rows]),
        "attention_mask": torch.tensor([[1] * len(text) + [0] * empty for text, empty in rows]),
        "labels": torch.tensor(
            [
                [-100] * (len(text) // 3) + text[len(text) // 3 :] + [-100] * empty
                for text, empty in rows
            ]
        ),
    }


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        texts: Any = self.train_dataset
        return torch.utils.data.SequentialSampler(texts)


def llama(layers: int = 2) -> LlamaForCausalLM:
    set_seed(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def callbacks(scenario: str, **more: Any) -> list[TrainerCallback]:
    if not IS_MEASURED:
        return []
    from ergmeter.integrations.huggingface import ErgmeterCallback

    options = {"probes": ["process"], "peak_flops_per_s": 1e12, **more}
    return [ErgmeterCallback(f"runs/{scenario}", **options)]


def trainer(scenario: str, *, texts: int = 80, model: Any = None, **arguments: Any) -> Trainer:
    given = {"logging_steps": 1, "save_strategy": "no", **arguments}
    return InOrder(
        model=model or llama(),
        args=TrainingArguments(
            output_dir=f"out/{scenario}",
            per_device_train_batch_size=4,
            num_train_epochs=1,
            report_to="none",
            use_cpu=True,
            **given,
        ),
        train_dataset=Texts(texts),
        eval_dataset={"one": Texts(6), "other": Texts(9)},
        data_collator=padded,
        callbacks=callbacks(scenario) if scenario != "around" else [],
    )


def tell(scenario: str, trained: Trainer) -> None:
    logs = trained.state.log_history
    told[scenario] = {
        "losses": [line["loss"] for line in logs if "loss" in line],
        "norms": [line["grad_norm"] for line in logs if "grad_norm" in line],
        "rates": [line["learning_rate"] for line in logs if "learning_rate" in line],
        "seen": trained.state.num_input_tokens_seen,
        "evaluations": sum("eval_one_loss" in line for line in logs),
        "checkpoints": len(list(Path(f"out/{scenario}").glob("checkpoint-*/*.safetensors"))),
        "own_methods": sorted(set(vars(trained)) & {"training_step", "evaluate", "save_model"}),
    }


def everything() -> None:
    """Padding, accumulation, evaluation in between, workers that prefetch, checkpoints, pad=eos."""
    one = trainer(
        "everything",
        gradient_accumulation_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_only_model=True,
        dataloader_num_workers=2,
        dataloader_prefetch_factor=4,
        include_num_input_tokens_seen="non_padding",
    )
    one.train()
    tell("everything", one)


def resumed() -> None:
    stopped = trainer("stopped", save_strategy="steps", save_steps=3, max_steps=3)
    stopped.train()
    tell("stopped", stopped)
    again = trainer("resumed", max_steps=7)
    again.train(resume_from_checkpoint="out/stopped/checkpoint-3")
    tell("resumed", again)


def twice() -> None:
    """Two trainings of one trainer, whose callback was added twice and is beside others."""
    one = trainer("twice", texts=12, logging_steps=2)
    held = one.callback_handler.callbacks
    again = [callback for callback in held if type(callback).__name__ == "ErgmeterCallback"]
    held += [*again, *callbacks("beside")]
    held[:0] = callbacks("unasked", looks_on=True)
    one.train()
    tell("twice", one)
    one.train()
    tell("twice again", one)


def compiled() -> None:
    from torch._dynamo import config

    config.assume_static_by_default = False  # compiled once, for batches of any length
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    one = trainer("compiled", texts=12, model=llama(layers=1), **options)
    one.train()
    tell("compiled", one)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO")]:
        del os.environ[name]  # or transformers 4 compiles all that come after


def around() -> None:
    """A Meter is there already, and the callback comes when the trainer has been made."""
    one = trainer("around", texts=12)
    if not IS_MEASURED:
        one.train()
    else:
        from ergmeter import Meter
        from ergmeter.integrations.huggingface import ErgmeterCallback

        with Meter("runs/around", probes=["process"]) as meter:
            one.add_callback(ErgmeterCallback())
            one.train()
            meter.mark("afterwards")
    tell("around", one)


class Fails(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.llama = llama()
        self.calls = 0

    def forward(self, **batch: torch.Tensor) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("the third batch is bad")
        return self.llama(**batch)


def failed() -> None:
    one = trainer("failed", model=Fails())
    try:
        one.train()
    except ValueError:
        tell("failed", one)


class NoOptimizer(TrainerCallback):
    def on_optimizer_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 2:
            raise RuntimeError("the optimizer is out of memory")


everything()
resumed()
twice()
compiled()
around()
failed()
Path("told.json").write_text(json.dumps(told))
unhandled = trainer("unhandled")
unhandled.add_callback(NoOptimizer())
unhandled.train()
