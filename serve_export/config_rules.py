"""Rules of `doctor=` about config.json; see tensor_rules.py. Here the tensors have their native names already."""

from collections.abc import Callable, Mapping
from typing import Any

from serve_export.patient import LAYERS, Finding, Patient, Rule
from serve_export.writers.common import rope_keys
from train.drafters.draft_layer import default_aux_layers
from train.drafters.layers import llama_shape

SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TRAPS = ("eagle3", "eagle-", "dflash", "dspark")
"""vLLM takes a path with one of these for that method, whatever the command says."""


def _setting(changes: Mapping[str, Any]) -> Callable[[Patient], None]:
    def mend(patient: Patient) -> None:
        patient.config = {**patient.config, **changes}

    return mend


def speculators_config(patient: Patient) -> Finding | None:
    """The library's nested config, which only vLLM reads."""
    if "speculators_model_type" not in patient.config:
        return None
    inner = patient.config.get("transformer_layer_config") or {}
    kept = {key: value for key, value in patient.config.items()
            if not key.startswith("speculators_") and key != "transformer_layer_config"}  # fmt: skip
    flat = {"norm_before_residual": True} | {**inner, **kept}  # true is the library's default
    flat.pop("embed_requires_grad", None)

    def mend(p: Patient) -> None:
        p.config = flat

    return Finding(
        "format of speculators", "SGLang and TensorRT-LLM do not read it", "SGLang, TensorRT-LLM", False, mend
    )


def architecture(patient: Patient) -> Finding | None:
    """vLLM picks the class by it."""
    normed = any(name.endswith("q_norm.weight") for name in patient.tensors)
    wanted, kind = {
        "eagle3": ("Eagle3Qwen3ForCausalLM", "qwen3") if normed else ("LlamaForCausalLMEagle3", "llama"),
        "eagle1": ("LlamaForCausalLM", "llama"),
        "medusa": ("MedusaModel", "medusa"),
    }[patient.kind]
    found, model_type = patient.config.get("architectures"), patient.config.get("model_type")
    if found == [wanted] and model_type == kind:
        return None
    stated = f"{found} of model_type {model_type}, not [{wanted}] of {kind}"
    return Finding(
        "architecture", f"stated is {stated}", "engines that choose their class by it", False,
        _setting({"architectures": [wanted], "model_type": kind}),
    )  # fmt: skip


def sizes(patient: Patient) -> Finding | None:
    """Sizes that the tensors tell, and the target's vocabulary."""
    config, tensors = patient.config, patient.tensors
    output, gate = (next((t for n, t in tensors.items() if n.endswith(end)), None)
                    for end in ("self_attn.o_proj.weight", "mlp.gate_proj.weight"))  # fmt: skip
    wanted: dict[str, Any] = {}
    if output is not None and gate is not None:
        wanted = {"hidden_size": len(output), "intermediate_size": len(gate), "num_hidden_layers": 1}
        heads = config.get("num_attention_heads")
        if heads:
            wanted["head_dim"] = output.shape[1] // heads
            key = next(t for n, t in tensors.items() if n.endswith("self_attn.k_proj.weight"))
            wanted["num_key_value_heads"] = len(key) // wanted["head_dim"]
    if patient.kind == "eagle3":
        wanted |= {"draft_vocab_size": patient.draft_vocab_size()}
    if patient.vocab_size():
        wanted |= {"vocab_size": patient.vocab_size()}
    wrong = {key: value for key, value in wanted.items() if config.get(key) != value}
    if not wrong:
        return None
    stated = ", ".join(f"{key} is {config.get(key, 'missing')}, not {value}" for key, value in wrong.items())
    return Finding("sizes", stated, "all", True, _setting(wrong))


def layer_ids(patient: Patient) -> Finding | None:
    """Both lists have to be there, the nested one counting from one less."""
    entering, leaving = patient.config.get(LAYERS), patient.nested().get(LAYERS)
    width = patient.config.get("target_hidden_size") or patient.config.get("hidden_size")
    count = patient.tensors["fc.weight"].shape[1] // width if "fc.weight" in patient.tensors and width else None
    if entering is not None and leaving is not None and list(entering) != [layer + 1 for layer in leaving]:
        return Finding(
            "layer ids contradict each other", f"{entering} at the top, {leaving} in eagle_config, which counts from "
            "one less: which was it trained on?", "all", True,
        )  # fmt: skip
    layers = list(entering) if entering is not None else None if leaving is None else [layer + 1 for layer in leaving]
    if layers is None and patient.target is not None and count == 3:
        layers = list(default_aux_layers(patient.target.num_hidden_layers))
    if layers is None:
        return Finding("no layer ids", "engines take their default, and the target was not named", "all", True)
    if count is not None and count != len(layers):
        return Finding("layer ids do not fit fc", f"{layers}, but fc reads {count} states", "all", True)
    nested = {"use_aux_hidden_state": True, **patient.nested(), LAYERS: [layer - 1 for layer in layers]}
    wanted = {LAYERS: layers, "num_aux_hidden_states": len(layers), "eagle_config": nested}
    missing = [key for key, value in wanted.items() if patient.config.get(key) != value]
    if not missing:
        return None
    who = {
        LAYERS: "vLLM reads one layer too shallow for each, or its default", "eagle_config": "SGLang takes its default",
        "num_aux_hidden_states": "vLLM builds fc for three states",
    }  # fmt: skip
    message = "; ".join(f"{key} is missing or wrong: {who[key]}" for key in missing)
    return Finding("layer ids", message, "vLLM, SGLang", True, _setting(wanted))


def rotary(patient: Patient) -> Finding | None:
    """`rope_theta`, `rope_scaling` and `rope_parameters` must all be there, and be the target's."""
    config = patient.config
    own = config.get("rope_parameters")
    if patient.target is not None:
        wanted = rope_keys(dict(llama_shape(patient.target).rope_parameters))
    elif own is not None and "rope_theta" in own:
        wanted = rope_keys({"rope_type": "default", **own})
    elif "rope_theta" in config:
        scaling = config.get("rope_scaling") or {"rope_type": "default"}
        wanted = rope_keys({**scaling, "rope_theta": config["rope_theta"]})
    else:
        return Finding("no rotary base", "engines take 10000; name the target to mend it", "all", True)
    wrong = [key for key, value in wanted.items() if key not in config or config[key] != value]
    if not wrong:
        return None
    stated = ", ".join(f"{key} is {config.get(key, 'missing')}" for key in wrong)
    return Finding(
        "rotary positions", f"{stated}, expected {wanted['rope_parameters']}: engines that read what is missing take "
        "10000, or leave out the scaling", "all", True, _setting(wanted),
    )  # fmt: skip


def unstated(patient: Patient) -> Finding | None:
    """Switches whose defaults differ between engines."""
    wanted: dict[str, Any] = {
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "bias": False,
    }  # fmt: skip
    if patient.kind == "eagle3":
        nested = patient.nested()
        defaults = {
            "norm_before_residual": False, "norm_before_fc": nested.get("norm_before_fc", False),
            "fc_norm": patient.config.get("use_aux_norm", False),
            "norm_output": nested.get("return_hidden_post_norm", False),
        }  # fmt: skip
        wanted |= {key: patient.config.get(key, defaults[key]) for key in SWITCHES}
        wanted["target_hidden_size"] = patient.config.get("target_hidden_size") or patient.config.get("hidden_size")
    if patient.target is not None:
        shape = llama_shape(patient.target)
        keys = ("hidden_act", "rms_norm_eps", "max_position_embeddings")
        wanted |= {key: patient.config.get(key, getattr(shape, key)) for key in keys}
    wanted |= {"dtype": patient.dtype(), "torch_dtype": patient.dtype()}
    missing = sorted(key for key, value in wanted.items() if patient.config.get(key) != value)
    if not missing:
        return None
    return Finding("unstated", f"{', '.join(missing)}: engines have other defaults", "some", False, _setting(wanted))


def norm_before_fc(patient: Patient) -> Finding | None:
    """EAGLE-3.1's other norm: engines serve it, ours does not know it."""
    if not (patient.config.get("norm_before_fc") or "input_norm.weight" in patient.tensors):
        return None
    return Finding("norm_before_fc", "served by engines, not known to this contract: left as it is", "none", True)


def medusa_config(patient: Patient) -> Finding | None:
    """vLLM drops biases silently, and takes any key with "num" and "heads" for the number of heads."""
    heads = {int(name.split(".")[1]) for name in patient.tensors if name.startswith("blocks.")}
    layers = {int(name.split(".")[3]) for name in patient.tensors if name.startswith("blocks.")}
    has_bias = any(name.startswith("blocks.") and name.endswith(".bias") for name in patient.tensors)
    lm_heads = sum(name.startswith("lm_heads.") for name in patient.tensors)
    wanted = {
        "num_heads": len(heads),
        "num_hidden_layers": len(layers),
        "medusa_fc_bias": has_bias,
        "original_lm_head": lm_heads == 1 < len(heads),
        "torch_dtype": patient.dtype(),
        "dtype": patient.dtype(),
        "hidden_size": patient.tensors["blocks.0.layers.0.weight"].shape[0],
        "vocab_size": patient.vocab_size(),
    }
    wrong = sorted(key for key, value in wanted.items() if patient.config.get(key) != value)
    extra = [key for key in patient.config
             if ("num" in key and ("heads" in key or "layers" in key) and key not in wanted)
             or key in ("truncated_vocab_size", "base_model_name_or_path")]  # fmt: skip
    if not wrong and not extra:
        return None

    def mend(p: Patient) -> None:
        p.config = {key: value for key, value in p.config.items() if key not in extra} | wanted

    said = [f"{key} is {patient.config.get(key, 'missing')}, not {wanted[key]}" for key in wrong]
    said += [f"{key} is taken for something else" for key in extra]
    return Finding("Medusa's settings", "; ".join(said), "vLLM", True, mend)


def path_trap(patient: Patient) -> Finding | None:
    """vLLM guesses the method from the path."""
    trap = next((part for part in TRAPS if part in str(patient.folder).lower()), None)
    if trap is None:
        return None
    message = f"vLLM takes it for another method because of the {trap!r} in it: move it"
    return Finding("path", message, "vLLM", True, lambda _: None)  # the mended copy lies elsewhere


EAGLE3: tuple[Rule, ...] = (
    speculators_config, norm_before_fc, architecture, sizes, layer_ids, rotary, unstated
)  # fmt: skip
EAGLE1: tuple[Rule, ...] = (architecture, sizes, rotary, unstated)
MEDUSA: tuple[Rule, ...] = (path_trap, architecture, medusa_config)
