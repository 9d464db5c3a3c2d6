"""One training step of SpecForge 0.2.0: its own model, teacher and optimizer.

SpecForge needs Triton for its loss. On a CPU the same two kernels stand here in torch (same saved tensors, the gradient
written over the logits, rows in blocks), and its `torch.compile` helpers run eagerly.
"""

import os
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import triton_stub
from measure import SMOLLM2_VOCAB, arguments, draft_ids, features, loss_mask, measure
from transformers import AutoConfig, AutoModelForCausalLM

BLOCK = 256


class BlockedLogSoftmaxLoss(torch.autograd.Function):
    """specforge.core.loss.LogSoftmaxLoss, row block by row block."""

    @staticmethod
    def forward(ctx: Any, logits: Any, target: Any, position_mask: Any) -> Any:
        rows, goal, mask = logits.flatten(0, 1), target.flatten(0, 1), position_mask.flatten(0, 1).squeeze(-1).bool()
        losses = torch.zeros(len(rows))
        top, mass = torch.zeros(len(rows)), torch.zeros(len(rows))
        for start in range(0, len(rows), BLOCK):
            part = slice(start, start + BLOCK)
            block = rows[part].float()
            top[part] = block.amax(-1)
            mass[part] = (block - top[part, None]).exp_().sum(-1)
            log_probs = block.sub_(top[part, None]).sub_(mass[part, None].log())
            losses[part] = -(goal[part] * log_probs).sum(-1) * mask[part]
        ctx.save_for_backward(logits.detach(), target, mask, top, mass)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        logits, target, mask, top, mass = ctx.saved_tensors
        rows, goal = logits.flatten(0, 1), target.flatten(0, 1)
        for start in range(0, len(rows), BLOCK):
            part = slice(start, start + BLOCK)
            probs = (rows[part].float() - top[part, None]).exp_().div_(mass[part, None])
            gradient = probs.mul_(goal[part].sum(-1, keepdim=True)).sub_(goal[part])
            rows[part] = gradient * mask[part, None] * (upstream[0] / len(rows))
        return logits, None, None


def main() -> None:
    chosen = arguments()
    triton_stub.install()
    from specforge.algorithms.eagle3 import model as eagle3
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.optimizer import BF16Optimizer

    eagle3.LogSoftmaxLoss = BlockedLogSoftmaxLoss
    dtype = getattr(torch, chosen.dtype)
    config = AutoConfig.from_pretrained(chosen.model)
    config.num_hidden_layers, config.draft_vocab_size, config.tie_word_embeddings = 1, chosen.draft_vocab, False
    config.pretraining_tp = 1
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa").to(dtype)
    draft.t2d.zero_()[draft_ids(chosen.draft_vocab)] = True
    draft.embed_tokens.weight.requires_grad_(False)
    head = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=dtype).lm_head.weight.detach().clone()
    model = eagle3.OnlineEagle3Model(draft, length=chosen.ttt_steps, attention_backend="sdpa")
    optimizer = BF16Optimizer(draft, lr=1e-4, total_steps=1000)
    ids, aux, last = features(chosen.tokens)
    weights = [0.8**step for step in range(chosen.ttt_steps)]

    def step() -> None:
        losses = model(
            input_ids=ids[None],
            attention_mask=torch.ones(1, chosen.tokens, dtype=torch.bool),
            target=(last.to(dtype) @ head.T)[None],
            loss_mask=loss_mask(chosen.tokens, chosen.supervised).long()[None, :, None],
            hidden_states=aux.to(dtype)[None],
        )[0]
        sum(weight * loss for weight, loss in zip(weights, losses, strict=True)).backward()
        optimizer.step()

    assert len(head) == SMOLLM2_VOCAB
    measure(step, chosen.repeats)


if __name__ == "__main__":
    main()
