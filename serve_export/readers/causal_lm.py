"""A draft model from its folder, as transformers loads any model: nothing of the decoder takes part."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from conf import InputError
from serve_export.readers.layer import Probe


def read(folder: Path, probe: Probe) -> Tensor:
    """(K, V) draft logits.

    Raises:
        InputError: if transformers misses a tensor, or finds one too many.
    """
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = sorted({*found["missing_keys"], *found["unexpected_keys"], *map(str, found["mismatched_keys"])})
    if wrong:
        raise InputError(f"{folder}: transformers does not load {', '.join(wrong[:5])}")
    ids, logits = probe.ids[None], []
    for _ in range(probe.num_draft_tokens):
        logits.append(model(input_ids=ids, use_cache=False).logits[:, -1])
        ids = torch.cat([ids, logits[-1].argmax(dim=-1)[None]], dim=1)
    return torch.cat(logits)
