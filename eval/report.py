"""What an evaluation prints: a run's figures, and those of several runs side by side once a multirun is through."""

from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Column, Table

from conf.records import read_json

COMPARED = {
    "acceptance_length_decoded": "acceptance\nlength",
    "num_draft_tokens": "K",
    "draft": "draft",
    "temperature": "T",
    "dtype": "dtype",
    "tokens_per_second": "tokens/s",
    "speedup": "speedup",
    "outputs_equal_to_plain": "outputs equal\nto plain",
}
"""Keys of summary.json and their headings, in this order; runs without plain decoding lack the last three."""


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
        """Print what differs between the runs as a table, and what they share as one line."""
        if not self._runs:
            return
        found = {key: [_shown(summary.get(key, "")) for summary in self._runs.values()] for key in COMPARED}
        lengths, *others = COMPARED
        columns = [lengths, *(key for key in others if len(set(found[key])) > 1)]
        # A name or a figure that is cut tells nothing; on a narrow terminal the longest are folded instead.
        table = Table(*(Column(heading, overflow="fold") for heading in ("run", *(COMPARED[key] for key in columns))))
        for name, *values in zip(self._runs, *(found[key] for key in columns), strict=True):
            table.add_row(name, *values)
        console = Console()
        console.print(table)
        shared = [f"{COMPARED[key]} {found[key][0]}" for key in others if key not in columns and found[key][0]]
        if shared:
            console.print(f"all: {', '.join(shared)}".replace("\n", " "))
        speeds = {name: summary["speedup"] for name, summary in self._runs.items() if "speedup" in summary}
        if speeds:
            fastest = max(speeds, key=lambda name: speeds[name])
            console.print(f"fastest: {fastest}, {speeds[fastest]:.2f}x plain decoding")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
