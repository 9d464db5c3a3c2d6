"""Who serves what: the table of engines, its commands, and every refusal with its reason."""

import json
import shlex
from typing import Any

import pytest

from conf import InputError
from conf.cli import choices
from data.target import Target
from serve_export.check import STITCHED
from serve_export.engines import NOWHERE, OFFERS, OWN, STACKS, Place, offer_for, stacks_for
from serve_export.formats import FORMATS
from serve_export.source import Source
from tests.families import NAMES
from tests.serve_export.exports import drafter_of
from train.drafters.base import Drafter

PLACE = Place("org/target", "outputs/head", 3)
EVERYWHERE: dict[str, set[str]] = {
    "eagle3": {"vllm", "sglang", "trtllm", "speculators", "gguf", "hf"},
    "eagle1": {"vllm", "sglang", "hf"},
    "hass": {"vllm", "sglang", "hf"},
    "medusa": {"vllm", "tgi", "trtllm", "hf"},
    "medusa2": {"target", "hf"},
    "mtp": {"hf"},
    "early_exit": {"hf"},
    "draft_model": {"vllm", "sglang", "trtllm", "hf"},
}


def source_of(tiny_target: Any, family: str, **settings: Any) -> Source:
    target = tiny_target("llama")
    return source_from(drafter_of(family, target, **settings), target)


def source_from(drafter: Drafter, target: Target) -> Source:
    return Source(drafter.to_serving(), target, "float32", 3)


def test_table_names_what_exists() -> None:
    assert {stack for stack, _ in OFFERS} <= STACKS.keys()
    assert {offer.format for offer in OFFERS.values()} == {*FORMATS, STITCHED}
    assert set(choices("stack")) == set(STACKS)


@pytest.mark.parametrize("family", NAMES)
def test_every_family_goes_to_some_engine_or_says_why_not(tiny_target: Any, family: str) -> None:
    target = tiny_target("llama")
    drafter = drafter_of(family, target)
    source = source_from(drafter, target)
    found = stacks_for(source)
    assert "hf" in found  # our own format takes everything
    assert drafter.stack in found and (drafter.stack == "hf") == (found == ["hf"])  # what `eval` says comes next
    if found == ["hf"] and ("hf", source.servable.architecture) not in OFFERS:
        assert source.servable.architecture in NOWHERE
    if family in EVERYWHERE:
        assert set(found) == EVERYWHERE[family]
    for stack in STACKS:
        if stack in found:
            assert offer_for(stack, source).command(PLACE)
            continue
        with pytest.raises(InputError, match=r"What can be written: .*stack=hf"):
            offer_for(stack, source)


@pytest.mark.parametrize(
    ("stack", "family", "settings", "reason"),
    [
        ("sglang", "eagle3", {"norm_before_residual": True}, "norm_before_residual=true is ignored"),
        ("trtllm", "eagle3", {"norm_before_residual": True}, "norm_before_residual=true is ignored"),
        ("sglang", "eagle3", {"qk_norm": True}, "norms on queries and keys"),
        ("gguf", "eagle3", {"qk_norm": True}, "norms on queries and keys"),
        ("sglang", "eagle3", {"aux_layers": (3,)}, "skips fc"),
        ("gguf", "eagle3", {"aux_layers": (1, 7)}, "exactly three auxiliary layers, the head 2"),
        ("gguf", "eagle3", {"norm_output": True}, "neither fc_norm nor norm_output"),
        ("tgi", "eagle3", {}, "TGI loads no eagle3 heads"),
        ("vllm", "eagle1", {"draft_vocab_size": 50}, "draft_vocab_size=null"),
        ("vllm", "medusa", {"draft_vocab_size": 50}, "draft_vocab_size=null"),
        ("vllm", "draft_model", {"draft_vocab_size": 50}, "draft_vocab_size=null"),
        ("tgi", "medusa", {"num_layers": 2}, "one block only"),
        ("vllm", "medusa2", {}, "stack=target"),
        ("target", "medusa", {}, "has not changed its target"),
        ("vllm", "mtp", {}, "drafter=eagle3 is served"),
        ("vllm", "early_exit", {}, "drafter=draft_model is served"),
        ("gguf", "draft_model", {}, "llama.cpp loads no draft_model heads"),
    ],
)  # fmt: skip
def test_refusals_say_why_and_where_to_go(
    tiny_target: Any, stack: str, family: str, settings: dict[str, Any], reason: str
) -> None:
    source = source_of(tiny_target, family, **settings)
    with pytest.raises(InputError, match=reason) as refused:
        offer_for(stack, source)
    assert f"stack={stacks_for(source)[0]}" in str(refused.value)


@pytest.mark.parametrize(
    ("head", "method"),
    [("eagle3", "eagle3"), ("eagle1", "eagle"), ("medusa", "medusa"), ("draft_model", "draft_model")],
)
def test_vllm_command_names_method_folder_and_k(head: str, method: str) -> None:
    words = shlex.split(OFFERS["vllm", head].command(PLACE))
    assert words[:4] == ["vllm", "serve", "org/target", "--speculative-config"]
    assert json.loads(words[4]) == {"method": method, "model": "outputs/head", "num_speculative_tokens": 3}
    assert len(words) == 5


@pytest.mark.parametrize("folder", ["my outputs/head", "it's/head", 'say "hi"/head'])
def test_commands_survive_unusual_folder_names(folder: str) -> None:
    words = shlex.split(OFFERS["vllm", "eagle3"].command(Place(folder, folder, 3)))
    assert words[:4] == ["vllm", "serve", folder, "--speculative-config"]
    assert json.loads(words[4])["model"] == folder


def test_commands_of_the_other_engines() -> None:
    assert shlex.split(OFFERS["speculators", "eagle3"].command(PLACE)) == ["vllm", "serve", "outputs/head"]
    sglang = shlex.split(OFFERS["sglang", "eagle3"].command(PLACE))
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "4"  # K and the root
    assert sglang[sglang.index("--speculative-num-steps") + 1] == "3"
    assert "outputs/head/trtllm.yaml" in OFFERS["trtllm", "eagle3"].command(PLACE)
    assert "outputs/head/model.gguf" in OFFERS["gguf", "eagle3"].command(PLACE)
    own = json.loads(shlex.split(OFFERS["target", "medusa"].command(PLACE))[4])
    assert own == {"method": "medusa", "model": "outputs/head/heads", "num_speculative_tokens": 3}
    assert OWN.command(PLACE) == "python -m eval checkpoint=outputs/head"


def test_trtllm_gets_the_layers_whose_output_is_meant(tiny_target: Any) -> None:
    source = source_of(tiny_target, "eagle3", aux_layers=(2, 4, 5))
    options = OFFERS["trtllm", "eagle3"].options
    assert options is not None
    assert options(source, PLACE).splitlines() == [
        "speculative_config:", "  decoding_type: Eagle3", "  max_draft_len: 3",
        '  speculative_model: "outputs/head"', "  eagle3_layers_to_capture: [1, 3, 4]",
    ]  # fmt: skip
