"""Multi-token prediction for any target: one layer, shared by all depths and unrolled (FastMTP, arXiv:2509.18362; the
module of DeepSeek-V3, arXiv:2412.19437, section 2.2).

    step k, row t:  z = W [RMSNorm_e(emb(x_{t+1+k})); RMSNorm_h(g)]
                    g = the target's state at t after its final norm (k = 0), else the step before's output
    layer:          y = the target's kind of decoder layer, of z
    logits:         the target's LM head(RMSNorm(y));  next step's g = RMSNorm(y)

Embedding and LM head are the target's, frozen. Which row reads what is in `train.drafters.rows`. Shape letters as in
`train.drafters.base`; R = flattened rows B * T.
"""

import torch
from torch import Tensor, nn

from conf import config
from data.batch import Wants
from data.decoder import TargetParts
from train.drafters.base import Servable
from train.drafters.draft_layer import Attend, PlainLayer, compile_layer, silence, start_from_target
from train.drafters.fed_back import FedBackConfig, FedBackDrafter
from train.drafters.flops import linear_flops
from train.drafters.layers import RMSNorm, Rotary, product_dtype


@config
class MtpConfig(FedBackConfig):
    """Values: conf/drafter/mtp.yaml."""

    native: bool
    """Fine-tune the MTP layer that the target brings along (native_mtp.py) instead of making a new one."""
    init_layer: int | None
    """Copy this target layer (negative counts from the end); None starts at random."""
    init_seed: int
    """Of the random parts."""

    def build(self, target: TargetParts, draft_to_target_ids: Tensor) -> FedBackDrafter:
        """Make or read the module; see DrafterConfig.build.

        Raises:
            InputError: if a native one is asked for and the target has none that is known.
        """
        if self.native:
            from train.drafters.native_mtp import NativeMtp  # transformers' MTP classes are slow to import

            return NativeMtp(self, target, draft_to_target_ids)
        return Mtp(self, target, draft_to_target_ids)


class Mtp(FedBackDrafter):
    """The module. Names as in MiMo's checkpoints."""

    settings: MtpConfig
    stack = "hf"

    def __init__(self, settings: MtpConfig, target: TargetParts, draft_to_target_ids: Tensor) -> None:
        super().__init__(settings, target, draft_to_target_ids)
        self.wants = Wants(aux_layers=(), last_hidden_state=True)
        width, eps = self.shape.hidden_size, self.shape.rms_norm_eps
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.init_seed)
            self.token_layernorm = RMSNorm(width, eps)
            self.hidden_layernorm = RMSNorm(width, eps)
            self.input_proj = nn.Linear(2 * width, width, bias=False)
            self.mtp_layer = PlainLayer(self.shape)
            self.final_layernorm = RMSNorm(width, eps)
        self.rotary = Rotary(self.shape)
        with torch.no_grad():
            self.final_layernorm.weight.copy_(target.final_norm)
        if settings.init_layer is not None:
            start_from_target(self.mtp_layer, self.input_proj, target.decoder.layers, settings.init_layer)
            self._start_silent(target)
        if settings.compile:
            compile_layer(self.mtp_layer)

    @torch.no_grad()
    def _start_silent(self, target: TargetParts) -> None:
        """Let the untrained module say what the target says, as Medusa's heads do.

        It reads the state after the target's final norm, x / rms(x) * f: dividing by f gives the layer what the
        target's layers see, and final_layernorm makes f's product of it again. The copied layer writes nothing at
        first: its output is made for a stream that is not normed.
        """
        scale = target.final_norm.float()
        self.hidden_layernorm.weight.copy_(scale.square().mean().sqrt() / scale)
        silence(self.mtp_layer)

    def layer(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, queries: Tensor | None = None
    ) -> Tensor:
        """See FedBackDrafter.layer."""
        token, state = self.token_layernorm(self.embed(ids, hidden)), self.hidden_layernorm(hidden)
        dtype = product_dtype(state)
        joined = self.input_proj(torch.cat([token.to(dtype), state.to(dtype)], dim=-1))
        output: Tensor = self.mtp_layer(joined, self.rotary.table(positions), attend, queries)
        return output

    def fed_back(self, stream: Tensor) -> Tensor:
        """See FedBackDrafter.fed_back."""
        return self.normed(stream)

    def normed(self, stream: Tensor) -> Tensor:
        """See FedBackDrafter.normed."""
        output: Tensor = self.final_layernorm(stream)
        return output

    def layer_flops(self, everywhere: int, key_rows: int, query_rows: int, pairs: int) -> int:
        """See FedBackDrafter.layer_flops. The gradient of the first step's input is not needed, but for one product
        with both halves of it: counted."""
        return linear_flops(self.input_proj, key_rows) + self.mtp_layer.flops(key_rows, query_rows, pairs)

    def to_serving(self) -> Servable:
        """See Drafter.to_serving."""
        return self.served("mtp", {"head_dim": self.mtp_layer.head_dim})
