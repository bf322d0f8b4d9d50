"""A TrainingMonitor's rows in W&B, under the names it always had.

The trap: 0 for what was not measured. It pulls every mean and every summary down, so what is absent
is left out of the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.integrations.guard import reason_of, warn_once

if TYPE_CHECKING:
    from collections.abc import Mapping

_AXIS = "step"
_PROJECT = "qwen_classification"  # the original's, where the configuration names none


class WandbRows:
    """The run that rows go to: the script's own where it has one, else one that is made here."""

    def __init__(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._run: Any = None
        self._is_own = False
        if not settings.get("enabled", False):
            return
        try:
            import wandb  # noqa: PLC0415  only for those who ask

            self._is_own = wandb.run is None
            self._run = wandb.run or wandb.init(
                project=settings.get("project", _PROJECT),
                name=settings.get("run_name"),
                tags=list(settings.get("tags") or []),
                notes=settings.get("notes"),
                config=dict(config),
                resume="allow",
            )
            self._run.define_metric(_AXIS)
            for group in ("training/*", "perf/*", "eval/*"):
                self._run.define_metric(group, step_metric=_AXIS)
        except Exception as error:  # noqa: BLE001  anybody's library
            self._give_up(error)

    @property
    def is_open(self) -> bool:
        """Whether anybody takes rows."""
        return self._run is not None

    def log(self, values: Mapping[str, Any], *, step: int | None = None) -> None:
        """Add to the row of a step. What is None is not in it."""
        if self._run is None:
            return
        known = {name: value for name, value in values.items() if value is not None}
        try:
            if step is None:
                self._run.log(known)
            else:
                self._run.log({**known, _AXIS: int(step)}, step=int(step))
        except Exception as error:  # noqa: BLE001  anybody's library
            self._give_up(error)

    def finish(self) -> None:
        """End the run, if it was made here."""
        run, self._run = self._run, None
        if run is not None and self._is_own:
            try:
                run.finish()
            except Exception as error:  # noqa: BLE001  anybody's library
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        warn_once(f"no rows to W&B: {reason_of(error)}")
