"""An independent reader of exported EAGLE-3 folders: plain PyTorch, from the files and the format's formulas alone.

It shares no code with the trained drafter, so that agreement between the two says something. Formulas: serving rules of
vLLM's `llama_eagle3`, as stated in the README's format section.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from conf import InputError
from conf.records import read_json, read_safetensors


class ExportedEagle3:
    """A head as an engine would run it, in float32 and without a cache."""

    def __init__(self, folder: Path, embed_tokens: Tensor) -> None:
        """Read `folder`; the embedding (V, D) is the target's, as engines share it.

        Raises:
            InputError: if a file is missing or damaged, or the head's rotary positions are scaled.
        """
        self.config: dict[str, Any] = read_json(folder / "config.json")
        if self.config["rope_scaling"] is not None:
            raise InputError(
                f"{folder}: this reader knows plain rotary positions only, not {self.config['rope_scaling']}"
            )
        stored: dict[str, Tensor] = read_safetensors(folder / "model.safetensors", load_file)
        self.weights = {name: tensor.float() for name, tensor in stored.items() if tensor.is_floating_point()}
        self.embed_tokens = embed_tokens.float()
        draft_ids = torch.arange(self.config["draft_vocab_size"])
        self.target_ids = draft_ids + stored["d2t"] if "d2t" in stored else draft_ids

    def draft_logits(self, aux_hidden_states: Tensor, next_ids: Tensor, num_draft_tokens: int) -> Tensor:
        """Greedy drafts after N rows of true features.

        Args:
            aux_hidden_states: (N, nA * D).
            next_ids: (N,) the token after each row.
            num_draft_tokens: K.

        Returns:
            (K, Vd) logits of each drafted token, every token but the first conditioned on the argmax before it.
        """
        hidden = self._fuse(aux_hidden_states.float())
        ids = next_ids
        logits = []
        for _ in range(num_draft_tokens):
            stream = self._layer(self.embed_tokens[ids], hidden)
            normed = self._rms(stream[-1:], "norm.weight")
            logits.append(normed @ self.weights["lm_head.weight"].T)
            drafted = self.target_ids[logits[-1].argmax(dim=-1)]
            hidden = torch.cat([hidden, normed if self.config["norm_output"] else stream[-1:]])
            ids = torch.cat([ids, drafted])
        return torch.cat(logits)

    def _fuse(self, states: Tensor) -> Tensor:
        if self.config["fc_norm"]:
            chunks = states.chunk(self.config["num_aux_hidden_states"], dim=-1)
            states = torch.cat([self._rms(chunk, f"fc_norm.{j}.weight") for j, chunk in enumerate(chunks)], dim=-1)
        return states @ self.weights["fc.weight"].T

    def _layer(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        w, dim = self.weights, self.config["head_dim"]
        feature = self._rms(hidden, "midlayer.hidden_norm.weight")
        both = torch.cat([self._rms(embeds, "midlayer.input_layernorm.weight"), feature], dim=-1)
        query, key, value = (
            (both @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(both), -1, dim).transpose(0, 1)
            for name in "qkv"
        )
        query, key = self._rope(query), self._rope(key)
        groups = query.shape[0] // key.shape[0]
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        scores = query @ key.transpose(1, 2) / dim**0.5
        scores = scores + torch.full(scores.shape[1:], float("-inf")).triu(1)
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        residual = feature if self.config["norm_before_residual"] else hidden
        stream: Tensor = residual + mixed @ w["midlayer.self_attn.o_proj.weight"].T
        normed = self._rms(stream, "midlayer.post_attention_layernorm.weight")
        gate: Tensor = torch.nn.functional.silu(normed @ w["midlayer.mlp.gate_proj.weight"].T)
        inner = gate * (normed @ w["midlayer.mlp.up_proj.weight"].T)
        output: Tensor = stream + inner @ w["midlayer.mlp.down_proj.weight"].T
        return output

    def _rms(self, states: Tensor, weight: str) -> Tensor:
        eps = float(self.config["rms_norm_eps"])
        scaled: Tensor = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * self.weights[weight]
        return scaled

    def _rope(self, states: Tensor) -> Tensor:
        """Rotate (heads, N, dim) by position."""
        half = states.shape[-1] // 2
        frequencies: Tensor = float(self.config["rope_theta"]) ** (-torch.arange(half) / half)
        angles = torch.arange(states.shape[1])[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        left, right = states[..., :half], states[..., half:]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
