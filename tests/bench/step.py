"""One training step of ours, on noise: the drafter in the trainer's own engine (DeepSpeed, AdamW)."""

from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conf.cli import build, check_overrides
from data.batch import Batch, TargetFeatures
from data.decoder import Decoder, TargetParts
from tests.bench.measure import arguments, draft_ids, features, loss_mask, measure
from train.engine import Engine, init_distributed
from train.job import TrainJob
from train.roofline import matmul_flops_per_second

SHAPES = {
    "smollm2": LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=16384, rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    ),
    "qwen3-8b": LlamaConfig(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
}  # fmt: skip


def job_of(chosen: SimpleNamespace) -> TrainJob:
    """The demo's settings, but for what all sides share: AdamW, equal step weights, the peers' norms."""
    return build(
        check_overrides(
            "train",
            ["+target=smollm2", "optim=adamw", f"precision={chosen.dtype}", f"drafter.ttt_steps={chosen.ttt_steps}",
             "drafter.step_loss_decay=1.0", f"drafter.row_keep_ratio={chosen.row_keep_ratio}", "drafter.fc_norm=true",
             "drafter.norm_output=true", "drafter.norm_before_residual=true", "drafter.init_layer=null",
             f"drafter.draft_vocab_size={chosen.draft_vocab}"],
        )
    )  # fmt: skip


def parts_of(shape: LlamaConfig, head: torch.Tensor) -> TargetParts:
    """A target of this shape, whose embedding and LM head are `head` (V, D); nothing can run through its layers."""
    with torch.device("meta"):
        decoder = Decoder(LlamaForCausalLM(shape))
    return TargetParts(
        config=shape, path="", vocabulary={}, embed_tokens=head, lm_head=head,
        final_norm=torch.ones(shape.hidden_size), decoder=decoder,
    )  # fmt: skip


def batch_of(packs: int, tokens: int, document: int, supervised: float, ids: torch.Tensor) -> Batch:
    """Packs of documents of equal length, each a prompt and its answer."""
    rows = torch.arange(tokens).expand(packs, -1)
    mask = loss_mask(document, supervised)[rows % document]
    return Batch(
        input_ids=ids.view(packs, tokens), position_ids=rows % document, document_ids=rows // document, loss_mask=mask,
        token_weights=mask / mask.sum(), uniforms=torch.rand(rows.shape),
    )  # fmt: skip


def main() -> None:
    chosen = arguments()
    init_distributed()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    job, shape = job_of(chosen), SHAPES[chosen.model]
    head = 0.02 * torch.randn(shape.vocab_size, shape.hidden_size).bfloat16()
    drafter = job.drafter.build(parts_of(shape, head), draft_ids(chosen.draft_vocab, shape.vocab_size))
    ids, aux, last = features(chosen.packs * chosen.tokens, shape.hidden_size, shape.vocab_size)
    batch = batch_of(chosen.packs, chosen.tokens, chosen.document or chosen.tokens, chosen.supervised, ids)
    dtype = getattr(torch, job.precision)
    rate = matmul_flops_per_second(device, dtype, chosen.tokens, shape.hidden_size)
    engine = Engine(drafter, job.optim, job.deepspeed, job.precision, 1, 1000)
    flops = drafter.flops(batch)
    shape_of = (chosen.packs, chosen.tokens, -1)
    pair = (batch.to(device), TargetFeatures(aux.view(shape_of).to(device), last.view(shape_of).to(device)))
    measure(lambda: engine.step([pair]), chosen.repeats, flops, rate)


if __name__ == "__main__":
    main()
