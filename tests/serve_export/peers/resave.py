"""A head, loaded and saved again by a peer's own code; runs in the peers' environment.

python resave.py speculators HEAD OUT          HEAD: exported with stack=speculators
python resave.py specforge HEAD OUT TARGET     HEAD: exported with stack=sglang
"""

import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "peers"))

import triton_stub
from safetensors.torch import load_file
from transformers import AutoConfig


def speculators(head: str, out: str) -> None:
    """By speculators' own loading and saving."""
    from speculators.models.eagle3 import Eagle3DraftModel

    Eagle3DraftModel.from_pretrained(head).save_pretrained(out)


def specforge(head: str, out: str, target: str) -> None:
    """Its model, given the tensors, saves itself as at the end of a run."""
    triton_stub.install()
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    tensors = load_file(Path(head) / "model.safetensors")
    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers, config.draft_vocab_size, config.tie_word_embeddings = 1, len(tensors["d2t"]), False
    config.pretraining_tp = 1
    model = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    found = model.load_state_dict(tensors, strict=False)
    assert not found.unexpected_keys and found.missing_keys == ["embed_tokens.weight"], found
    (embedding,) = (load_file(file)["model.embed_tokens.weight"] for file in Path(target).glob("*.safetensors"))
    model.embed_tokens.weight.data.copy_(embedding)
    model.save_pretrained(out)


if __name__ == "__main__":
    peer, *arguments = sys.argv[1:]
    {"speculators": speculators, "specforge": specforge}[peer](*arguments)
