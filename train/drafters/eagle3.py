"""EAGLE-3 (arXiv:2503.01840) and 3.1: one decoder layer over fused target features, trained by training-time test.

    f_t = fc([a_t^low; a_t^mid; a_t^high])                      fc_norm (3.1): RMSNorm each of the three first
    step k, row t:  e = RMSNorm_in(emb(x_{t+1+k})),  r = RMSNorm_hid(g),  g = f_t (k = 0), else the step before's output
    layer:          y = g + Attention([e; r]),  y = y + MLP(RMSNorm_post(y))   norm_before_residual: r for g
    logits:         lm_head(RMSNorm(y));  next step's g = y            norm_output (3.1): RMSNorm(y)

Which row reads what is in `train.drafters.rows`. Shape letters as in `train.drafters.base`; R = flattened rows B * T.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from pydantic import Field
from torch import Tensor, nn

from conf import config
from data.batch import Batch, TargetFeatures, TargetParts, Wants
from data.blocked_attention import Spans
from train.drafters.base import DrafterConfig, DraftLoss, Servable
from train.drafters.distillation import Teacher, chunked_distillation
from train.drafters.eagle_layer import Attend, EagleLayer, copy_target_layer, default_aux_layers
from train.drafters.fed_back import FedBackDrafter
from train.drafters.flops import linear_flops
from train.drafters.layers import RMSNorm, Rotary, llama_shape, product_dtype
from train.drafters.losses import LossKind, LossSettings
from train.drafters.rows import chain_labels, shifted_ids
from train.drafters.ttt_attention import ttt_attention


@config
class Eagle3Config(DrafterConfig):
    """Values: conf/drafter/eagle3.yaml."""

    aux_layers: tuple[int, ...] | None
    """Indices into the target's `hidden_states` (i = the state entering layer i), ascending, each in 1..n-1;
    None means (2, n // 2, n - 3) for n layers."""
    ttt_steps: int = Field(ge=1)
    """Training-time-test steps S; 7 in the EAGLE-3 code."""
    step_loss_decay: float = Field(gt=0, le=1)
    """Weight of step k is step_loss_decay ** k."""
    row_keep_ratio: float = Field(gt=0, le=1)
    """Share of a step's rows that the next step goes on from, drawn anew in every epoch and weighted up by as much:
    later steps then cost less and the loss stays unbiased. 1 keeps all."""
    loss: LossKind
    """soft_ce, kl, reverse_kl, jsd, tv, lk_alpha or lk_lambda: see train/drafters/losses.py."""
    lk_scale: float = Field(ge=0)
    """lk_lambda: weight of KL is lk_scale * exp(-lk_decay * alpha)."""
    lk_decay: float = Field(ge=0)
    mask_out_of_vocab: bool
    """Leave out labels whose argmax is outside the draft vocabulary."""
    fc_norm: bool
    """EAGLE-3.1: normalise each auxiliary state before fc."""
    norm_output: bool
    """EAGLE-3.1: feed the normalised output to the next step."""
    norm_before_residual: bool
    """Start the residual stream from the normalised feature. vLLM and llama.cpp only: not portable."""
    train_lm_head: bool
    """Train the LM head (it starts as the target's rows); False keeps these frozen."""
    init_layer: int | None
    """Copy attention and feed-forward of this target layer (negative counts from the end); None starts at random."""
    init_seed: int
    """Of the random parts."""
    compile: bool
    """Let torch.compile fuse the layer and the loss: for GPUs, and CPUs with a C++ compiler; the first steps wait."""

    def build(self, target: TargetParts, draft_to_target_ids: Tensor) -> "Eagle3":
        """Make the untrained head; see DrafterConfig.build.

        Raises:
            ValueError: if a layer index is outside the target.
        """
        return Eagle3(self, target, draft_to_target_ids)


class Eagle3(FedBackDrafter):
    """The head. `fc`, `midlayer`, `norm`, `lm_head` are trained; the embedding is the target's own."""

    embed_tokens: Tensor
    """(V, D) buffer, the target's own."""
    target_head: Tensor
    """(V, D) buffer, the target's LM head."""
    teacher_rows: Tensor
    """(Vd, D) buffer, its rows that the drafter can propose."""

    def __init__(self, settings: Eagle3Config, target: TargetParts, draft_to_target_ids: Tensor) -> None:
        super().__init__()
        self.settings = settings
        shape = llama_shape(target.config)
        layers = settings.aux_layers
        if layers is None:
            layers = default_aux_layers(shape.num_hidden_layers)
        if (
            not layers
            or list(layers) != sorted(set(layers))
            or not all(1 <= i < shape.num_hidden_layers for i in layers)
        ):
            raise ValueError(
                f"drafter.aux_layers {list(layers)}: expected ascending layers between 1 and "
                f"{shape.num_hidden_layers - 1} (engines cannot capture others)"
            )
        self.wants = Wants(aux_layers=layers, last_hidden_state=True)
        self.shape = shape
        self.target_vocab_size = shape.vocab_size
        width = shape.hidden_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.init_seed)
            self.fc_norm = nn.ModuleList(
                RMSNorm(width, shape.rms_norm_eps) for _ in range(len(layers) if settings.fc_norm else 0)
            )
            self.fc = nn.Linear(len(layers) * width, width, bias=False)
            self.midlayer = EagleLayer(shape, settings.norm_before_residual)
            self.norm = RMSNorm(width, shape.rms_norm_eps)
            self.lm_head = nn.Linear(width, len(draft_to_target_ids), bias=False)
        self.rotary = Rotary(shape)
        self.register_buffer("draft_to_target_ids", draft_to_target_ids.clone())
        self.register_buffer("embed_tokens", target.embed_tokens.detach(), persistent=False)
        self.register_buffer("target_head", target.lm_head.detach(), persistent=False)
        self.register_buffer("teacher_rows", target.lm_head.detach()[draft_to_target_ids], persistent=False)
        self._initialise(target)
        if settings.compile:
            self.midlayer.forward = torch.compile(  # type: ignore[method-assign]
                self.midlayer.forward, dynamic=True
            )

    @torch.no_grad()
    def _initialise(self, target: TargetParts) -> None:
        self.lm_head.weight.copy_(self.teacher_rows)
        self.lm_head.requires_grad_(self.settings.train_lm_head)
        self.norm.weight.copy_(target.final_norm)
        if self.settings.init_layer is not None:
            if not -len(target.layers) <= self.settings.init_layer < len(target.layers):
                raise ValueError(
                    f"drafter.init_layer={self.settings.init_layer}: the target has {len(target.layers)} layers"
                )
            copy_target_layer(self.midlayer, self.fc, target.layers[self.settings.init_layer])

    # --- training ----------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, features: TargetFeatures) -> DraftLoss:
        """Distillation loss over all training-time-test steps; see Drafter.loss."""
        assert features.last_hidden_state is not None  # asked for in `wants`
        steps = self.settings.ttt_steps
        labels = chain_labels(batch, steps, self.settings.row_keep_ratio)
        rows = [labels.rows(step) for step in range(steps)]
        hidden = [self.norm(stream) for stream in self._unroll(batch, features, rows)]
        teacher = Teacher(
            hidden=features.last_hidden_state.flatten(0, 1),
            lm_head=self.target_head,
            draft_head=self.teacher_rows,
            draft_to_target_ids=self.draft_to_target_ids,
        )
        total, losses, matches = chunked_distillation(
            [rows.to(product_dtype(rows)) for rows in hidden],
            self.lm_head.weight,
            teacher,
            labels,
            batch.token_weights.flatten(),
            self._loss_settings(),
        )
        return DraftLoss(loss=total, step_losses=losses, step_matches=matches)

    def _loss_settings(self) -> LossSettings:
        chosen = self.settings
        return LossSettings(
            kind=chosen.loss,
            lk_scale=chosen.lk_scale,
            lk_decay=chosen.lk_decay,
            mask_out_of_vocab=chosen.mask_out_of_vocab,
            step_weights=tuple(chosen.step_loss_decay**k for k in range(chosen.ttt_steps)),
            keep_ratio=chosen.row_keep_ratio,
            compiled=chosen.compile,
        )

    def flops(self, batch: Batch) -> int:
        """See Drafter.flops. The teacher's part is one product, forward only, for all steps."""
        labels = chain_labels(batch, self.settings.ttt_steps, self.settings.row_keep_ratio)
        rows = [labels.rows(step) for step in range(self.settings.ttt_steps)]
        depth = batch.position_ids.flatten() + 1  # keys of step 0 that each row sees
        everywhere, outputs = depth.numel(), sum(map(len, rows))
        teacher_head = self.target_head if self._loss_settings().needs_whole_vocabulary else self.teacher_rows
        return (
            linear_flops(self.fc, everywhere, input_gradient=False)
            + self.midlayer.flops(everywhere + outputs - len(rows[0]), outputs, int(sum(depth[r].sum() for r in rows)))
            + linear_flops(self.lm_head, outputs)
            + 2 * len(labels.label) * teacher_head.numel()
        )

    @torch.no_grad()
    def greedy_drafts(self, batch: Batch, features: TargetFeatures, num_draft_tokens: int) -> Tensor:
        """Greedy drafts at every row; see Drafter.greedy_drafts."""
        everywhere = torch.arange(batch.input_ids.numel(), device=batch.input_ids.device)
        drafts = [
            self.draft_to_target_ids[self.lm_head(self.norm(stream)).argmax(dim=-1)]
            for stream in self._unroll(batch, features, [everywhere] * num_draft_tokens)
        ]
        return torch.stack(drafts, dim=-1).view(*batch.input_ids.shape, num_draft_tokens)  # (B, T, K)

    def _unroll(self, batch: Batch, features: TargetFeatures, rows: Sequence[Tensor]) -> list[Tensor]:
        """Output streams of training-time test, on the text's own tokens.

        Args:
            batch: the text.
            features: of all its rows.
            rows: for each step the flattened rows (N_k,) that it is wanted for, among those of the step before.

        Returns:
            For each step (N_k, D).
        """
        positions = batch.position_ids.flatten()
        attend = _TTTAttend(batch.document_spans(), rows[0])
        hidden = self.midlayer(
            self._embed(shifted_ids(batch, 1)), self._fuse(features), self.rotary.table(positions), attend, rows[0]
        )
        streams = [hidden]
        for step, (before, chosen) in enumerate(pairwise(rows), start=1):
            kept = torch.searchsorted(before, chosen)
            attend.narrow(chosen, kept)
            embeds = self._embed(shifted_ids(batch, 1 + step)[chosen])
            fed_back = self._fed_back(hidden.index_select(0, kept))
            hidden = self.midlayer(embeds, fed_back, self.rotary.table(positions[chosen] + step), attend)
            streams.append(hidden)
        return streams

    # --- shared with decoding ----------------------------------------------------------------------------------------

    def _layer(self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """(R,) ids and (R, D) features -> (R, D) output stream."""
        output: Tensor = self.midlayer(self._embed(ids), hidden, self.rotary.table(positions), attend)
        return output

    def _logits(self, stream: Tensor) -> Tensor:
        """(..., D) output stream -> (..., Vd)."""
        logits: Tensor = self.lm_head(self.norm(stream))
        return logits

    def _fuse(self, features: TargetFeatures) -> Tensor:
        """(B, T, A * D) auxiliary states -> (R, D) features."""
        states = features.aux_hidden_states.flatten(0, 1).to(self.fc.weight.dtype)
        if self.fc_norm:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(states)
        return fused

    def _embed(self, ids: Tensor) -> Tensor:
        """(R,) ids -> (R, D) embeddings of the target, in the drafter's dtype."""
        return nn.functional.embedding(ids, self.embed_tokens).to(self.fc.weight.dtype)

    def _fed_back(self, stream: Tensor) -> Tensor:
        """What the next step reads of this step's output."""
        normed: Tensor = self.norm(stream) if self.settings.norm_output else stream
        return normed

    def to_serving(self) -> Servable:
        """Tensors and facts of serving.md's EAGLE-3 contract; see Drafter.to_serving."""
        names = dict(self.named_parameters())
        return Servable(
            architecture="eagle3",
            tensors={**names, "draft_to_target_ids": self.draft_to_target_ids},
            config={
                "aux_layers": list(self.wants.aux_layers),
                "fc_norm": self.settings.fc_norm,
                "norm_output": self.settings.norm_output,
                "norm_before_residual": self.settings.norm_before_residual,
                "head_dim": self.midlayer.head_dim,
            },
        )


class _TTTAttend:
    """Attention of an unrolled chain: step 0 leaves its keys and values for all later steps, which add their own."""

    def __init__(self, spans: Spans, rows: Tensor) -> None:
        self.spans, self.rows = spans, rows
        self.shared: tuple[Tensor, Tensor] | None = None
        self.own_keys: list[Tensor] = []
        self.own_values: list[Tensor] = []

    def narrow(self, rows: Tensor, kept: Tensor) -> None:
        """Go on with `rows`, the entries `kept` of those so far."""
        self.rows = rows
        self.own_keys = [keys.index_select(1, kept) for keys in self.own_keys]
        self.own_values = [values.index_select(1, kept) for values in self.own_values]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # blocks follow the documents: nothing to trace
    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.shared is None:
            self.shared = keys, values
        else:
            self.own_keys.append(keys)
            self.own_values.append(values)
        return ttt_attention(query, *self.shared, self.own_keys, self.own_values, self.rows, self.spans)
