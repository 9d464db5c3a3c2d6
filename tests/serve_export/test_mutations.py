"""A mutation test of `check=`: every spoilt export is caught, by a complaint that names what was spoilt."""

from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest

from serve_export.check import faults_of
from tests.conftest import save_tiny_model
from tests.serve_export.exports import CASES, drafter_of, export
from tests.serve_export.mutations import run

SAFETENSORS = [case for case, (_, name, _) in CASES.items() if not name.endswith("gguf")]


def all_exports(base: Path) -> Iterator[tuple[str, Path, str, int]]:
    """(case, folder, name of its weights, draft vocabulary) of an export in every format of safetensors."""
    from data.target import Target, TargetConfig

    settings = TargetConfig(
        name="tiny", path=str(save_tiny_model(base / "target")), revision=None, dtype="float32",
        chat_template_kwargs={}, trust_remote_code=False, compile=False,
    )  # fmt: skip
    target = Target(settings)
    for case in SAFETENSORS:
        family, name, changes = CASES[case]
        _, source = export(target, drafter_of(family, target, **changes), name, base / case)
        (weights,) = (file.name for file in (base / case).glob("*.safetensors"))
        yield case, base / case, weights, len(source.draft_ids)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str, int]]:
    return {
        case: (folder, weights, size) for case, folder, weights, size in all_exports(tmp_path_factory.mktemp("all"))
    }


@pytest.mark.parametrize("case", SAFETENSORS)
def test_every_mutation_is_caught_by_name(exports: dict[str, tuple[Path, str, int]], tmp_path: Path, case: str) -> None:
    found = list(run(*exports[case], tmp_path))
    missed = [name for name, wanted, faults in found if not any(wanted in fault for fault in faults)]
    assert missed == []
    assert len(found) > 15


@pytest.fixture
def gguf_export(tiny_target, tmp_path: Path) -> Path:
    target = tiny_target("llama")
    export(target, drafter_of("eagle3", target, draft_vocab_size=50), "eagle3-gguf", tmp_path / "head")
    return tmp_path / "head"


def rewrite(folder: Path, keys: dict[str, object] | None = None, **tensors: object) -> None:
    """The file again, with other values (None: without them)."""
    keys = keys or {}
    reader = gguf.GGUFReader(folder / "model.gguf")
    stored = [(t.name, t.data.copy(), t.tensor_type) for t in reader.tensors]
    fields = {name: (field.contents(), field.types) for name, field in reader.fields.items()}
    writer = gguf.GGUFWriter(folder / "new.gguf", "eagle3")
    for name, (value, types) in fields.items():
        changed = keys.get(name, value)
        if name != "general.architecture" and not name.startswith("GGUF.") and changed is not None:
            writer.add_key_value(name, changed, types[0], *types[1:])
    for name, data, kind in stored:
        changed = tensors.get(name.replace(".", "_"), data)
        if changed is not None:
            writer.add_tensor(name, changed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "new.gguf").replace(folder / "model.gguf")


def test_rewritten_as_it_was_a_gguf_file_holds(gguf_export: Path) -> None:
    rewrite(gguf_export)
    assert faults_of(gguf_export) == []


KEYS = [
    "eagle3.block_count", "eagle3.context_length", "eagle3.embedding_length", "eagle3.feed_forward_length",
    "eagle3.vocab_size", "eagle3.attention.head_count", "eagle3.attention.head_count_kv", "eagle3.attention.key_length",
    "eagle3.attention.value_length", "eagle3.attention.layer_norm_rms_epsilon", "eagle3.rope.dimension_count",
    "eagle3.rope.freq_base", "eagle3.target_layers", "eagle3.target_hidden_size", "eagle3.norm_before_residual",
    "eagle3.norm_before_fc", "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type",
]  # fmt: skip
TENSORS = [
    "fc_weight", "output_norm_weight", "output_weight", "d2t", *(f"blk_0_{name}_weight" for name in (
        "attn_norm", "attn_norm_2", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up",
        "ffn_down",
    )),
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_gguf_without_a_key_is_caught(gguf_export: Path, key: str) -> None:
    rewrite(gguf_export, {key: None})
    assert any(key in fault for fault in faults_of(gguf_export))


@pytest.mark.parametrize("name", TENSORS)
def test_gguf_without_a_tensor_is_caught(gguf_export: Path, name: str) -> None:
    rewrite(gguf_export, **{name: None})
    assert any(name.replace("_", ".") in fault.replace("_", ".") for fault in faults_of(gguf_export))


def test_gguf_with_offsets_or_other_layers_is_caught(gguf_export: Path) -> None:
    rewrite(gguf_export, {"eagle3.target_layers": [1, 3, 4]})
    assert "eagle3.target_layers is [1, 3, 4], expected [2, 4, 5]" in faults_of(gguf_export)
    rewrite(gguf_export, {"eagle3.target_layers": [2, 4, 5]})
    reader = gguf.GGUFReader(gguf_export / "model.gguf")
    ids = next(t.data.copy() for t in reader.tensors if t.name == "d2t")
    rewrite(gguf_export, d2t=ids * 0)
    assert any("d2t, read as absolute ids" in fault for fault in faults_of(gguf_export))
    rewrite(gguf_export, d2t=ids * 1000)
    assert any("must lie in 0..257" in fault for fault in faults_of(gguf_export))
