"""Which engine serves which drafter, from which format, by which command; and why the others do not.

One table: a new drafter adds one line per engine that can serve it. Sources: the engines' own loaders (vLLM 0.32,
SGLang 0.5.23, TensorRT-LLM 1.3, llama.cpp 0c1e570, TGI 3); vLLM was run.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from conf import InputError
from serve_export.source import Source


@dataclass(frozen=True)
class Place:
    """Where things are when the engine starts."""

    target: str
    folder: str
    num_draft_tokens: int


@dataclass(frozen=True)
class Offer:
    """How one engine serves one kind of drafter."""

    format: str
    command: Callable[[Place], str]
    limits: tuple[Callable[[Source], str | None], ...] = ()
    """Each: why this very drafter cannot be served, or None."""
    options: Callable[[Source, Place], str] | None = None
    """The text of `trtllm.yaml`, which `trtllm-serve` reads beside the head."""


def _serve(model: str, speculative: dict[str, object]) -> str:
    return shlex.join(["vllm", "serve", model, "--speculative-config", json.dumps(speculative)])


def _vllm(method: str) -> Callable[[Place], str]:
    def command(place: Place) -> str:
        drafts = {"num_speculative_tokens": place.num_draft_tokens}
        return _serve(place.target, {"method": method, "model": place.folder, **drafts})

    return command


def _vllm_alone(place: Place) -> str:
    return shlex.join(["vllm", "serve", place.folder])


def _vllm_mtp(place: Place) -> str:
    return _serve(place.folder, {"method": "mtp", "num_speculative_tokens": place.num_draft_tokens})


def _vllm_medusa2(place: Place) -> str:
    drafts = {"num_speculative_tokens": place.num_draft_tokens}
    return _serve(place.folder, {"method": "medusa", "model": f"{place.folder}/heads", **drafts})


def _sglang(algorithm: str) -> Callable[[Place], str]:
    def command(place: Place) -> str:
        return shlex.join(
            [
                "python", "-m", "sglang.launch_server", "--model-path", place.target,
                "--speculative-algorithm", algorithm, "--speculative-draft-model-path", place.folder,
                "--speculative-num-steps", str(place.num_draft_tokens), "--speculative-eagle-topk", "1",
                "--speculative-num-draft-tokens", str(place.num_draft_tokens + 1),
            ]
        )  # fmt: skip

    return command


def _trtllm(place: Place) -> str:
    return shlex.join(["trtllm-serve", place.target, "--extra_llm_api_options", f"{place.folder}/trtllm.yaml"])


def _trtllm_eagle3(source: Source, place: Place) -> str:
    """Layer ids are an option there, not a fact of the checkpoint: the layers whose output is meant."""
    layers = [layer - 1 for layer in source.servable.config["aux_layers"]]
    return _trtllm_options("Eagle3", place) + f"  eagle3_layers_to_capture: {layers}\n"


def _trtllm_draft_model(source: Source, place: Place) -> str:
    return _trtllm_options("Draft_Target", place)


def _trtllm_options(kind: str, place: Place) -> str:
    return (
        f"speculative_config:\n  decoding_type: {kind}\n  max_draft_len: {place.num_draft_tokens}\n"
        f"  speculative_model: {json.dumps(place.folder)}\n"
    )


def _trtllm_medusa(place: Place) -> str:
    return shlex.join(
        [
            "python", "examples/medusa/convert_checkpoint.py", "--model_dir", place.target, "--medusa_model_dir",
            place.folder, "--num_medusa_heads", str(place.num_draft_tokens),
        ]
    )  # fmt: skip


def _tgi(place: Place) -> str:
    return shlex.join(
        ["text-generation-launcher", "--model-id", place.folder, "--speculate", str(place.num_draft_tokens)]
    )


def _llama_cpp(place: Place) -> str:
    drafts = ["--spec-type", "draft-eagle3", "--spec-draft-n-max", str(place.num_draft_tokens)]
    return shlex.join(["llama-server", "-m", "TARGET.gguf", "-md", f"{place.folder}/model.gguf", *drafts])


def _transformers(place: Place) -> str:
    return f'model.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained("{place.folder}"))'


def _ours(place: Place) -> str:
    return shlex.join(["python", "-m", "eval", f"checkpoint={place.folder}"])


def _whole_vocabulary(source: Source) -> str | None:
    if len(source.draft_ids) == source.shape.vocab_size:
        return None
    return "it drafts from a part of the vocabulary, this form from all of it: train with drafter.draft_vocab_size=null"


def _unchanged_target(source: Source) -> str | None:
    changed = bool(source.servable.target_tensors)
    return "training has changed its target, which has to be served with it: stack=target" if changed else None


def _plain_residual(source: Source) -> str | None:
    ignored = source.servable.config["norm_before_residual"]
    return "drafter.norm_before_residual=true is ignored there" if ignored else None


def _llama_layer(source: Source) -> str | None:
    normed = source.servable.config["qk_norm"]
    return "its layer has norms on queries and keys (drafter.qk_norm=true)" if normed else None


def _several_states(source: Source) -> str | None:
    return "with one auxiliary layer it skips fc" if len(source.servable.config["aux_layers"]) == 1 else None


def _three_states(source: Source) -> str | None:
    layers = source.servable.config["aux_layers"]
    return f"it reads exactly three auxiliary layers, the head {len(layers)}" if len(layers) != 3 else None


def _no_31(source: Source) -> str | None:
    facts = source.servable.config
    return "it knows neither fc_norm nor norm_output" if facts["fc_norm"] or facts["norm_output"] else None


def _one_shared_block(source: Source) -> str | None:
    facts = source.servable.config
    deep = facts["num_layers"] > 1 and not facts["own_lm_heads"]
    return "heads that share the target's LM head may have one block only" if deep else None


PORTABLE = (_plain_residual, _llama_layer)
OFFERS: dict[tuple[str, str], Offer] = {
    ("vllm", "eagle3"): Offer("eagle3", _vllm("eagle3")),
    ("sglang", "eagle3"): Offer("eagle3", _sglang("EAGLE3"), (*PORTABLE, _several_states)),
    ("trtllm", "eagle3"): Offer("eagle3", _trtllm, PORTABLE, _trtllm_eagle3),
    ("speculators", "eagle3"): Offer("eagle3-speculators", _vllm_alone),
    ("gguf", "eagle3"): Offer("eagle3-gguf", _llama_cpp, (_three_states, _llama_layer, _no_31)),
    ("vllm", "eagle1"): Offer("eagle1", _vllm("eagle"), (_whole_vocabulary,)),
    ("sglang", "eagle1"): Offer("eagle1-sglang", _sglang("EAGLE"), (_whole_vocabulary,)),
    ("vllm", "medusa"): Offer("medusa", _vllm("medusa"), (_unchanged_target, _whole_vocabulary)),
    ("tgi", "medusa"): Offer("medusa-tgi", _tgi, (_unchanged_target, _whole_vocabulary, _one_shared_block)),
    ("trtllm", "medusa"): Offer("medusa-trtllm", _trtllm_medusa, (_unchanged_target, _whole_vocabulary)),
    ("target", "medusa"): Offer("stitched", _vllm_medusa2, (_whole_vocabulary,)),
    ("target", "native_mtp"): Offer("stitched", _vllm_mtp),
    ("vllm", "draft_model"): Offer("causal-lm", _vllm("draft_model"), (_whole_vocabulary,)),
    ("sglang", "draft_model"): Offer("causal-lm", _sglang("STANDALONE"), (_whole_vocabulary,)),
    ("trtllm", "draft_model"): Offer("causal-lm", _trtllm, (_whole_vocabulary,), _trtllm_draft_model),
    ("hf", "draft_model"): Offer("causal-lm", _transformers, (_whole_vocabulary,)),
}
"""By (stack, Servable.architecture)."""
OWN = Offer("outrider", _ours)
"""stack=hf of everything that transformers has no class for: our own safetensors, which `init_from=` reads."""
NOWHERE = {
    "mtp": "no engine has a place for a new MTP module beside a target that has none (drafter=eagle3 is served)",
    "early_exit": "no engine lets the target's first layers draft (drafter=draft_model is served)",
}
STACKS = {
    "vllm": "vLLM", "speculators": "speculators", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "tgi": "TGI",
    "hf": "transformers", "gguf": "llama.cpp", "target": "the target's own folder",
}  # fmt: skip


def problem(stack: str, source: Source) -> str | None:
    """Why `stack` cannot serve this drafter; None if it can. Our own format (stack=hf) takes every drafter."""
    head = source.servable.architecture
    if stack == "hf":
        return None
    if stack == "target" and not source.servable.target_tensors:
        return "training has not changed its target: that is for drafter=mtp drafter.native=true, and drafter=medusa2"
    offer = OFFERS.get((stack, head))
    if offer is None:
        return NOWHERE.get(head, f"{STACKS[stack]} loads no {head} heads")
    return _limit(offer, source)


def _limit(offer: Offer, source: Source) -> str | None:
    return next((reason for limit in offer.limits if (reason := limit(source)) is not None), None)


def stacks_for(source: Source) -> list[str]:
    """The stacks that can serve this drafter."""
    return [stack for stack in STACKS if problem(stack, source) is None]


def offer_for(stack: str, source: Source) -> Offer:
    """How `stack` serves this drafter.

    Raises:
        InputError: if it cannot, with the reason and the stacks that can.
    """
    head = source.servable.architecture
    reason = problem(stack, source)
    if reason is not None:
        others = ", ".join(f"stack={name}" for name in stacks_for(source))
        raise InputError(f"{STACKS[stack]} cannot serve this {head} drafter: {reason}. What can be written: {others}")
    offer = OFFERS.get((stack, head), OWN)
    return OWN if _limit(offer, source) is not None else offer
