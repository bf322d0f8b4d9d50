"""EfficientLLM's metrics by their original path, and two lines that measure Megatron-LM with them.

Put the folder above this one first on PYTHONPATH, or copy this file to where the original was: into
`megatron_patch` of Pai-Megatron-Patch. Then, before Megatron's `pretrain` is called:

    from megatron_patch.efficientllm_metrics import measure_megatron
    measure_megatron()
"""

import functools
import importlib
import inspect
import sys

from ergmeter.compat.efficientllm import *  # noqa: F403  the documented names
from ergmeter.compat.efficientllm import (
    finalize_efficientllm_metrics,
    get_metrics_collector,
    initialize_efficientllm_metrics,
    should_log_metrics,
)

# What is needed of Megatron's training loop: its functions, and the arguments that are looked at.
_NEEDED = {"train": ("model",), "train_step": (), "training_log": ("loss_dict", "iteration")}
_NAMES = ("get_args", "get_num_microbatches", "get_tensorboard_writer")


def measure_megatron(training=None, *, model_parameters=None):
    """Measure the iterations of Megatron-LM's training loop, from `train` to its end.

    `training` is the module with the loop, `megatron.training.training` by default: its functions
    are wrapped and do what they did. `model_parameters` is the size of the model, which a rank does
    not know where the model is cut (tensor, pipeline or expert parallelism).
    """
    try:
        training = training or importlib.import_module("megatron.training.training")
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"measure_megatron: Megatron-LM can't be imported: {error}; install it, or put its"
            " folder on PYTHONPATH"
        ) from error
    if hasattr(training.train, "measured"):
        return
    missing = [name for name in (*_NEEDED, *_NAMES) if not hasattr(training, name)]
    takes = {name: _takes(getattr(training, name)) for name in _NEEDED if name not in missing}
    missing += [f"{n}({a}=)" for n in takes for a in _NEEDED[n] if a not in takes[n].parameters]
    if missing:
        raise RuntimeError(f"{training.__name__} has no {', '.join(missing)}: it can't be measured")
    train, step, log = training.train, training.train_step, training.training_log

    @functools.wraps(train)
    def measured_train(*arguments, **options):
        model = takes["train"].bind(*arguments, **options).arguments["model"]
        initialize_efficientllm_metrics(
            model_parameters or _parameters_of(model, training.get_args())
        )
        try:
            return train(*arguments, **options)
        finally:  # it may end the program itself, at a time limit or a signal
            finalize_efficientllm_metrics()

    @functools.wraps(step)
    def measured_step(*arguments, **options):
        get_metrics_collector().record_iteration_start()
        results = step(*arguments, **options)
        get_metrics_collector().record_iteration_end(*_work_of_rank(training))
        return results

    @functools.wraps(log)
    def measured_log(*arguments, **options):
        results = log(*arguments, **options)
        given = takes["training_log"].bind(*arguments, **options).arguments
        if _is_last_rank() and should_log_metrics(given["iteration"]):
            loss = next(iter(given["loss_dict"].values()), None)  # "lm loss"
            writer = training.get_tensorboard_writer()
            get_metrics_collector().log_metrics(given["iteration"], loss, writer)
        return results

    measured_train.measured = True
    training.train = measured_train
    training.train_step = measured_step
    training.training_log = measured_log


def _takes(function):
    return inspect.signature(function)


def _work_of_rank(training):
    """Tokens and samples that this rank has computed in an iteration."""
    args = training.get_args()
    samples = args.micro_batch_size * training.get_num_microbatches()
    return samples * args.seq_length // getattr(args, "context_parallel_size", 1), samples


def _parameters_of(model, args):
    """The parameters of the model; 0, which means unknown, where this rank has a part of it."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    cut = [name for name in (*names, "expert_model_parallel_size") if getattr(args, name, 1) > 1]
    if not cut:
        chunks = model if isinstance(model, list) else [model]
        return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    if _is_last_rank():
        print(
            f"[EfficientLLM] {cut[0]} is {getattr(args, cut[0])}: a rank has a part of the model;"
            " for TT and ST: measure_megatron(model_parameters=7_615_616_512)",
            file=sys.stderr,
        )
    return 0


def _is_last_rank():
    """True on the rank that logs, which has the loss. Only known once Megatron has started."""
    group = sys.modules["torch"].distributed
    return not group.is_initialized() or group.get_rank() == group.get_world_size() - 1
