"""Fine-tuning the multi-token-prediction layer that a target brings along (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    step k, row t:  z = W [norm_e(emb(x_{t+1+k})); norm_h(g)], in the family's order
                    g = the target's state at t after its final norm (MiMo: before it) for k = 0,
                        else the step before's output
    layer:          y = a decoder layer of the target's own class (its attention, experts and all), of z
    logits:         the target's LM head(norm(y));  next step's g = norm(y)

Of several such layers (one per depth) the first is read and applied again and again, as engines do. `to_serving` gives
the tensors the names that they came under, so that they can be put back and nothing else of the target changes.

Families, by the names in the target's folder:

    layers.N.*    DeepSeek-V3, GLM-4-MoE and what else transformers knows (`MtpModel`)     [embedding; state]
    mtp.*         Qwen3.5 and Qwen3-Next, dense and with experts                           [embedding; state]
    model.mtp_layers.0.*   MiMo                                                            [state; embedding]

The first row of a text reads no embedding in vLLM's modules of most families (`READS_NO_FIRST`).

Shape letters as in `train.drafters.base`; R = flattened rows B * T.
"""

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import MtpLayer, MtpModel

from conf import InputError
from conf.records import read_safetensors
from data.batch import TargetFeatures, Wants
from data.decoder import TargetParts
from train.drafters.base import Servable
from train.drafters.draft_layer import Attend
from train.drafters.fed_back import FedBackConfig, FedBackDrafter
from train.drafters.flops import attention_flops, module_flops

OF_QWEN = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.layers.0.": "mtp_block.",
    "mtp.norm.": "post_norm.",
}
OF_MIMO = {
    "model.mtp_layers.0.token_layernorm.": "enorm.",
    "model.mtp_layers.0.hidden_layernorm.": "hnorm.",
    "model.mtp_layers.0.input_proj.": "eh_proj.",
    "model.mtp_layers.0.final_layernorm.": "post_norm.",
    "model.mtp_layers.0.": "mtp_block.",
}
EXPERT = re.compile(r"(?P<block>.*\.experts\.)(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")
"""One matrix of one expert, as folders have them; transformers' layers hold those of all experts in two tensors."""
READS_NO_FIRST = ("deepseek_", "glm", "mimo", "ernie4_5", "hy_v3", "bailing_moe")
"""How the names of these families begin."""
FAMILIES = {"qwen3_5": OF_QWEN, "qwen3_next": OF_QWEN, "mimo": OF_MIMO}
"""For the families whose folders transformers cannot read itself: how their names begin there, the first that fits ->
how they begin in transformers' `MtpLayer`."""


class NativeMtp(FedBackDrafter):
    """The module, as transformers names its parts."""

    drafts_untrained = True
    stack = "target"

    def __init__(self, settings: FedBackConfig, target: TargetParts, draft_to_target_ids: Tensor) -> None:
        """Read it from the target's folder.

        Raises:
            InputError: if the target has none that is known.
        """
        super().__init__(settings, target, draft_to_target_ids)
        self._of_mimo = target.config.model_type == "mimo"
        self._reads_first = not target.config.model_type.startswith(READS_NO_FIRST)
        before_norm = (len(target.decoder.layers),) if self._of_mimo else ()
        self.wants = Wants(aux_layers=before_norm, last_hidden_state=True)
        # In a tuple: the target's modules are not this module's, to be moved or saved with it.
        self._of_target = (target.decoder.model, target.decoder.module.rotary_emb)
        layer, self._experts_apart = native_layer(target)
        self.mtp: Any = layer.float().requires_grad_(True).train()

    def fuse(self, features: TargetFeatures) -> Tensor:
        """See FedBackDrafter.fuse."""
        return self.aux_hidden(features) if self._of_mimo else self.last_hidden(features)

    def layer(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, queries: Tensor | None = None
    ) -> Tensor:
        """See FedBackDrafter.layer."""
        embedded = self.embed(ids, hidden)
        if not self._reads_first:
            embedded = torch.where(positions[:, None] == 0, 0, embedded)
        token, state = self.mtp.enorm(embedded), self.mtp.hnorm(hidden)
        first_state = getattr(self.mtp.config, "mtp_hidden_states_first", False)  # transformers' own flag
        joined = self.mtp.eh_proj(torch.cat([state, token] if first_state else [token, state], dim=-1))[None]
        output = self.mtp.mtp_block(
            joined,
            position_embeddings=self._of_target[1](joined, position_ids=positions[None]),
            position_ids=positions[None],
            attention_mask=None,
            cache=None,
            attend=attend if queries is None else _of_some_rows(attend, queries),
        )
        stream: Tensor = (output[0] if isinstance(output, tuple) else output)[0]
        return stream if queries is None else stream.index_select(0, queries)

    def fed_back(self, stream: Tensor) -> Tensor:
        """See FedBackDrafter.fed_back."""
        return self.normed(stream)

    def normed(self, stream: Tensor) -> Tensor:
        """See FedBackDrafter.normed."""
        output: Tensor = self.mtp.post_norm(stream)
        return output

    def layer_flops(self, everywhere: int, key_rows: int, query_rows: int, pairs: int) -> int:
        """See FedBackDrafter.layer_flops."""
        width = self.shape.num_attention_heads * self.shape.head_dim
        return module_flops(self.mtp, self.mtp.config, key_rows) + attention_flops(pairs, width)

    def to_serving(self) -> Servable:
        """A change of the target's folder, and no head beside it; see Drafter.to_serving."""
        return Servable(
            architecture="native_mtp",
            tensors={"draft_to_target_ids": self.draft_to_target_ids},
            config={"model_type": self.mtp.config.model_type},
            target_tensors=native_names(self._of_target[0], self.mtp.state_dict(), self._experts_apart),
        )


def _of_some_rows(attend: Attend, queries: Tensor) -> Attend:
    """An attention for layers that ask for all rows: the rows that do not count get zeros."""

    def attend_all(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        found = attend(query.index_select(1, queries), keys, values)
        return found.new_zeros(query.shape).index_copy(1, queries, found)

    return attend_all


def native_layer(target: TargetParts) -> tuple[Any, bool]:
    """The target's own first MTP layer, as a `transformers.modeling_layers.MtpLayer`.

    Returns:
        The layer, and whether its experts lie one by one in the folder and were merged here.

    Raises:
        InputError: if it has none, or of an unknown kind.
    """
    model = target.decoder.model
    text = model.config.get_text_config()
    names = _names(text)
    if names is not None:
        return _from_folder(target, text, names)
    if getattr(text, "num_mtp_layers", None) is None:
        raise InputError(
            f"target {text.model_type} has no MTP layer of its own (no num_nextn_predict_layers in its config); "
            "drafter=mtp trains a new one, drafter=eagle3 one that engines serve"
        )
    if getattr(text, "chain_hidden_post_norm", None) is not None:
        raise InputError(f"the MTP layers of {text.model_type} share a norm of their own kind: not supported yet")
    try:
        return MtpModel.from_pretrained(model).layers[0], False
    except (RuntimeError, OSError, ValueError) as error:
        raise InputError(f"the MTP layer of {target.path} cannot be read: {error}") from error


def native_names(model: Any, state: dict[str, Tensor], experts_apart: bool) -> dict[str, Tensor]:
    """`MtpLayer` state -> tensors as the target's folder has them.

    Args:
        model: the target, as loaded from that folder: it knows how its experts were merged.
        state: of the layer.
        experts_apart: see `native_layer`.
    """
    text = model.config.get_text_config()
    names = _names(text)
    if names is not None:
        back = {new: old for old, new in names.items()}
        found = {
            next(old + name.removeprefix(new) for new, old in back.items() if name.startswith(new)): tensor
            for name, tensor in state.items()
        }
        return _split(found) if experts_apart else found
    place = f"{model.base_model_prefix}.layers.{text.num_hidden_layers}."
    around = {"post_norm.": "shared_head.norm."}
    named = {}
    for name, tensor in state.items():
        ours = next((new + name.removeprefix(old) for old, new in around.items() if name.startswith(old)), name)
        named[place + ours.removeprefix("mtp_block.")] = tensor
    reverted: dict[str, Tensor] = revert_weight_conversion(model, named)
    return reverted


def _names(text: Any) -> dict[str, str] | None:
    return next((names for family, names in FAMILIES.items() if text.model_type.startswith(family)), None)


def _part(path: str, names: dict[str, str]) -> dict[str, Tensor]:
    """The MTP tensors of one file, under `MtpLayer`'s names; the target's own stay on disk."""
    found = {}
    with safe_open(path, framework="pt") as file:
        stored: list[str] = list(file.keys())
        for name in stored:
            begin = next((begin for begin in names if name.startswith(begin)), None)
            if begin is not None:
                found[names[begin] + name.removeprefix(begin)] = file.get_tensor(name)
    return found


def _merged(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one -> all of them side by side, (experts, 2 I, D) and (experts, D, I).

    Raises:
        InputError: if an expert lacks one of its matrices.
    """
    apart = {name: match for name in stored if (match := EXPERT.match(name))}
    found = {name: tensor for name, tensor in stored.items() if name not in apart}
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, match in apart.items():
        parts = experts.setdefault(match["block"], {"gate": {}, "up": {}, "down": {}})
        parts[match["part"]][int(match["number"])] = stored[name]
    for block, parts in experts.items():
        if not parts["gate"].keys() == parts["up"].keys() == parts["down"].keys():
            raise InputError(f"{block}* lacks matrices of some experts: each needs gate_proj, up_proj and down_proj")
        gate, up, down = (torch.stack([part[number] for number in sorted(part)]) for part in parts.values())
        found |= {f"{block}gate_up_proj": torch.cat([gate, up], dim=1), f"{block}down_proj": down}
    return found


def _split(merged: dict[str, Tensor]) -> dict[str, Tensor]:
    """The way back."""
    found = {}
    for name, tensor in merged.items():
        block, _, matrix = name.rpartition(".")
        if not block.endswith(".experts"):
            found[name] = tensor
            continue
        gate_up = matrix == "gate_up_proj"
        parts = zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True) if gate_up else [("down", tensor)]
        for part, of_all in parts:
            found |= {f"{block}.{number}.{part}_proj.weight": own for number, own in enumerate(of_all)}
    return found


def _from_folder(target: TargetParts, text: Any, names: dict[str, str]) -> tuple[Any, bool]:
    one = copy.deepcopy(text)
    one.layer_types, one.num_hidden_layers = ["full_attention"], 1
    one.mtp_hidden_states_first = names is OF_MIMO
    kind = type(target.decoder.layers[-1])
    norm = type(target.decoder.module.norm)
    layer = MtpLayer(one, kind, norm, 0)
    stored: dict[str, Tensor] = {}
    for file in sorted(Path(target.path).glob("*.safetensors")):
        stored |= read_safetensors(file, partial(_part, names=names))
    experts_apart, stored = any(map(EXPERT.match, stored)), _merged(stored)
    wanted = layer.state_dict()
    wrong = sorted(
        name for name in wanted.keys() | stored.keys()
        if name not in wanted or name not in stored or wanted[name].shape != stored[name].shape
    )  # fmt: skip
    if wrong:
        raise InputError(f"the MTP layer of {target.path} does not fit its config: {', '.join(wrong[:5])}")
    layer.load_state_dict(stored)
    return layer, experts_apart
