"""The last step of `make demo`: one table and one summary.json out of what train, eval and serve_export left behind."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conf import InputError
from conf.cli import fail
from conf.records import read_json, write_json

RUN = "eagle3-smollm2"
OUTPUT = Path("outputs/demo/summary.json")


def collect(outputs: Path) -> dict[str, Any]:
    """Read the three jobs' records below `outputs`.

    Raises:
        InputError: if one of them is missing.
    """
    trained = read_json(outputs / "train" / RUN / "summary.json")
    measured = read_json(outputs / "eval" / RUN / "summary.json")
    exported = read_json(outputs / "serve_export" / f"{RUN}-vllm" / "export.json")
    return {
        "train_seconds": trained["train_seconds"],
        "trained_tokens": trained["trained_tokens"],
        "acceptance_length_walk": measured["acceptance_length_walk"],
        "acceptance_length_decoded": measured["acceptance_length_decoded"],
        "joint_rates": measured["joint_rates"],
        "num_draft_tokens": measured["num_draft_tokens"],
        "speedup": measured["speedup"],
        "export_dir": exported["export_dir"],
        "serve_command": exported["serve_command"],
    }


def main() -> None:
    """Print the table and write outputs/demo/summary.json."""
    try:
        summary = collect(Path("outputs"))
    except InputError as error:
        fail(error)
    write_json(OUTPUT, summary)
    table = Table(title="EAGLE-3 for SmolLM2-135M-Instruct")
    table.add_column("figure")
    table.add_column("value", overflow="fold")
    rates = ", ".join(f"{rate:.3f}" for rate in summary["joint_rates"])
    table.add_row(
        "acceptance length (decoded)", f"{summary['acceptance_length_decoded']:.3f} tokens per target forward"
    )
    table.add_row("acceptance length (training's estimate)", f"{summary['acceptance_length_walk']:.3f}")
    table.add_row(f"joint rates, positions 1-{summary['num_draft_tokens']}", rates)
    table.add_row("speed against plain decoding", f"{summary['speedup']:.2f}x")
    table.add_row("training", f"{summary['train_seconds']:.0f} s, {summary['trained_tokens']} tokens")
    table.add_row("export", summary["export_dir"])
    table.add_row("serve", summary["serve_command"])
    Console().print(table)


if __name__ == "__main__":
    main()
