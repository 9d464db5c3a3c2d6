"""Every other drafter that vLLM can run: it generates what it generates without a drafter, and accepts what we accept.

In float32, where both write the same text. Heads come from outputs/compare if `make compare` has run here, and are then
measured on all 40 prompts and asked for an acceptance length of 1.3; otherwise they are trained for a minute and
measured on a few.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.mimo import save_mimo

pytestmark = pytest.mark.serving_heads
ROOT = Path(__file__).parents[2]
COMPARED = ROOT / "outputs" / "compare"
SHORT = ["corpus.max_conversations=12", "max_tokens=48"]
FEW = ["corpus.max_conversations=24", "epochs=1"]
SOME = ["corpus.max_conversations=180", "epochs=1"]
K = 3


def is_full() -> bool:
    return (COMPARED / "summary.json").exists()


def trained(served: Any, name: str, target: str, *options: str) -> str:
    """A run of `make compare`, or one made here."""
    run = COMPARED / name
    if (run / "summary.json").exists():
        return str(run)
    folder = served.output / f"{name}-run"
    budget = SOME if is_full() else FEW
    common = ["tracker=none", "validation_conversations=0", f"output_dir={folder}"]
    served.command("train", f"+target={target}", *common, *budget, *options)
    return str(folder)


def require_equal_text(target: str, prompts: list[Any], ours: list[Any], theirs: list[Any]) -> None:
    """The same tokens; where they part, the target must find two of them equally likely (to 1e-4)."""
    from data.target import Target, TargetConfig

    settings = TargetConfig(
        name="served", path=target, revision=None, dtype="float32", chat_template_kwargs={}, trust_remote_code=False,
        compile=False,
    )  # fmt: skip
    loaded = None
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        if a == b:
            continue
        loaded = loaded or Target(settings)
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        logits = loaded.model(torch.tensor([prompt + a[:at]])).logits[0, -1]
        top = logits.topk(2).values
        assert float(top[0] - top[1]) < 1e-4, f"texts part at token {at} of {prompt[:8]}..."


def serve(served: Any, name: str, arguments: list[str], target: str, speculative: Any) -> dict[str, Any]:
    """Decode with ours, with vLLM, and with vLLM alone; returns the record."""
    compared = COMPARED / f"{name}-t0"
    if is_full() and compared.exists():
        decoded = served.decoded(compared)
        assert (decoded.summary["dtype"], decoded.summary["num_draft_tokens"]) == ("float32", K)
    else:
        prompts = [] if is_full() else SHORT
        decoded = served.evaluate(name, *arguments, "dtype=float32", f"num_draft_tokens={K}", *prompts)
    row: dict[str, Any]
    row, answers = served.serve(name, decoded, target, speculative)
    plain = served.plain(decoded, target)
    require_equal_text(target, decoded.prompts, plain, answers)
    require_equal_text(target, decoded.prompts, plain, decoded.answers)
    assert row["engine"] == pytest.approx(row["ours"], rel=0.02)
    assert row["joint_rates_engine"] == pytest.approx(row["joint_rates_ours"], abs=0.02)
    return row


HEADS = {
    "eagle3": ["drafter=eagle3"],
    "eagle1": ["drafter=eagle1"],
    "hass": ["drafter=hass"],
    "medusa": ["drafter=medusa"],
    "draft_model": ["drafter=draft_model"],
    "qwen3layer": ["drafter=eagle3", "drafter.qk_norm=true"],
}
"""What vLLM is asked for; it guesses methods from paths, so that none of them may hold the name of another."""


@pytest.mark.parametrize("name", HEADS)
def test_head_is_served_as_we_decode_it(served: Any, name: str) -> None:
    checkpoint = trained(served, name, "smollm2", *HEADS[name])
    target, speculative = served.export(f"{name}-served", checkpoint, "stack=vllm", "dtype=float32")
    row = serve(served, name, [f"checkpoint={checkpoint}"], target, speculative)
    assert row["engine"] > (1.3 if is_full() else 1.0)


def test_mtp_layer_put_back_into_its_target_is_served(served: Any) -> None:
    """SmolLM2 as a MiMo model (the same function), with an MTP layer that is trained and written back."""
    folder = save_mimo(served.output / "mimo")
    options = ["drafter=mtp", "drafter.native=true", "drafter.draft_vocab_size=null", f"target.path={folder}",
               "drafter.init_layer=null"]  # fmt: skip
    checkpoint = trained(served, "mimo-layer", "smollm2", *options)
    target, speculative = served.export("mimo-served", checkpoint, "stack=target")
    config = Path(target) / "config.json"
    facts = json.loads(config.read_text())
    config.write_text(json.dumps(facts | {"model_type": "qwen2"}))  # its own code (remote) would say so to transformers
    row = serve(served, "mimo", [f"checkpoint={checkpoint}"], target, speculative)
    assert row["engine"] > (1.3 if is_full() else 1.0)


def test_target_that_medusa2_changed_is_served_with_its_heads(served: Any) -> None:
    """Ours reads the same folder: it holds the changed matrices in bf16, the checkpoint the adapters in float32."""
    checkpoint = trained(served, "medusa2", "smollm2", "drafter=medusa2")
    target, speculative = served.export("medusa2-served", checkpoint, "stack=target", "dtype=float32")
    ours = ["+target=smollm2", f"target.path={target}", "+drafter=medusa", f"drafter.init_from={speculative['model']}"]
    row = serve(served, "medusa2-target", ours, target, speculative)
    assert row["engine"] > (1.3 if is_full() else 1.0)


def test_ngram_finds_what_vllm_finds(served: Any, smollm2_folder: str) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    row = serve(
        served,
        "earliest-ngram",
        ["+target=smollm2", "+drafter=ngram", "drafter.occurrence=earliest"],
        smollm2_folder,
        speculative,
    )
    assert row["engine"] > 1.3


def test_suffix_finds_what_vllm_finds(served: Any, smollm2_folder: str) -> None:
    """With the tree that vLLM takes from arctic-inference; answers of other requests are forgotten on both sides."""
    speculative = {"method": "suffix", "num_speculative_tokens": K, "suffix_decoding_max_cached_requests": 0}
    row = serve(served, "suffix", ["+target=smollm2", "+drafter=suffix"], smollm2_folder, speculative)
    assert row["engine"] > 1.3
