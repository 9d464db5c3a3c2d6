"""Heads in the hands of the peers' own code; runs in their environment.

python heads.py load FOLDER PROBE OUT           speculators loads FOLDER
python heads.py write FOLDER PROBE OUT TARGET   speculators makes a random head for TARGET and saves it
python heads.py specforge FOLDER PROBE OUT TARGET   the same by SpecForge

PROBE holds hidden_states (N, 3 * D) and next_ids (N,); OUT gets the logits of the first training-time-test steps on it.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "peers"))

import torch
import triton_stub
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

STEPS = 2
DRAFT_VOCAB = 50


def randomise(model: Any) -> None:
    """Noise on every weight, as the head of a real run has."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            start = torch.ones_like(parameter) if "norm" in name else torch.zeros_like(parameter)
            parameter.copy_(start + 0.2 * torch.randn(parameter.shape, generator=generator))


def vocabulary(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets (Vd,) and marks (V,) of some ascending ids."""
    ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(4))[:DRAFT_VOCAB].sort().values
    return ids - torch.arange(len(ids)), torch.isin(torch.arange(vocab_size), ids)


def speculators_logits(model: Any, probe: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What its own forward computes."""
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    count = len(probe["next_ids"])
    with torch.no_grad():
        model(
            hidden_states=probe["hidden_states"][None],
            input_ids=probe["next_ids"][None],
            document_ids=torch.zeros(1, count, dtype=torch.int64),
            ttt_steps=STEPS,
        )
    return {f"step{k}": logits.contiguous() for k, logits in enumerate(seen)}


def load(folder: str, probe: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our folder, by speculators' own loading."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"  # flex attention needs a compiler
    model = Eagle3DraftModel.from_pretrained(folder, config=config)
    state, written = model.state_dict(), load_file(Path(folder) / "model.safetensors")
    lost = [name for name, tensor in written.items() if name not in state or not torch.equal(state[name], tensor)]
    missing = state.keys() - written.keys() - {"verifier_lm_head.weight", "verifier_norm.weight"}
    assert not lost and not missing, (lost, missing)
    return speculators_logits(model.float().eval(), probe)


def write(folder: str, probe: dict[str, torch.Tensor], target: str) -> dict[str, torch.Tensor]:
    """A head as speculators' trainer saves it."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config

    layer = create_transformer_layer_config(target, 1, "llama", None, 512, [])
    d2t, t2d = vocabulary(layer.vocab_size)
    model = Eagle3DraftModel.from_training_args(
        layer, t2d=t2d, d2t=d2t, draft_vocab_size=DRAFT_VOCAB, norm_before_residual=True, norm_before_fc=False,
        norm_output=True, ttt_steps=STEPS, target_layer_ids=[2, 4, 5], verifier_name_or_path=target,
        draft_attn_impl="sdpa",
    )  # fmt: skip
    embedding = model.embed_tokens.weight.detach().clone()
    randomise(model)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(embedding)
    model.save_pretrained(folder)
    return speculators_logits(model.float().eval(), probe)


def specforge(folder: str, probe: dict[str, torch.Tensor], target: str) -> dict[str, torch.Tensor]:
    """A head as SpecForge saves it; the first step only."""
    triton_stub.install()
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers, config.draft_vocab_size, config.tie_word_embeddings = 1, DRAFT_VOCAB, False
    config.pretraining_tp = 1
    model = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float().eval()
    randomise(model)
    d2t, t2d = vocabulary(config.vocab_size)
    model.d2t.copy_(d2t)
    model.t2d.copy_(t2d)
    (embedding,) = (load_file(file)["model.embed_tokens.weight"] for file in Path(target).glob("*.safetensors"))
    with torch.no_grad():
        model.embed_tokens.weight.copy_(embedding)
        states = model(probe["hidden_states"][None], model.embed_input_ids(probe["next_ids"][None]))
        logits = model.lm_head(states)[0]
    model.save_pretrained(folder)
    return {"step0": logits.contiguous()}


if __name__ == "__main__":
    mode, folder, probe, out, *target = sys.argv[1:]
    result = {"load": load, "write": write, "specforge": specforge}[mode](folder, load_file(probe), *target)
    save_file(result, out)
