"""Experiment tracking: the only module that knows Weights & Biases."""

import os
import uuid
from pathlib import Path
from typing import Any, Literal

from conf import config
from conf.records import write_text


@config
class TrackerConfig:
    """Values: conf/tracker/*.yaml."""

    name: Literal["wandb", "none"]
    project: str
    """W&B project; unused by none."""


class Tracker:
    """Sends metrics to W&B: online with a key (WANDB_API_KEY or `wandb login`), else into an offline run folder."""

    def __init__(self, tracker: TrackerConfig, run_name: str, folder: Path, settings: dict[str, Any]) -> None:
        """Start the run.

        Args:
            tracker: where to.
            run_name: shown in W&B.
            folder: of the job; offline runs are written below it, and a resumed job continues its own run.
            settings: the resolved configuration.
        """
        self._run: Any = None
        if tracker.name == "none":
            return
        import wandb  # here, so that a run without it neither needs nor starts it

        online = wandb.api.api_key is not None and os.environ.get("WANDB_MODE") not in ("offline", "disabled")
        identity = folder / "tracker_id"  # moved aside with the folder: a run started anew is a new one in W&B too
        if not identity.exists():
            write_text(identity, uuid.uuid4().hex)
        self._run = wandb.init(
            project=tracker.project,
            name=run_name,
            id=identity.read_text(encoding="utf-8"),
            resume="allow",
            dir=folder,
            config=settings,
            mode="online" if online else "offline",
            settings=wandb.Settings(silent=True),
        )

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Send `metrics`; lists become one series per position (`loss/step` -> loss/step_0, ...)."""
        if self._run is None:
            return
        flat: dict[str, Any] = {}
        for key, value in metrics.items():
            if isinstance(value, list):
                flat.update({f"{key}_{position}": entry for position, entry in enumerate(value)})
            else:
                flat[key] = value
        self._run.log(flat, step=step)

    def finish(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()
