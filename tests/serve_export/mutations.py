"""Exports, each spoilt in one way: what `python -m serve_export check=` must catch. Also `make test-mutations`.

From a good export: every tensor dropped, renamed, transposed where it is not square; the vocabulary's map zeroed, made
absolute (offsets, for the format that has ids) or left out; layer ids shifted by one in every list; every key of rotary
positions dropped; V set to the draft vocabulary; and every other key of config.json dropped.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.records import write_json
from serve_export.check import faults_of

OUTPUT = Path("outputs/test-mutations/summary.json")
IDS = "eagle_aux_hidden_state_layer_ids"
FREE = ("bos_token_id", "eos_token_id", "eagle_config.use_aux_hidden_state")
"""Keys that no engine needs from a head."""
Parts = tuple[dict[str, Tensor], dict[str, Any]]
Mutation = Callable[[dict[str, Tensor], dict[str, Any]], None]


def _at(config: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        config = config[key]
    return config


def _paths(config: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from _paths(value, (*prefix, key))


def of_tensors(tensors: dict[str, Tensor]) -> Iterator[tuple[str, str, Mutation]]:
    """(name, what the complaint must contain, mutation)."""
    for name, tensor in tensors.items():
        yield f"drop {name}", name, lambda t, _, n=name: t.pop(n)
        yield f"rename {name}", name, lambda t, _, n=name: t.__setitem__(f"renamed.{n}", t.pop(n))
        if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]:
            yield f"transpose {name}", name, lambda t, _, n=name: t.__setitem__(n, t[n].T.contiguous())
    if "d2t" in tensors:
        size = len(tensors["d2t"])
        yield "zero d2t", "d2t", lambda t, _: t.__setitem__("d2t", torch.zeros_like(t["d2t"]))
        yield "absolute d2t", "d2t", lambda t, _: t.__setitem__("d2t", t["d2t"] + torch.arange(size))


def of_config(config: dict[str, Any], draft_vocab_size: int) -> Iterator[tuple[str, str, Mutation]]:
    """The same for config.json."""
    for path in _paths(config):
        dotted = ".".join(path)
        if dotted.endswith(FREE) or dotted.startswith("transformer_layer_config.architectures"):
            continue
        yield f"drop key {dotted}", path[-1], lambda _, c, p=path: _at(c, p[:-1]).pop(p[-1])
        if path[-1] == IDS:
            for step in (-1, 1):
                yield (
                    f"shift {dotted} by {step}", IDS,
                    lambda _, c, p=path, s=step: _at(c, p[:-1]).__setitem__(p[-1], [i + s for i in _at(c, p)]),
                )  # fmt: skip
        if path[-1] == "vocab_size" and draft_vocab_size != _at(config, path):
            yield (
                f"{dotted} of the draft",
                "vocab_size",
                lambda _, c, p=path: _at(c, p[:-1]).__setitem__(p[-1], draft_vocab_size),
            )


def run(folder: Path, weights: str, draft_vocab_size: int, scratch: Path) -> Iterator[tuple[str, str, list[str]]]:
    """(mutation, what its complaint must contain, the complaints) of every mutation of one export."""
    tensors = load_file(folder / weights)
    config = json.loads((folder / "config.json").read_text())
    for file in folder.iterdir():
        if file.is_file():
            (scratch / file.name).write_bytes(file.read_bytes())
    assert faults_of(scratch) == []
    for name, wanted, mutate in [*of_tensors(tensors), *of_config(config, draft_vocab_size)]:
        parts: Parts = dict(tensors), copy.deepcopy(config)
        mutate(*parts)
        save_file(parts[0], str(scratch / weights), metadata={"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(parts[1]))
        yield name, wanted, faults_of(scratch)


def main() -> None:
    """Mutate every safetensors format and write what was caught."""
    from tests.serve_export.test_mutations import all_exports

    rows: dict[str, Any] = {}
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as base:
        for case, folder, weights, draft_vocab_size in all_exports(Path(base)):
            scratch = Path(base) / f"{case} spoilt"
            scratch.mkdir()
            found = [
                (name, any(wanted in fault for fault in faults))
                for name, wanted, faults in run(folder, weights, draft_vocab_size, scratch)
            ]
            rows[case] = {"total": len(found), "caught": sum(caught for _, caught in found)}
            missed += [f"{case}: {name}" for name, caught in found if not caught]
    total, caught = (sum(row[key] for row in rows.values()) for key in ("total", "caught"))
    write_json(OUTPUT, {"total": total, "caught": caught, "missed": missed, "per_head": rows})
    print(f"mutations caught: {caught} / {total}; {OUTPUT}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
