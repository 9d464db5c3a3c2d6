"""One training step of speculators 0.9.0: its own model, loss and optimizer; the body of Trainer.train_epoch.

On a CPU its own switches for the eager paths are needed: attention `sdpa` and loss implementation `eager`.
"""

import argparse

import torch
from measure import AUX_LAYER_IDS, SMOLLM2_VOCAB, arguments, draft_ids, features, loss_mask, measure
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.cli import create_transformer_layer_config
from speculators.train.optimizers import build_optimizers


def main() -> None:
    chosen = arguments()
    known = draft_ids(chosen.draft_vocab)
    to_draft = torch.zeros(SMOLLM2_VOCAB, dtype=torch.bool)
    to_draft[known] = True
    layer = create_transformer_layer_config(chosen.model, 1, "llama", None, 2048, [])
    model = Eagle3DraftModel.from_training_args(
        layer, t2d=to_draft, d2t=known - torch.arange(len(known)), draft_vocab_size=len(known),
        norm_before_residual=True, norm_before_fc=True, norm_output=True, ttt_steps=chosen.ttt_steps,
        target_layer_ids=list(AUX_LAYER_IDS), verifier_name_or_path=chosen.model, draft_attn_impl="sdpa",
    )  # fmt: skip
    model.lm_head.weight.requires_grad_(False)
    optimizers = build_optimizers(model, argparse.Namespace(optimizer="adamw", lr=1e-4, weight_decay=0.01))
    ids, aux, last = features(chosen.tokens)
    batch = {
        "hidden_states": aux[None], "input_ids": ids[None], "verifier_last_hidden_states": last[None],
        "document_ids": torch.zeros(1, chosen.tokens, dtype=torch.int64),
        "loss_mask": loss_mask(chosen.tokens, chosen.supervised)[None],
        "position_ids": 1 + torch.arange(chosen.tokens)[None],
    }  # fmt: skip
    loss_config = resolve_loss_config("kl_div", "eager")

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=chosen.dtype == "bfloat16"):
            _, loss, _ = model(**batch, ttt_steps=chosen.ttt_steps, ttt_step_loss_decay=1.0, loss_config=loss_config)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()

    measure(step, chosen.repeats)


if __name__ == "__main__":
    main()
