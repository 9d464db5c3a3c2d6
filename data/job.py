"""The data job: what training would see of a corpus, in figures and in colour, before GPU hours are spent on it."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import Field
from rich.console import Console
from rich.text import Text

from conf import config
from conf.cli import build
from conf.records import provenance, write_json, write_text
from data.batch import Wants
from data.corpus import CorpusConfig
from data.encode import Document
from data.features import estimate_gib
from data.prepare import prepare
from data.target import Target, TargetConfig
from data.vocab import coverage


@config
class DataJob:
    """Values: conf/data.yaml."""

    run_name: str
    output_dir: str
    target: TargetConfig
    corpus: CorpusConfig
    max_tokens: int = Field(ge=2)
    """Longest document; longer conversations are an error."""
    draft_vocab_size: int | None = Field(ge=1)
    """Vd whose coverage is reported; None is the whole vocabulary."""
    show: int = Field(ge=0)
    """Print so many conversations, the supervised tokens in colour."""


def run(composed: DictConfig) -> None:
    """`python -m data`: encode a corpus, print it and write summary.json.

    Raises:
        InputError: for anything wrong with the corpus, naming file and line.
    """
    job: DataJob = build(composed)
    target = Target(job.target)
    corpus = prepare(target, job.corpus, job.max_tokens, num_validation=0, seed=0)
    documents = corpus.train
    tokens = sum(map(len, documents))
    supervised = sum(sum(document.loss_mask) for document in documents)
    wants = Wants(aux_layers=(0, 1, 2), last_hidden_state=True)  # EAGLE-3's number of states, for the estimate only
    summary: dict[str, Any] = {
        "documents": len(documents),
        "tokens": tokens,
        "supervised_tokens": supervised,
        "longest_document_tokens": max(map(len, documents)),
        "draft_vocab_size": job.draft_vocab_size,
        "draft_vocab_coverage": coverage(documents, corpus.draft_vocabulary(target, job.draft_vocab_size)),
        "eagle3_features_gib": estimate_gib(tokens, target.hf_config.hidden_size, wants, target.model.dtype),
    }
    folder = Path(job.output_dir)
    write_text(folder / "config.yaml", OmegaConf.to_yaml(composed))
    write_json(folder / "provenance.json", provenance())
    write_json(folder / "summary.json", summary)
    console = Console()
    show_masks(console, target, documents[: job.show])
    for key, value in summary.items():
        console.print(f"{key:>26}  {value}")
    console.print(f"{'next':>26}  python -m train +target={job.target.name} corpus={job.corpus.name}")


def show_masks(console: Console, target: Target, documents: Sequence[Document]) -> None:
    """Print documents as the target reads them; what is supervised (the target's own words) is green and underlined."""
    for document in documents:
        text = Text(f"{document.source}\n", style="bold")
        for answered, run_of_tokens in groupby(
            zip(document.input_ids, document.loss_mask, strict=True), lambda x: x[1]
        ):
            piece = target.tokenizer.decode([token for token, _ in run_of_tokens])
            text.append(piece, style="green underline" if answered else "dim")
        console.print(text)
