"""One training step of ours: the drafter in the trainer's own engine (DeepSpeed, AdamW)."""

from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

from conf.cli import build, check_overrides
from data.batch import Batch, TargetFeatures, TargetParts
from tests.bench.measure import arguments, draft_ids, features, measure
from train.engine import Engine, init_distributed
from train.job import TrainJob


def job_of(chosen: SimpleNamespace) -> TrainJob:
    """The demo's settings, but for what all sides share: AdamW, every row of every step, equal weights."""
    return build(
        check_overrides(
            "train",
            ["+target=smollm2", "optim=adamw", f"precision={chosen.dtype}", f"drafter.ttt_steps={chosen.ttt_steps}",
             "drafter.step_loss_decay=1.0", "drafter.row_keep_ratio=1.0", "drafter.fc_norm=true",
             "drafter.norm_output=true", "drafter.norm_before_residual=true",
             f"drafter.draft_vocab_size={chosen.draft_vocab}"],
        )
    )  # fmt: skip


def main() -> None:
    chosen = arguments()
    init_distributed()
    job = job_of(chosen)
    target = AutoModelForCausalLM.from_pretrained(chosen.target, dtype=torch.bfloat16)
    head = target.lm_head.weight.detach()
    parts = TargetParts(
        config=target.config, embed_tokens=head, lm_head=head, final_norm=target.model.norm.weight.detach(),
        layers=target.model.layers,
    )  # fmt: skip
    drafter = job.drafter.build(parts, draft_ids(chosen.draft_vocab))
    engine = Engine(drafter, job.optim, job.deepspeed, job.precision, 1, 1000)
    del target
    ids, aux, last = features(chosen.tokens)
    rows = torch.arange(chosen.tokens)[None]
    batch = Batch(
        input_ids=ids[None], position_ids=rows, document_ids=torch.zeros_like(rows),
        loss_mask=torch.ones_like(rows, dtype=torch.bool),
        token_weights=torch.full(rows.shape, 1 / chosen.tokens), uniforms=torch.rand(rows.shape),
    )  # fmt: skip
    pair = (batch, TargetFeatures(aux_hidden_states=aux[None], last_hidden_state=last[None]))
    measure(lambda: engine.step([pair]), chosen.repeats)


if __name__ == "__main__":
    main()
