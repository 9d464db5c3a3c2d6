"""MiMo (arXiv:2505.07608) for transformers, which has no class for it: Qwen2's layers, and MTP layers beside them."""

from typing import ClassVar

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM


class MiMoConfig(Qwen2Config):  # type: ignore[misc]
    """Qwen2's, and `num_nextn_predict_layers`."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):  # type: ignore[misc]
    """The target alone: `train.drafters.native_mtp` reads its MTP layers."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"model\.mtp_layers\."]


def register() -> None:
    """Let the Auto classes load it; does nothing the second time."""
    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)
