"""A small language model of the target's own tokenizer as drafter (arXiv:2211.17192), distilled towards the target.

    row j:   q(x_{j+1} | x_0..x_j) by the draft model;  taught by p_j where the target generated x_j and x_{j+1}

Any causal LM of transformers serves, or the first layers of the target itself; all of it is trained, or low-rank
adapters (peft) on its matrices. Untrained it is an off-the-shelf pair: `+drafter=draft_model` of `python -m eval`.
Shape letters as in `train.drafters.base`.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from pydantic import Field
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from conf import config
from data import attention
from data.batch import Batch, TargetFeatures, Wants, last_rows
from data.cache import TargetCache
from data.decoder import Decoder, TargetParts
from train.drafters.base import DraftState, Servable
from train.drafters.distilled import DistilledConfig
from train.drafters.flops import decoder_flops
from train.drafters.reader import Reader, require_forgetting
from train.drafters.serial import Ancestry


@config
class DraftModelConfig(DistilledConfig):
    """Values: conf/drafter/draft_model.yaml."""

    path: str | None
    """Folder or hub id of the draft model; None takes the target."""
    revision: str | None
    """Commit or tag on the hub; None is the newest."""
    num_layers: int | None = Field(ge=1)
    """Keep the first layers only; None keeps all."""
    lora_rank: int | None = Field(ge=1)
    """Train low-rank adapters instead of the weights."""
    lora_alpha: float = Field(gt=0)
    """Adapters are scaled by lora_alpha / lora_rank."""
    trust_remote_code: bool
    """Run Python code out of the draft model's repository. Leave off unless you have read it."""
    init_seed: int
    """Of the adapters."""

    def build(self, target: TargetParts, draft_to_target_ids: Tensor) -> "DraftModel":
        """Load the draft model; see DrafterConfig.build.

        Raises:
            ValueError: if it cannot be loaded, is not smaller than it says, or its tokenizer is another one.
        """
        return DraftModel(self, target, draft_to_target_ids)


@dataclass
class DraftModelState(DraftState):
    """Decoding state of B sequences."""

    cache: TargetCache
    """What the reader has read; its committed rows are the text's."""
    ends: Tensor | None = None
    """(B, D'): what the LM head reads after the last committed token."""
    ancestry: Ancestry | None = None
    """Of the drafted tokens that the proposal has read."""

    def keep(self, sequences: Tensor) -> None:
        """See DraftState.keep."""
        self.cache.keep(sequences)
        self.ends = None if self.ends is None else self.ends[sequences]


class DraftModel(Reader):
    """The model, with float32 weights while it is trained."""

    settings: DraftModelConfig
    drafts_untrained = True

    def __init__(self, settings: DraftModelConfig, target: TargetParts, draft_to_target_ids: Tensor) -> None:
        super().__init__(settings, target, draft_to_target_ids)
        self.wants = Wants(aux_layers=(), last_hidden_state=True)
        model = _load(settings, target)
        if len(model.get_output_embeddings().weight) <= int(draft_to_target_ids.max()):
            raise ValueError(
                f"drafter.path: the draft model has {len(model.get_output_embeddings().weight)} outputs, but the draft "
                f"vocabulary goes up to id {int(draft_to_target_ids.max())}; set drafter.draft_vocab_size"
            )
        if settings.lora_rank is not None:
            adapters = LoraConfig(
                r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
            )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(settings.init_seed)
                model = get_peft_model(model, adapters)
        self.model: Any = model
        self._whole_vocabulary = len(draft_to_target_ids) == len(self._base().get_output_embeddings().weight)
        self._decoder = Decoder(self._base())
        require_forgetting(self._decoder, "draft model")

    def _base(self) -> Any:
        return self.model if self.settings.lora_rank is None else self.model.get_base_model()

    @property
    def draft_head(self) -> Tensor:
        """See Reader.draft_head."""
        weight: Tensor = self._base().get_output_embeddings().weight
        return weight if self._whole_vocabulary else weight[self.draft_to_target_ids]

    def states(self, batch: Batch, features: TargetFeatures, rows: Tensor) -> Tensor:
        """See Reader.states."""
        last = self._decoder.packed(batch, self.wants).last_hidden_state
        assert last is not None  # asked for in `wants`
        return last.flatten(0, 1).index_select(0, rows)

    def reading_flops(self, batch: Batch, rows: int) -> int:
        """See Reader.reading_flops: every row is read, whether it is used or not."""
        return decoder_flops(self._decoder.layers, self._base().config.get_text_config(), batch.position_ids)

    # --- decoding ----------------------------------------------------------------------------------------------------

    def start(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> DraftModelState:
        """Reads the first token of each prompt; see Proposer.start."""
        device = self.draft_to_target_ids.device
        state = DraftModelState(TargetCache(len(prompts), max_tokens, device))
        # `observe` tells the token after each row: the very first one must come from the prompt.
        first = torch.tensor([[prompt[0]] for prompt in prompts], dtype=torch.int64, device=device)
        self._read(state, first, None, 0)
        state.cache.commit(torch.ones_like(state.cache.lengths))
        return state

    def observe(self, state: DraftModelState, features: TargetFeatures, next_ids: Tensor, counts: Tensor) -> None:
        """Read the committed tokens; see Proposer.observe."""
        state.ends = last_rows(self._read(state, next_ids, None, 0), counts)
        state.cache.commit(counts)

    def first_logits(self, state: DraftModelState) -> Tensor:
        """(B, Vd); see SerialDrafter.first_logits."""
        if state.ends is None:
            raise ValueError("propose() needs a committed row to draft from: call observe() first")
        state.ancestry = Ancestry(len(state.ends), state.ends.device)
        return self.logits(state.ends)

    def extend(self, state: DraftModelState, tokens: Tensor, parents: Tensor, depth: int) -> Tensor:
        """(B, W, Vd); see SerialDrafter.extend."""
        assert state.ancestry is not None  # first_logits came before
        written = len(state.ancestry)
        return self.logits(self._read(state, tokens, state.ancestry.add(parents), written))

    def _read(self, state: DraftModelState, tokens: Tensor, visible: Tensor | None, written: int) -> Tensor:
        """(B, M) tokens after the committed ones -> (B, M, D'); the last two as in `data.decoder.Decoder.step`."""
        last, _ = self._decoder.step(tokens, state.cache, self.wants, visible, written)
        assert last is not None  # all layers ran
        return last

    def to_serving(self) -> Servable:
        """An ordinary model, adapters merged; see Drafter.to_serving."""
        model = self.model if self.settings.lora_rank is None else copy.deepcopy(self.model).merge_and_unload()
        return Servable(
            architecture="draft_model",
            tensors={**model.state_dict(), "draft_to_target_ids": self.draft_to_target_ids},
            config={"model": self._base().config.to_dict()},
        )


def _load(settings: DraftModelConfig, target: TargetParts) -> Any:
    path = target.path if settings.path is None else settings.path
    options = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=attention.NAME, **options
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"drafter.path={path}: the draft model cannot be loaded ({error})") from error
    if tokenizer.get_vocab() != dict(target.vocabulary):
        raise ValueError(
            f"drafter.path={path}: the draft model's tokenizer has other tokens than the target's, and tokens of one "
            "cannot be verified as tokens of the other: choose a model with the target's tokenizer"
        )
    if settings.num_layers is not None:
        shape = model.config.get_text_config()
        layers = Decoder(model).layers
        if settings.num_layers > len(layers):
            raise ValueError(f"drafter.num_layers={settings.num_layers}: the draft model has {len(layers)} layers")
        del layers[settings.num_layers :]
        shape.num_hidden_layers = settings.num_layers
        if getattr(shape, "layer_types", None):  # not every architecture of transformers has kinds of layers
            shape.layer_types = shape.layer_types[: settings.num_layers]
    return model
