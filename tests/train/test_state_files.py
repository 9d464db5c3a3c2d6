"""state_files: what goes in comes out, and nothing else gets in."""

import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conf import InputError
from train.state_files import load_state, save_state


def through_a_file(state: Any, folder: Path) -> Any:
    save_state(state, folder / "state")
    return load_state(folder / "state")


@pytest.mark.parametrize(
    "state",
    [
        None, True, False, 0, -3, 2**70, 0.1, 1e-300, "", "ünïcode \" \\ \n", [], {}, (), set(), OrderedDict(),
        [1, [2, [3, []]]], (1, (2,), [3]), {1, 2, 3}, torch.bfloat16, torch.int64, torch.bool,
        torch.Size([2, 3]), torch.Size([]), {"step": 7, "nested": {"betas": (0.9, 0.95), "names": ["x", None]}},
        {0: "zero", 1: "one"}, {None: 1, True: 2, 2.5: 3}, OrderedDict([("z", 1), ("a", [OrderedDict(b=2)])]),
        {"dtype": torch.float32, "value": torch.Size([1]), "tensor": "word", "list": [1]}, {"1": "text", 1: "number"},
        math.inf, -math.inf,
    ],
    ids=repr,
)  # fmt: skip
def test_plain_values_keep_value_and_type(state: Any, tmp_path: Path) -> None:
    found = through_a_file(state, tmp_path)
    assert found == state
    assert repr(found) == repr(state)  # types and order, all the way down (== alone takes True for 1)


def test_mixed_sets_keep_every_member_and_its_type(tmp_path: Path) -> None:
    state = {"a", None, True, 2.5}  # their order differs from process to process
    found = through_a_file(state, tmp_path)
    assert {(type(member), member) for member in found} == {(type(member), member) for member in state}


def test_nan_stays_nan(tmp_path: Path) -> None:
    assert math.isnan(through_a_file({"loss": math.nan}, tmp_path)["loss"])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5), torch.tensor(7), torch.tensor(True), torch.zeros(0), torch.zeros(2, 0, 3),
        torch.tensor([1.0, -0.0, math.inf, 1e-45]), torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(2).half(),
        torch.randn(2, dtype=torch.float64), torch.arange(5, dtype=torch.uint8), torch.randn(4, 6).T,
        torch.randn(8)[2:6:2], torch.randn(3, requires_grad=True), torch.nn.Parameter(torch.randn(2)),
        torch.ones(1).expand(4),
    ],
    ids=lambda tensor: f"{str(tensor.dtype)[6:]}{list(tensor.shape)}",
)  # fmt: skip
def test_tensors_keep_every_bit(tensor: torch.Tensor, tmp_path: Path) -> None:
    found = through_a_file({"t": tensor}, tmp_path)["t"]
    assert type(found) is torch.Tensor and not found.requires_grad
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor.detach())
    if tensor.is_floating_point():
        assert torch.equal(found.signbit(), tensor.detach().signbit())


def test_optimizer_state_of_torch_round_trips(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, betas=(0.8, 0.9))
    parameter.grad = torch.randn(4, 3)
    optimizer.step()
    state = optimizer.state_dict()  # int keys, tuples, None, bool and 0-dim tensors
    found = through_a_file(state, tmp_path)
    assert found["param_groups"] == state["param_groups"]
    assert list(found["state"]) == [0]
    for name, value in state["state"][0].items():
        assert torch.equal(found["state"][0][name], value)


def test_shared_storage_comes_back_as_equal_tensors_of_their_own(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    found = through_a_file({"whole": whole, "again": whole, "part": whole[2:4]}, tmp_path)
    assert found["whole"].tolist() == found["again"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found["part"].tolist() == [2, 3]
    found["whole"].zero_()
    assert found["again"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}},
        {1: torch.tensor(1), "1": torch.tensor(2)},
        {"x": [torch.tensor(1)], "x.0": torch.tensor(2)},
    ],
    ids=["dotted key", "int and str key", "list index"],
)
def test_tensors_whose_paths_read_alike_are_not_confused(state: Any, tmp_path: Path) -> None:
    found = through_a_file(state, tmp_path)
    values = [int(tensor) for tensor in _tensors(found)]
    assert values == [int(tensor) for tensor in _tensors(state)]


def _tensors(node: Any) -> list[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return [node]
    children = node.values() if isinstance(node, dict) else node
    return [tensor for child in children for tensor in _tensors(child)]


class Stranger:
    """No type that a checkpoint may hold."""


@pytest.mark.parametrize(
    ("state", "place"),
    [
        (Stranger(), "state"),
        ({"a": {"b": [1, Stranger()]}}, r"state\.a\.b\.1"),
        ((0, {"x": Stranger()}), r"state\.1\.x"),
        ({"f": print}, r"state\.f"),
        ({"b": b"bytes"}, r"state\.b"),
        ({Stranger(): 1}, "state"),
    ],
    ids=["top", "nested", "tuple", "function", "bytes", "key"],
)
def test_unknown_types_are_refused_by_name_and_place(state: Any, place: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=rf"cannot save \w+ at {place}( |$)"):
        save_state(state, tmp_path / "state")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", [0, 4, 60, -1])
def test_truncated_files_are_input_errors(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_state({"t": torch.randn(8), "n": 1}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match="state is truncated or no safetensors file"):
        load_state(path)


def test_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere does not exist"):
        load_state(tmp_path / "nowhere")


def test_safetensors_without_our_structure_is_an_input_error(tmp_path: Path) -> None:
    save_file({"t": torch.zeros(1)}, str(tmp_path / "foreign"))
    with pytest.raises(InputError, match="foreign"):
        load_state(tmp_path / "foreign")


def test_the_file_is_a_safetensors_file(tmp_path: Path) -> None:
    save_state({"t": torch.zeros(3), "n": 1}, tmp_path / "state")
    content = (tmp_path / "state").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    (name,) = set(header) - {"__metadata__"}
    assert (header[name]["dtype"], header[name]["shape"]) == ("F32", [3])
    assert len(content) == 8 + int.from_bytes(content[:8], "little") + 3 * 4
