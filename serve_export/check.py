"""Does an exported folder compute what the trained drafter computes?"""

from pathlib import Path

import torch

from conf import InputError
from conf.records import read_json
from serve_export.reader import ExportedEagle3
from train.checkpoint import LoadedDrafter
from train.drafters.base import chain
from train.drafters.eagle3 import Eagle3

PROBE_TOKENS = 24
TOLERANCE = 1e-4
"""Largest difference of logits relative to their spread: float32 rounding of two different implementations."""


@torch.no_grad()
def compare_logits(loaded: LoadedDrafter, folder: Path, num_draft_tokens: int) -> float | None:
    """Draft logits of the exported files against the trained drafter's, on a probe text.

    The drafter is rounded to the exported dtype and run in float32, like the reader.

    Returns:
        The largest relative difference; None if the head uses a rope scaling that the reader does not implement (the
        contract still holds).

    Raises:
        InputError: if they differ.
    """
    drafter, target = loaded.drafter, loaded.target
    assert isinstance(drafter, Eagle3)  # the exporter refused every other family
    config = read_json(folder / "config.json")
    if config["rope_scaling"] is not None:
        return None
    reader = ExportedEagle3(folder, target.embed_tokens.cpu())
    drafter.to("cpu", torch.float32)
    for parameter in drafter.parameters():
        parameter.copy_(parameter.to(getattr(torch, config["dtype"])))  # rounds to what was written
    probe = torch.arange(PROBE_TOKENS)[None].to(target.device) * 7 % target.hf_config.vocab_size
    _, features = target.step(probe[:, :-1], target.new_cache(1, PROBE_TOKENS), drafter.wants)
    aux = features.aux_hidden_states.float().cpu()
    state = drafter.start(probe.tolist(), PROBE_TOKENS + num_draft_tokens)
    drafter.observe(state, type(features)(aux, None), probe[:, 1:].cpu(), torch.tensor([PROBE_TOKENS - 1]))
    ours: list[torch.Tensor] = []
    handle = drafter.lm_head.register_forward_hook(lambda _module, _inputs, output: ours.append(output.flatten(0, -2)))
    drafter.propose(state, chain(num_draft_tokens), None, None)
    handle.remove()
    theirs = reader.draft_logits(aux[0], probe[0, 1:].cpu(), num_draft_tokens)
    difference = float((torch.cat(ours) - theirs).abs().max() / theirs.std())
    if difference > TOLERANCE:
        raise InputError(
            f"{folder}: exported head and trained drafter differ by {difference:.2e} of the logits' spread"
        )
    return difference
