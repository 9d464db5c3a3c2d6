"""Tiny targets and drafters, made here and now: nothing is downloaded."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before any import of transformers: it reads this once
os.environ["WANDB_MODE"] = "offline"

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
BYTE_VOCABULARY = 256 + len(SPECIAL)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 0..255), then the chat markers; <|im_end|> ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", extra_special_tokens=SPECIAL, chat_template=CHAT_TEMPLATE
    )


RUNNING_STATE = ("qwen3_5_text", "qwen3_next")
MIXTURES = ("qwen3_moe", "qwen3_next")


def save_tiny_model(folder: Path, family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """A random causal LM of `family` with the byte tokenizer, saved as a Hugging Face folder (float32)."""
    shape: dict[str, Any] = {
        "vocab_size": BYTE_VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "eos_token_id": 257, "bos_token_id": None, "pad_token_id": None,
        "initializer_range": 0.2,
    }  # fmt: skip
    if family == "qwen3_moe":
        shape |= {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    if family == "gemma3_text":  # every other layer sees a window that these tests' texts exceed
        kinds = ["sliding_attention", "full_attention"] * 4
        shape |= {"sliding_window": 9, "layer_types": kinds[: overrides.get("num_hidden_layers", 8)]}
    if family in RUNNING_STATE:  # three of four layers have a running state, the last one keys and values
        shape |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                  "linear_value_head_dim": 8}  # fmt: skip
    if family == "qwen3_next":
        shape |= {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
                  "shared_expert_intermediate_size": 24}  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**(shape | overrides)), dtype=torch.float32)
    model.generation_config.eos_token_id = shape["eos_token_id"]
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_folder(family, seed, **config overrides) -> folder of a tiny random model, made once per arguments."""
    made: dict[str, Path] = {}

    def make(family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
        key = f"{family} {seed} {sorted(overrides.items())}"
        if key not in made:
            made[key] = save_tiny_model(tmp_path_factory.mktemp(family) / "model", family, seed, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_target(tiny_folder: Callable[..., Path]) -> Callable[..., Any]:
    """tiny_target(family, dtype, seed, **config overrides) -> a loaded `data.target.Target`."""
    from data.target import Target, TargetConfig

    def make(family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Target:
        folder = tiny_folder(family, seed, **overrides)
        settings = TargetConfig(
            name=f"tiny-{family}", path=str(folder), revision=None, dtype="float32", chat_template_kwargs={},
            trust_remote_code=False, compile=False,
        )  # fmt: skip
        if not (family in MIXTURES and dtype == torch.float64):
            return Target(settings, dtype)
        target = Target(settings, torch.float32)
        target.model.set_experts_implementation("eager")  # the grouped kernels know no float64
        target.model.to(dtype)
        return target

    return make


@pytest.fixture(scope="session")
def tiny_drafter() -> Callable[..., Any]:
    """tiny_drafter(target, draft_vocab_size, seed, **Eagle3Config overrides) -> `tests.families.tiny_family` of eagle3,
    on all rows and with an LM head that is trained."""
    from tests.families import tiny_family

    def make(target: Any, draft_vocab_size: int | None = None, seed: int = 0, **overrides: Any) -> Any:
        chosen = {"step_loss_decay": 0.8, "row_keep_ratio": 1.0, "train_lm_head": True, "init_layer": None, **overrides}
        return tiny_family("eagle3", target, draft_vocab_size, seed=seed, **chosen)

    return make
