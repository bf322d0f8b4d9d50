"""What is particular to Lightning: losses that are old, loaders taken whole, failures, resuming."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from ergmeter.errors import UsageError
from tests.e2e.recorded_steps import steps, sums

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer

from ergmeter.integrations import lightning
from ergmeter.integrations.lightning import ErgmeterCallback

ROWS, BATCH, LENGTH, VOCABULARY = 24, 2, 8, 16
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, about small loaders


class Words(LightningModule):
    """A table and a head, on batches of ids of which each row ends later than the one before."""

    def __init__(self, log_every: int = 0, fails_at: int = -1) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, 4)
        self.head = torch.nn.Linear(4, VOCABULARY)
        self.log_every, self.fails_at = log_every, fails_at
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        if index == self.fails_at:
            raise RuntimeError("the disk is full")
        loss = torch.nn.functional.cross_entropy(
            self.head(self.table(batch)).flatten(0, 1), batch.flatten()
        )
        self.losses.append(loss.item())
        if self.log_every and index % self.log_every == 0:
            self.log("train_loss", 2 * loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(Words):
    """Makes its own steps, and returns nothing."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        loss = super().training_step(batch, index)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Taker(Words):
    """Takes the loader itself, as modules do that fetch as they like."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, index, _ = next(dataloader_iter)
        return super().training_step(batch, index)


class Growing(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        for number in range(ROWS // BATCH):
            yield torch.full((BATCH, LENGTH + number), number % VOCABULARY)


def fitted(module: Words, path: Path, **options: Any) -> tuple[Any, dict[str, list[Any]]]:
    callback = ErgmeterCallback(out=path, probes=[])
    validates = options.pop("val", False)
    resumed = {"ckpt_path": options.pop("ckpt_path", None)}
    trainer: Any = options.pop("kind", Trainer)(
        **{"max_epochs": 1, **options}, accelerator="cpu", logger=False, callbacks=[callback],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=path.parent,
    )  # fmt: skip
    loader, other = (torch.utils.data.DataLoader(Growing(), batch_size=None) for _ in range(2))
    try:
        trainer.fit(module, loader, other if validates else None, **resumed)
    finally:
        assert "save_checkpoint" not in vars(trainer)
    return trainer, steps(path)


def test_the_loss_is_the_mean_of_what_was_returned_whatever_is_logged(tmp_path: Path) -> None:
    module = Words(log_every=2)
    _, rows = fitted(module, tmp_path / "run", accumulate_grad_batches=5)
    # Twelve batches: the last step of the epoch has two of them.
    losses = [torch.tensor(module.losses[at : at + 5]).mean().item() for at in (0, 5, 10)]
    assert rows["loss"] == pytest.approx(losses, rel=1e-6)
    lengths = [BATCH * (LENGTH + number) for number in range(ROWS // BATCH)]
    assert rows["tokens_computed"] == sums(lengths, 5)
    assert rows["micro_steps"] == [5, 5, 2]


def test_the_wait_for_data_is_seen_but_not_that_of_an_evaluation(tmp_path: Path) -> None:
    class Validated(Words):
        def validation_step(self, _batch: Any, _index: int) -> None:
            """Nothing to say."""

    fitted(Validated(), tmp_path / "run", val=True)
    waits = steps(tmp_path / "run", phase="data")
    # The first is fetched before the training begins, and perhaps one is waited for at the end.
    assert ROWS // BATCH - 1 <= len(waits["end_ns"]) <= ROWS // BATCH + 1


def test_of_a_module_that_returns_no_loss_it_is_what_was_logged_and_once_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning, "_ASKED_EVERY_NS", 0)
    module = ByHand(log_every=4)
    _, rows = fitted(module, tmp_path / "run")
    wanted = [math.nan if n % 4 else 2 * loss for n, loss in enumerate(module.losses)]
    told = [math.nan if loss is None else loss for loss in rows["loss"]]
    assert told == pytest.approx(wanted, rel=1e-6, nan_ok=True)


def test_the_trainer_is_not_asked_at_each_step_for_what_it_would_wait_for(tmp_path: Path) -> None:
    asked = []

    class Counting(Trainer):
        @property
        def callback_metrics(self) -> Any:
            asked.append(self.global_step)
            return super().callback_metrics

    returns, by_hand = Words(log_every=1), ByHand(log_every=1)
    fitted(returns, tmp_path / "returns", kind=Counting)
    assert asked == []
    fitted(by_hand, tmp_path / "by_hand", kind=Counting)
    assert 1 <= len(asked) < len(by_hand.losses)


def test_a_module_that_takes_the_loader_has_the_tokens_of_what_it_took(tmp_path: Path) -> None:
    _, rows = fitted(Taker(), tmp_path / "run")
    assert rows["tokens_computed"] == [BATCH * (LENGTH + n) for n in range(ROWS // BATCH)]


def test_a_training_that_fails_is_told_so_and_fails_as_before(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the disk is full"):
        fitted(Words(fails_at=5), tmp_path / "run")
    assert steps(tmp_path / "run")["index"] == list(range(5))
    (marks,) = (tmp_path / "run").glob("*/marks.jsonl")
    assert "failed (RuntimeError: the disk is full)" in marks.read_text()


def test_a_training_that_is_resumed_goes_on_counting(tmp_path: Path) -> None:
    trainer, _ = fitted(Words(), tmp_path / "first", max_steps=4, max_epochs=-1)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    more: dict[str, Any] = {"max_epochs": -1, "ckpt_path": tmp_path / "saved.ckpt"}
    _, rows = fitted(Words(), tmp_path / "second", max_steps=7, **more)
    assert rows["index"] == [4, 5, 6]


def test_a_wrong_option_is_refused_where_it_is_given() -> None:
    with pytest.raises(UsageError, match="no setting 'warmup_step'"):
        ErgmeterCallback(warmup_step=3)


def test_a_spawned_process_makes_the_callback_again_with_its_arguments(tmp_path: Path) -> None:
    callback = ErgmeterCallback(tmp_path / "run", name="spawned")
    again = pickle.loads(pickle.dumps(callback))
    assert again._arguments == (None, {"out": tmp_path / "run", "name": "spawned"})
