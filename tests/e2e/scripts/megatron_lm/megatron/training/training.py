"""A training loop in the shape of Megatron-LM's, on CPU: the same functions, called in its order.

`pretrain` makes the model, the optimizer and the data, and calls `train`; that calls `train_step`
and `training_log` by the names of this module once an iteration, and evaluates now and then. Shapes
of arguments and results are those of Megatron-LM in 2026. The loss of each iteration, and its time
by a clock of the loop's own, go to the file that LOOP_LOG names, by the last rank.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.utils.tensorboard import SummaryWriter

Batches = Iterator[torch.Tensor]
_state: dict[str, Any] = {"steps": [], "writer": None}


def get_args() -> argparse.Namespace:
    """The command line, for all of Megatron."""
    args: argparse.Namespace = _state["args"]
    return args


def get_num_microbatches() -> int:
    """Forward and backward passes of this rank in an iteration."""
    args = get_args()
    passes: int = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    return passes


def get_tensorboard_writer() -> Any:
    """The last rank's; None on all others."""
    return _state["writer"]


def pretrain(
    train_valid_test_dataset_provider: Callable[[argparse.Namespace], Batches],
    model_provider: Callable[[argparse.Namespace], torch.nn.Module],
    model_type: object,
    forward_step_func: Callable[..., Any],
) -> None:
    """Set everything up, and train."""
    del model_type
    args = _state["args"] = _parsed()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        distributed.init_process_group("gloo")
    args.data_parallel_size = world // args.tensor_model_parallel_size or 1
    if _is_last_rank() and args.tensorboard_dir:
        _state["writer"] = SummaryWriter(args.tensorboard_dir)
    torch.manual_seed(7)
    model = [model_provider(args)]  # a list of chunks, as of an interleaved pipeline
    optimizer = torch.optim.SGD(model[0].parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    data = train_valid_test_dataset_provider(args)
    iteration, flops_so_far = train(
        forward_step_func, model, optimizer, scheduler, data, data, None, object(), {}, None,
    )  # fmt: skip
    assert (iteration, flops_so_far) == (args.train_iters, 0.0)
    if world > 1:
        distributed.destroy_process_group()


def train(
    forward_step_func: Callable[..., Any],
    model: list[torch.nn.Module],
    optimizer: torch.optim.Optimizer,
    opt_param_scheduler: Any,
    train_data_iterator: Batches,
    valid_data_iterator: Batches,
    process_non_loss_data_func: object,
    config: object,
    checkpointing_context: dict[str, Any],
    non_loss_data_func: object,
) -> tuple[int, float]:
    """Call train_step as often as the arguments say."""
    del process_non_loss_data_func, checkpointing_context, non_loss_data_func
    args = get_args()
    iteration, report_memory_flag, should_exit = 0, True, False
    total_loss_dict: dict[str, Any] = {}
    while iteration < args.train_iters and not should_exit:
        before_s = time.perf_counter()
        (
            loss_dict,
            skipped_iter,
            _should_checkpoint,
            should_exit,
            _exit_code,
            grad_norm,
            num_zeros_in_grad,
            max_attention_logit,
        ) = train_step(
            forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler, config,
            _forward_backward, iteration=iteration,
        )  # fmt: skip
        _state["steps"][-1]["most_s"] = time.perf_counter() - before_s
        iteration += 1
        report_memory_flag = training_log(
            loss_dict, total_loss_dict, args.lr, iteration, 1.0, report_memory_flag, skipped_iter,
            grad_norm, None, num_zeros_in_grad, max_attention_logit,
            is_first_iteration=iteration == 1,
        )  # fmt: skip
        if iteration % args.eval_interval == 0:
            evaluate(forward_step_func, valid_data_iterator, model)
    if _is_last_rank() and "LOOP_LOG" in os.environ:
        Path(os.environ["LOOP_LOG"]).write_text(json.dumps(_state["steps"]), encoding="utf-8")
    return iteration, 0.0


def train_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Batches,
    model: list[torch.nn.Module],
    optimizer: torch.optim.Optimizer,
    opt_param_scheduler: Any,
    config: object,
    forward_backward_func: Callable[..., list[torch.Tensor]],
    iteration: int | None = None,
) -> tuple[dict[str, torch.Tensor], int, bool, bool, int, float, int, None]:
    """All micro-batches of an iteration, and the optimizer's step unless a gradient overflowed."""
    del config
    began_s = time.perf_counter()
    optimizer.zero_grad()
    losses = forward_backward_func(forward_step_func, data_iterator, model)
    parameters = list(model[0].parameters())
    for parameter in parameters if distributed.is_initialized() else ():
        distributed.all_reduce(parameter.grad)
    grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    num_zeros_in_grad = sum(int((p.grad == 0).sum()) for p in parameters if p.grad is not None)
    skipped_iter = int(iteration == get_args().overflow_at)
    if not skipped_iter:
        optimizer.step()
        opt_param_scheduler.step()
    reduced = {"lm loss": torch.stack(losses).mean()}
    step = {"least_s": time.perf_counter() - began_s, "loss": float(reduced["lm loss"])}
    _state["steps"].append(step)
    return reduced, skipped_iter, False, False, 0, grad_norm, num_zeros_in_grad, None


def training_log(
    loss_dict: dict[str, torch.Tensor],
    total_loss_dict: dict[str, Any],
    learning_rate: float | None,
    iteration: int,
    loss_scale: float,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: float,
    params_norm: float | None,
    num_zeros_in_grad: int,
    max_attention_logit: float | None,
    is_first_iteration: bool = False,
) -> bool:
    """Print a line, on the last rank."""
    del params_norm, max_attention_logit, is_first_iteration, report_memory_flag
    for name, loss in loss_dict.items():
        if not skipped_iter:
            total_loss_dict[name] = total_loss_dict.get(name, 0.0) + float(loss)
    if _is_last_rank():
        losses = " | ".join(f"{name}: {float(loss):.6E}" for name, loss in loss_dict.items())
        print(
            f" iteration {iteration:8d}/{get_args().train_iters:8d} | learning rate:"
            f" {learning_rate:.6E} | {losses} | loss scale: {loss_scale:.1f} | grad norm:"
            f" {grad_norm:.3f} | num zeros: {num_zeros_in_grad} | number of skipped iterations:"
            f" {skipped_iter:3d} |",
            flush=True,
        )
    return False


def evaluate(
    forward_step_func: Callable[..., Any], data_iterator: Batches, model: list[torch.nn.Module]
) -> None:
    """Losses of some batches, between iterations."""
    with torch.no_grad():
        for _ in range(get_args().eval_iters):
            forward_step_func(data_iterator, model[0])


def _forward_backward(
    forward_step_func: Callable[..., Any], data_iterator: Batches, model: list[torch.nn.Module]
) -> list[torch.Tensor]:
    """Every micro-batch of this rank, as the schedule without a pipeline has them."""
    losses = []
    for _ in range(get_num_microbatches()):
        output, loss_func = forward_step_func(data_iterator, model[0])
        loss = loss_func(output)
        (loss / get_num_microbatches()).backward()
        losses.append(loss.detach())
    return losses


def _is_last_rank() -> bool:
    return not distributed.is_initialized() or (
        distributed.get_rank() == distributed.get_world_size() - 1
    )


def _parsed() -> argparse.Namespace:
    """The arguments that this loop looks at. It takes the others, as Megatron does."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("micro-batch-size", "global-batch-size", "seq-length", "train-iters"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name, usual in (("eval-interval", 1000), ("eval-iters", 1), ("overflow-at", -1)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    for part in ("tensor-model", "pipeline-model", "context"):
        parser.add_argument(f"--{part}-parallel-size", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--tensorboard-dir")
    args, _ = parser.parse_known_args()
    return args
