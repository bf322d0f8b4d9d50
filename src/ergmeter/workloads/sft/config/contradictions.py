"""Which settings can't hold together?

The trap: a contradiction that somebody resolves in silence. Both precisions asked for, one is
dropped; a paged optimizer asked for, a plain one runs; and the ledger tells of the wish. Here the
training does not begin, and the message says which setting to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ergmeter.workloads.sft.config.sections import BUILTIN, SftConfig
from ergmeter.workloads.sft.config.value_kinds import nearest

BUILTIN_TYPES = {"tiny": "causal", "tiny-seq2seq": "seq2seq", "1b": "causal"}


def contradictions(config: SftConfig) -> list[str]:
    """Every one, a line each, with what to do."""
    return [line for check in _CHECKS for line in check(config)]


def is_of_bitsandbytes(optim: str) -> bool:
    """Whether transformers takes this optimizer from bitsandbytes."""
    name = optim.lower()
    return "paged" in name or "bnb" in name or ("8bit" in name and name != "adamw_torch_8bit")


def _model(config: SftConfig) -> Iterator[str]:
    model = config.model
    if model.is_builtin:
        name = model.name.removeprefix(BUILTIN)
        of = BUILTIN_TYPES.get(name)
        if of is None:
            near = nearest(name, list(BUILTIN_TYPES))
            names = ", ".join(f"{BUILTIN}{one}" for one in BUILTIN_TYPES)
            hint = f"did you mean {BUILTIN}{near}?" if near else f"there are {names}"
            yield f"model.name {model.name} is no built-in model; {hint}"
        elif of != model.type:
            yield f"model.type is {model.type}, but {model.name} is {of}; write model.type: {of}"
    if model.type == "seq2seq" and config.task_mode != "sft":
        yield f"task_mode {config.task_mode} needs model.type causal; a seq2seq model takes sft"
    if model.type == "seq2seq" and config.tuning.backend == "unsloth":
        yield "tuning.backend unsloth trains causal models only; for seq2seq write torch or bnb"
    if model.type == "seq2seq" and config.train.trainer == "trl":
        yield "train.trainer trl trains causal models; for seq2seq write transformers"


def _tuning(config: SftConfig) -> Iterator[str]:
    tuning, optim = config.tuning, config.train.optim
    if tuning.backend == "torch":
        if tuning.mode == "qlora":
            yield "tuning.mode qlora needs 4-bit weights: write tuning.backend bnb or unsloth"
        elif tuning.bits:
            yield f"tuning.bits {tuning.bits} needs tuning.backend bnb or unsloth; got torch"
        if is_of_bitsandbytes(optim):
            yield f"train.optim {optim} is of bitsandbytes: write tuning.backend bnb or adamw_torch"
    if tuning.mode == "full" and tuning.bits:
        yield (
            f"tuning.mode full can't train weights of {tuning.bits} bits; remove tuning.bits or"
            " write tuning.mode lora"
        )
    if tuning.mode == "qlora" and tuning.bits == 8:
        yield "tuning.mode qlora is 4-bit by definition; for tuning.bits 8 write tuning.mode lora"
    if tuning.backend == "bnb" and not tuning.bits and not is_of_bitsandbytes(optim):
        yield (
            "tuning.backend bnb with neither tuning.bits nor an optimizer of bitsandbytes is what"
            " torch runs; write tuning.bits: 4, or tuning.backend: torch"
        )


def _precision(config: SftConfig) -> Iterator[str]:
    if config.train.fp16 and config.train.bf16:
        yield "train.fp16 and train.bf16 are both true; keep one"


def _schedule(config: SftConfig) -> Iterator[str]:
    train = config.train
    if train.warmup_ratio and train.warmup_steps:
        yield "train.warmup_ratio and train.warmup_steps are both given; keep one"
    if train.save_strategy == "steps" and train.save_steps is None:
        yield "train.save_strategy steps needs train.save_steps"
    if train.evaluation_strategy == "steps" and train.eval_steps is None:
        yield "train.evaluation_strategy steps needs train.eval_steps"
    if train.evaluation_strategy != "no" and not config.has_validation:
        yield (
            f"train.evaluation_strategy {train.evaluation_strategy} has nothing to evaluate on;"
            " give data.val_path"
        )
    if train.early_stopping_patience and train.evaluation_strategy == "no":
        yield "train.early_stopping_patience needs train.evaluation_strategy steps or epoch"


def _data(config: SftConfig) -> Iterator[str]:
    data, longest = config.data, config.model.max_seq_len
    if data.val_path and not data.train_path and config.task_mode != "cpt_mixed":
        yield "data.val_path without data.train_path: the built-in text has a held-out part itself"
    if data.val_path and data.val_path == data.train_path:
        yield "data.val_path is data.train_path: a loss on what was trained on is no evaluation"
    multiple = data.pad_to_multiple_of
    if multiple and longest % multiple:
        yield (
            f"data.pad_to_multiple_of {multiple} does not divide model.max_seq_len {longest}, so"
            " that rows would be padded past it"
        )
    if data.template_path and config.task_mode == "cpt":
        yield "data.template_path is for sft; task_mode cpt takes text as it is"


def _packing(config: SftConfig) -> Iterator[str]:
    if not config.data.packing:
        return
    if config.model.type == "seq2seq":
        yield "data.packing is for causal models; a seq2seq model takes one document a row"
    if config.task_mode != "sft":
        yield f"data.packing is for sft; task_mode {config.task_mode} fills its blocks anyway"
    if config.tuning.backend == "unsloth":
        yield (
            "data.packing with tuning.backend unsloth: nothing shows that its attention keeps"
            " packed documents apart; write data.packing: false"
        )


def _blocks(config: SftConfig) -> Iterator[str]:
    is_cpt = config.task_mode != "sft"
    for name, value in (("block_size", config.block_size), ("pack_factor", config.pack_factor)):
        if value and not is_cpt:
            yield f"{name} is for task_mode cpt and cpt_mixed; for sft write data.packing: true"
    longest = config.model.max_seq_len
    if is_cpt and config.block_size and config.block_size > longest:
        yield f"block_size {config.block_size} is more than model.max_seq_len {longest}"


def _mixture(config: SftConfig) -> Iterator[str]:
    if config.task_mode == "cpt_mixed":
        if not config.datasets:
            yield "task_mode cpt_mixed needs datasets: a list of path, type and weight"
        if config.data.train_path:
            yield "data.train_path beside datasets: task_mode cpt_mixed trains on datasets only"
    elif config.datasets:
        yield f"datasets is for task_mode cpt_mixed; got {config.task_mode}"


_CHECKS: tuple[Callable[[SftConfig], Iterator[str]], ...] = (
    _model, _tuning, _precision, _schedule, _data, _packing, _blocks, _mixture,
)  # fmt: skip
