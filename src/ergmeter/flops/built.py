"""A step as the command line describes it, counted by building its model and running it.

Documents of a packed or padded batch are run one by one, those of a length together: a kernel that
keeps them apart is not seen by a count without values, and a kernel that does not would be counted
for pairs that never meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.flops.analytic import PartFlops
from ergmeter.flops.architectures import count_config
from ergmeter.flops.counted import count
from ergmeter.flops.models import model_graph
from ergmeter.flops.tally import Counted
from ergmeter.flops.work import trained_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from ergmeter.flops.batch import Batch
    from ergmeter.flops.config import Config
    from ergmeter.flops.work import Training

_ONE_BY_ONE = "documents are run one by one, padding between them not at all"


def count_step(
    config: Config,
    batch: Batch,
    how: Training,
    *,
    train: bool = True,
    source_len: int | None = None,
    adapted: nn.Module | None = None,
) -> Counted:
    """The FLOPs of a step of the model in a configuration, by running it.

    `adapted` is that model with its adapters, where it has any (`adapted.adapted_model`).
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


def _together(counts: Iterable[Counted]) -> Counted:
    """Several counts of one model as one."""
    counts = list(counts)
    rows: dict[tuple[str, str], PartFlops] = {}
    missed: dict[str, int] = {}
    for one in counts:
        for key, cost in one.rows.items():
            rows[key] = rows.get(key, PartFlops()) + cost
        for name, calls in one.calls_not_counted.items():
            missed[name] = missed.get(name, 0) + calls
    first = counts[0]
    said = (*first.assumptions, _ONE_BY_ONE)
    return Counted(rows, first.params, first.params_trained, missed, said)


def _by_name(config: Config, how: Training) -> Callable[[str], bool]:
    """Whether a parameter is trained, by its name: as the operation of the graph it belongs to."""
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
