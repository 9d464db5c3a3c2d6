"""The evaluation job: decode prompts speculatively and plainly, walk over the same answers, and compare."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from conf import InputError, config
from conf.cli import build
from conf.records import provenance, write_json, write_text
from data.corpus import CorpusConfig
from data.encode import Document
from data.packing import collate_alone
from data.prepare import make_encoder
from data.target import Target, TargetConfig
from eval.generate import plain_generate, speculative_generate
from eval.generation import Clock, Decoding, Generation
from eval.report import show
from eval.rounds import Rule
from eval.sampling import SamplingConfig
from eval.suites import Prompt, read_prompts
from train.acceptance import Acceptance, round_walk
from train.checkpoint import load_drafter, put_to_work
from train.drafters.base import Drafter, DrafterConfig, DraftPlan, Proposer, require_reach
from train.progress import ProgressReport
from train.warm_start import build_from_head


@config
class EvalJob:
    """Values: conf/eval.yaml."""

    checkpoint: str | None
    """Run folder (its best checkpoint) or checkpoint folder; None for a drafter without a model."""
    target: TargetConfig | None
    """Only without a checkpoint, which knows its target."""
    drafter: DrafterConfig | None
    """Only without a checkpoint: one that drafts untrained (ngram, suffix, draft_model), or somebody's head
    (init_from)."""
    target_path: str | None
    """Where the checkpoint's target is now, if not where training found it."""
    trust_remote_code: bool
    """Whether a target that brings its own code may run it."""
    run_name: str
    output_dir: str
    corpus: CorpusConfig
    """The prompts: first turns of a jsonl file."""
    sampling: SamplingConfig
    draft: DraftPlan
    rule: Rule
    """Verification of sampled chains."""
    dtype: Literal["float32", "bfloat16"]
    """Of target and drafter. float32 for exact comparisons, bfloat16 as engines serve."""
    num_draft_tokens: int = Field(ge=1)
    """K per round."""
    max_tokens: int = Field(ge=2)
    """Longest answer."""
    batch_size: int = Field(ge=1)
    """Prompts decoded together, where no time is taken."""
    plain_prompts: int = Field(ge=0)
    """So many prompts are decoded one by one, with and without speculation: the speed-up, and a check of equal output
    at T=0."""
    trace: bool
    """Write every draft of every round to trace.jsonl."""
    seed: int
    """Of sampling."""
    num_threads: int | None = Field(ge=1)
    """CPU threads; None leaves torch's default."""


@dataclass(frozen=True)
class Decoded:
    """One prompt, decoded both ways."""

    prompt: Prompt
    speculative: Generation
    plain: Generation | None


@dataclass
class Timed:
    """Decoding one prompt at a time."""

    speculative: Clock
    plain: Clock


def run(composed: DictConfig) -> None:
    """`python -m eval`: write summary.json and rounds.json into `output_dir` and print the figures.

    Raises:
        InputError: for anything that the user can mend.
    """
    job: EvalJob = build(composed)
    if job.num_threads is not None:
        torch.set_num_threads(job.num_threads)
    target, proposer, folder = load_proposer(job)
    encoder = make_encoder(target, target.hf_config.max_position_embeddings)
    prompts = read_prompts(job.corpus, encoder)
    longest = max(len(prompt.input_ids) for prompt in prompts) + job.max_tokens + job.draft.max_nodes
    if longest > encoder.max_tokens:
        raise InputError(f"prompt and answer need {longest} tokens, the target's context is {encoder.max_tokens}")
    decoded, timed = decode_all(job, target, proposer, prompts)
    summary = summarise(job, decoded, timed)
    if job.sampling.greedy and job.draft.kind == "chain" and isinstance(proposer, Drafter):
        summary |= compare_with_walk(job, target, proposer, decoded)
    changed = isinstance(proposer, Drafter) and proposer.changed_target() is not None
    summary |= {
        "checkpoint": folder,
        "target_changed_by_training": changed,
        "prompts": len(prompts),
        "prompt_set": job.corpus.name,
    }
    output = Path(job.output_dir)
    write_text(output / "config.yaml", OmegaConf.to_yaml(composed))
    write_json(output / "provenance.json", provenance())
    write_json(output / "rounds.json", {entry.prompt.source: _rounds(entry) for entry in decoded})
    if job.trace:
        write_trace(output / "trace.jsonl", decoded)
    write_json(output / "summary.json", summary)
    title = f"{job.run_name}: K={job.num_draft_tokens}, T={job.sampling.temperature}, {job.dtype}"
    following = None
    if job.checkpoint is not None and isinstance(proposer, Drafter):
        following = f"python -m serve_export checkpoint={job.checkpoint} stack={proposer.stack}"
    show(title, summary, output, following)


def load_proposer(job: EvalJob) -> tuple[Target, Proposer, str | None]:
    """Target, drafter and the folder that it comes from.

    Raises:
        InputError: if the job names neither a checkpoint, nor a head, nor a drafter that needs no training.
    """
    dtype = getattr(torch, job.dtype)
    if job.checkpoint is not None:
        loaded = load_drafter(job.checkpoint, job.target_path, dtype, job.trust_remote_code)
        require_reach(loaded.drafter, job.draft.num_draft_tokens)
        return loaded.target, loaded.drafter, str(loaded.folder)
    if job.target is None or job.drafter is None:
        raise InputError("what to evaluate? checkpoint=RUN, or +target=... with +drafter=ngram, suffix or draft_model")
    target, head = Target(job.target, dtype), job.drafter.warm_start()
    proposer = build_from_head(job.drafter, target.parts, lambda: torch.arange(target.hf_config.vocab_size))
    if isinstance(proposer, Drafter):
        if head is None and not proposer.drafts_untrained:
            name = job.drafter.name
            raise InputError(f"drafter {name} must be trained first: name checkpoint=RUN, or drafter.init_from=HEAD")
        require_reach(proposer, job.draft.num_draft_tokens)
        target = put_to_work(proposer, target)
    return target, proposer, head


def decode_all(
    job: EvalJob, target: Target, proposer: Proposer, prompts: Sequence[Prompt]
) -> tuple[list[Decoded], Timed]:
    """Decode the first `plain_prompts` one by one, with and without drafts; the others speculatively in batches."""
    generator = torch.Generator(target.device).manual_seed(job.seed)
    decoding = Decoding(
        max_tokens=job.max_tokens, sampling=job.sampling, plan=job.draft, rule=job.rule, trace=job.trace,
        static_shapes=False,
    )  # fmt: skip
    decoded: list[Decoded] = []
    timed = Timed(Clock(), Clock())
    with ProgressReport(f"eval {job.run_name}", len(prompts), 0, shown=True) as progress:
        # The first calls of a process are slow (kernels are chosen, memory is mapped): not part of any figure.
        speculative_generate(target, proposer, [prompts[0].input_ids], decoding.shortened(8), generator)
        for prompt in prompts[: job.plain_prompts]:
            plain = plain_generate(target, [prompt.input_ids], decoding, generator)
            fast = speculative_generate(target, proposer, [prompt.input_ids], decoding, generator)
            timed.plain.add(plain.clock)
            timed.speculative.add(fast.clock)
            decoded.append(Decoded(prompt, fast.answers[0], plain.answers[0]))
            progress.update(len(decoded), f"acceptance length {_acceptance(job, decoded).acceptance_length:.3f}")
        rest = prompts[job.plain_prompts :]
        for start in range(0, len(rest), job.batch_size):
            group = rest[start : start + job.batch_size]
            ids = [prompt.input_ids for prompt in group]
            answers = speculative_generate(target, proposer, ids, decoding, generator).answers
            decoded += [Decoded(prompt, answer, None) for prompt, answer in zip(group, answers, strict=True)]
            progress.update(len(decoded), f"acceptance length {_acceptance(job, decoded).acceptance_length:.3f}")
    return decoded, timed


def summarise(job: EvalJob, decoded: Sequence[Decoded], timed: Timed) -> dict[str, Any]:
    """Acceptance, speed, and whether greedy outputs were equal. Definitions: README, "What is measured"."""
    acceptance = _acceptance(job, decoded)
    per_prompt = [_acceptance(job, [entry]).acceptance_length for entry in decoded if entry.speculative.rounds]
    rounds = [turn for entry in decoded for turn in entry.speculative.rounds]
    drafting = [turn for turn in rounds if turn.num_drafted]
    paired = [(entry.speculative, entry.plain) for entry in decoded if entry.plain is not None]
    speed: dict[str, Any] = {}
    if paired:
        fast = sum(_decode_tokens(a) for a, _ in paired) / timed.speculative.total
        slow = sum(_decode_tokens(b) for _, b in paired) / timed.plain.total
        clock = timed.speculative
        speed = {
            "tokens_per_second": fast, "plain_tokens_per_second": slow, "speedup": fast / slow,
            "time_share": {"target": clock.target / clock.total, "drafter": clock.drafter / clock.total,
                           "other": 1 - (clock.target + clock.drafter) / clock.total},
        }  # fmt: skip
        if job.sampling.greedy:
            speed["outputs_equal_to_plain"] = sum(a.tokens == b.tokens for a, b in paired)
            speed["outputs_compared_with_plain"] = len(paired)
    return {
        "acceptance_length_decoded": acceptance.acceptance_length,
        "acceptance_length_macro": sum(per_prompt) / max(1, len(per_prompt)),
        "acceptance_length_when_drafting": 1 + sum(turn.num_accepted for turn in drafting) / max(1, len(drafting)),
        "joint_rates": acceptance.joint_rates,
        "conditional_rates": acceptance.conditional_rates,
        "num_draft_tokens": job.num_draft_tokens,
        "drafted_per_round": sum(turn.num_drafted for turn in rounds) / max(1, len(rounds)),
        "draft": job.draft.kind,
        "max_tokens": job.max_tokens,
        "num_rounds": len(rounds),
        "rounds_drafting": len(drafting),
        "generated_tokens": sum(len(entry.speculative.tokens) for entry in decoded),
        "temperature": job.sampling.temperature,
        "dtype": job.dtype,
        **speed,
    }


def write_trace(path: Path, decoded: Sequence[Decoded]) -> None:
    """One line per round: where it is, and every draft with both models' probabilities and its fate."""
    lines = []
    for entry in decoded:
        position = 1  # the first token comes with the prompt
        for turn in entry.speculative.rounds:
            line = {"prompt": entry.prompt.source, "answer_token": position, "num_accepted": turn.num_accepted,
                    "num_emitted": turn.num_emitted, "drafts": turn.drafts}  # fmt: skip
            lines.append(json.dumps(line) + "\n")
            position += turn.num_emitted
    write_text(path, "".join(lines))


def compare_with_walk(job: EvalJob, target: Target, drafter: Drafter, decoded: Sequence[Decoded]) -> dict[str, Any]:
    """Run training's round-walk over the decoded answers and compare it with the decoder round by round."""
    walked_counts: list[int] = []
    differing: list[dict[str, Any]] = []
    width = max(len(entry.prompt.input_ids) + len(entry.speculative.tokens) for entry in decoded)
    for entry in decoded:
        prompt, answer = entry.prompt.input_ids, entry.speculative.tokens
        document = Document(prompt + answer, [False] * len(prompt) + [True] * len(answer), entry.prompt.source)
        batch = collate_alone(document, width).to(target.device)
        features = target.capture(batch, drafter.wants)
        walked = round_walk(drafter, batch, features, job.num_draft_tokens)[0]
        walked_counts += walked
        decoder_rounds = _by_start([turn.num_accepted for turn in entry.speculative.rounds])
        gaps = dict(zip(decoder_rounds, (turn.target_gap for turn in entry.speculative.rounds), strict=True))
        for start, count in _by_start(walked).items():
            if decoder_rounds.get(start, count) != count:
                differing.append(
                    {"prompt": entry.prompt.source, "answer_token": start, "walk": count,
                     "decoder": decoder_rounds[start], "target_gap": gaps[start]}
                )  # fmt: skip
    acceptance = Acceptance(num_accepted=tuple(walked_counts), num_draft_tokens=job.num_draft_tokens)
    return {
        "acceptance_length_walk": acceptance.acceptance_length,
        "joint_rates_walk": acceptance.joint_rates,
        "rounds_differing_from_walk": differing,
    }


def _by_start(counts: Sequence[int]) -> dict[int, int]:
    """Rounds by the index of the answer token that they start after."""
    starts = {}
    position = 0
    for count in counts:
        starts[position] = count
        position += count + 1
    return starts


def _acceptance(job: EvalJob, decoded: Sequence[Decoded]) -> Acceptance:
    counts = tuple(turn.num_accepted for entry in decoded for turn in entry.speculative.rounds)
    return Acceptance(num_accepted=counts, num_draft_tokens=job.num_draft_tokens)


def _decode_tokens(generation: Generation) -> int:
    """Tokens that `decode_seconds` paid for: all but the first, which the prompt's pass gives."""
    return len(generation.tokens) - 1


def _rounds(entry: Decoded) -> dict[str, Any]:
    return {
        "prompt": entry.prompt.input_ids,
        "tokens": entry.speculative.tokens,
        "num_accepted": [turn.num_accepted for turn in entry.speculative.rounds],
    }
