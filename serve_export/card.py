"""README.md of an exported head: what it is, what it reaches, how to serve it."""

from pathlib import Path
from typing import Any

from conf.records import read_json
from train.checkpoint import LoadedDrafter


def find_evaluation(loaded: LoadedDrafter, run_name: str) -> dict[str, Any] | None:
    """The summary of `python -m eval` on this checkpoint, if it has been run."""
    path = Path("outputs/eval") / run_name / "summary.json"
    if not path.is_file():
        return None
    summary: dict[str, Any] = read_json(path)
    return summary if summary["checkpoint"] == str(loaded.folder) else None


def card(loaded: LoadedDrafter, evaluation: dict[str, Any] | None, command: str) -> str:
    """The card as Markdown."""
    manifest, job = loaded.manifest, loaded.job
    lines = [
        "---", f"base_model: {manifest.target.path}", "tags: [speculative-decoding, eagle3]", "---", "",
        f"# {job['drafter']['name']} drafter for {manifest.target.name}", "",
        f"A drafter head for speculative decoding with `{manifest.target.path}`"
        f"{f' at revision {manifest.target.revision}' if manifest.target.revision else ''}, trained with Outrider.", "",
        "```sh", command, "```", "", "## Measured", "",
    ]  # fmt: skip
    if evaluation is None:
        lines.append("Not measured yet: run `python -m eval checkpoint=...` and export again.")
    else:
        lines += [
            "| figure | value |", "|---|---|",
            f"| acceptance length (mean tokens per target forward, bonus included) | "
            f"{evaluation['acceptance_length_decoded']:.3f} |",
            f"| drafted tokens per round | {evaluation['num_draft_tokens']} |",
            f"| joint rates, position 1.. | {', '.join(f'{rate:.3f}' for rate in evaluation['joint_rates'])} |",
            f"| temperature | {evaluation['temperature']} |",
            f"| prompts | {evaluation['prompts']} of `{evaluation['prompt_set']}` |",
        ]  # fmt: skip
    lines += [
        "", "## Training", "", "| setting | value |", "|---|---|",
        f"| corpus | {job['corpus']['name']} |",
        f"| trained tokens | {manifest.trained_tokens} |",
        f"| optimizer | {job['optim']['name']} |",
        f"| loss | {job['drafter'].get('loss')} |",
        f"| training-time-test steps | {job['drafter'].get('ttt_steps')} |",
        f"| seed | {job['seed']} |", "",
        "The head is useful only with the target named above; its licence follows the target's and the data's.", "",
    ]  # fmt: skip
    return "\n".join(lines)
