"""README.md of an exported head: what it is, what it reaches, how every engine serves it."""

from pathlib import Path
from typing import Any

from conf.records import provenance, read_json
from serve_export.engines import OWN, STACKS, Place, offer_for, stacks_for
from serve_export.source import Source
from train.checkpoint import LoadedDrafter


def find_evaluation(loaded: LoadedDrafter, run_name: str) -> dict[str, Any] | None:
    """The summary of `python -m eval` on this checkpoint, if it has been run."""
    path = Path("outputs/eval") / run_name / "summary.json"
    if not path.is_file():
        return None
    summary: dict[str, Any] = read_json(path)
    return summary if summary["checkpoint"] == str(loaded.folder) else None


def card(loaded: LoadedDrafter, source: Source, place: Place, evaluation: dict[str, Any] | None, stack: str) -> str:
    """The card as Markdown.

    Args:
        loaded: the checkpoint.
        source: the drafter as it was exported.
        place: of target and folder.
        evaluation: of this checkpoint, if there is one.
        stack: what the folder was written for.
    """
    manifest, head = loaded.manifest, loaded.job["drafter"]["name"]
    revision = f" at revision {manifest.target.revision}" if manifest.target.revision else ""
    lines = [
        "---", f"base_model: {manifest.target.path}", f"tags: [speculative-decoding, {head}]", "---", "",
        f"# {head} drafter for {manifest.target.name}", "",
        f"A drafter for speculative decoding with `{manifest.target.path}`{revision}, trained with Outrider and "
        f"written for {STACKS[stack]}.", "",
        *_commands(source, place, stack), *_measured(evaluation), *_training(loaded), *_origin(loaded),
    ]  # fmt: skip
    return "\n".join(lines)


def _commands(source: Source, place: Place, stack: str) -> list[str]:
    lines = ["## Serving", ""]
    written = offer_for(stack, source)
    for name in stacks_for(source):
        offer = offer_for(name, source)
        engine = "Outrider's own decoder" if offer is OWN else STACKS[name]
        again = "" if offer.format == written.format else f" (export again with `stack={name}`)"
        lines += [f"{engine}{again}:", "", "```", offer.command(place), "```", ""]
    return lines


def _measured(evaluation: dict[str, Any] | None) -> list[str]:
    if evaluation is None:
        return ["## Measured", "", "Not measured yet: run `python -m eval checkpoint=...` and export again.", ""]
    rates = ", ".join(f"{rate:.3f}" for rate in evaluation["joint_rates"])
    return [
        "## Measured", "", "| figure | value |", "|---|---|",
        f"| acceptance length (mean tokens per target forward, the target's own token included) | "
        f"{evaluation['acceptance_length_decoded']:.3f} |",
        f"| drafted tokens per round | {evaluation['num_draft_tokens']} |",
        f"| joint rates (share of rounds in which the first k drafts are kept), k = 1.. | {rates} |",
        f"| temperature | {evaluation['temperature']} |",
        f"| prompts | {evaluation['prompts']} of `{evaluation['prompt_set']}` |", "",
    ]  # fmt: skip


def _training(loaded: LoadedDrafter) -> list[str]:
    job = loaded.job
    return [
        "## Training", "", "| setting | value |", "|---|---|",
        f"| corpus | {job['corpus']['name']} |",
        f"| trained tokens | {loaded.manifest.trained_tokens} |",
        f"| optimizer | {job['optim']['name']} |",
        *(f"| {key} | {value} |" for key, value in job["drafter"].items() if not key.startswith("_")),
        f"| seed | {job['seed']} |", "",
    ]  # fmt: skip


def _origin(loaded: LoadedDrafter) -> list[str]:
    origin = provenance()
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    return [
        "## Origin", "", f"Commit {origin['git_commit']}; {versions}. Target: {_licence(loaded)}", "",
        "The head is useful only with the target named above; its licence follows the target's and the data's.", "",
    ]  # fmt: skip


def _licence(loaded: LoadedDrafter) -> str:
    """What the target's own card says."""
    path = Path(loaded.target.folder) / "README.md"
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("license:"):
                return f"licence {line.partition(':')[2].strip()} by its own card."
    return "its folder states no licence: see where it came from."
