"""What an evaluation prints: a run's figures, and those of several runs side by side once a multirun is through."""

from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Column, Table

from conf.records import read_json

COMPARED = (
    "acceptance_length_decoded",
    "num_draft_tokens",
    "draft",
    "temperature",
    "dtype",
    "tokens_per_second",
    "speedup",
    "outputs_equal_to_plain",
)
"""Keys of summary.json, in this order; runs without plain decoding lack the last three."""


def show(title: str, summary: dict[str, Any], folder: Path, following: str | None) -> None:
    """Print one run's figures.

    Args:
        title: what was evaluated.
        summary: the figures.
        folder: where they were written.
        following: the command that comes next.
    """
    table = Table("figure", "value", title=title)
    for key, value in summary.items():
        table.add_row(key, _shown(value))
    table.add_row("written to", str(folder))
    if following is not None:
        table.add_row("next", following)
    Console().print(table)


class Comparison(Callback):
    """Hydra calls it during `python -m eval -m ...`: collects the runs, then prints them as one table."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[str, Any]] = {}

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Remember what the run has written; one that failed has written nothing new and ends everything anyway."""
        summary = Path(config.output_dir) / "summary.json"
        if summary.is_file():
            self._runs[config.run_name] = read_json(summary)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table."""
        table = Table(Column("run", no_wrap=True), *COMPARED)  # a name that is cut tells nothing
        for name, summary in self._runs.items():
            table.add_row(name, *(_shown(summary.get(key, "")) for key in COMPARED))
        console = Console()
        console.print(table)
        speeds = {name: summary["speedup"] for name, summary in self._runs.items() if "speedup" in summary}
        if speeds:
            fastest = max(speeds, key=lambda name: speeds[name])
            console.print(f"fastest: {fastest}, {speeds[fastest]:.2f}x plain decoding")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
