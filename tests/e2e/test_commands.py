"""The README's commands, start to end, on tiny random targets of three families."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.train.conftest import TINY, Finished, Launcher, rows, write_corpus

Folder = Callable[..., Path]
FAMILIES = ("qwen3", "llama", "qwen3_moe")
TARGETS = {"qwen3": "qwen3", "llama": "llama3", "qwen3_moe": "qwen3_moe"}  # family -> conf/target/*.yaml
RUN, EXPORT = "outputs/train/eagle3-tiny", "outputs/serve_export/eagle3-tiny-vllm"


def train_args(folder: Path, family: str, *more: str) -> list[str]:
    argv = [f"+target={TARGETS[family]}" if argument.startswith("+target") else argument for argument in TINY]
    no_dense_layer = ["drafter.init_layer=null"] if family == "qwen3_moe" else []
    return [*argv, f"target.path={folder}", "corpus.path=talk.jsonl", *no_dense_layer, *more]


def eval_args(checkpoint: str, *more: str) -> list[str]:
    return [f"checkpoint={checkpoint}", "corpus=jsonl", "corpus.path=prompts.jsonl", "max_tokens=16", *more]


@pytest.fixture(scope="module")
def chain(
    launcher: Launcher, tiny_folder: Folder, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, dict[str, Finished]]]:
    """chain(family) -> (working directory, the three finished commands)."""
    made: dict[str, tuple[Path, dict[str, Finished]]] = {}

    def make(family: str) -> tuple[Path, dict[str, Finished]]:
        if family not in made:
            cwd = tmp_path_factory.mktemp(family)
            write_corpus(cwd / "talk.jsonl", 12)
            write_corpus(cwd / "prompts.jsonl", 3)
            done = {
                "train": launcher("train", train_args(tiny_folder(family), family), cwd).succeeded(),
                "eval": launcher("eval", eval_args(RUN), cwd).succeeded(),
                "serve_export": launcher("serve_export", [f"checkpoint={RUN}", "stack=vllm"], cwd).succeeded(),
            }
            made[family] = cwd, done
        return made[family]

    return make


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def tree(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("family", FAMILIES)
def test_train_leaves_its_records_and_one_line_of_metrics_per_step(chain: Any, family: str) -> None:
    cwd, done = chain(family)
    summary, lines = read(cwd / RUN / "summary.json"), rows(cwd / RUN)
    steps = summary["steps"]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    wanted = {"loss", "loss/step", "match/step", "gradient_norm", "learning_rate", "tokens_per_second", "time_share"}
    for line in lines:
        assert line.keys() >= wanted
        assert len(line["loss/step"]) == len(line["match/step"]) == 3  # ttt_steps of conf/drafter/eagle3.yaml
        assert line["loss"] == pytest.approx(sum(line["loss/step"]), rel=1e-5)  # step_loss_decay is 1
        assert line["tokens_per_second"] > 0 and line["gradient_norm"] > 0
        assert all(0 <= match <= 1 for match in line["match/step"])
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert {"config.yaml", "provenance.json", "metrics.jsonl", "summary.json"} <= tree(cwd / RUN)
    assert summary["checkpoint"] == f"{RUN}/checkpoints/step-{steps:06d}"
    assert summary["resumed_from_step"] == 0 and summary["trained_tokens"] > 0
    assert f"checkpoint  {summary['checkpoint']}" in done["train"].out


@pytest.mark.parametrize("family", FAMILIES)
def test_validated_acceptance_length_is_that_of_its_rates_and_of_the_manifest(chain: Any, family: str) -> None:
    cwd, _ = chain(family)
    last = rows(cwd / RUN)[-1]
    assert last["acceptance_length"] == pytest.approx(1 + sum(last["joint_rates"]))
    assert len(last["joint_rates"]) == len(last["conditional_rates"]) == 3
    manifest = read(cwd / RUN / "checkpoints" / "latest" / "manifest.json")
    assert manifest["acceptance_length"] == last["acceptance_length"]
    assert (manifest["target"]["name"], manifest["target"]["num_hidden_layers"]) == ("tiny", 8)


@pytest.mark.parametrize("family", FAMILIES)
def test_eval_measures_what_its_rounds_say(chain: Any, family: str) -> None:
    cwd, _ = chain(family)
    summary, rounds = (read(cwd / "outputs/eval/eagle3-tiny" / name) for name in ("summary.json", "rounds.json"))
    assert set(rounds) == {f"prompts.jsonl:{line}" for line in (1, 2, 3)}
    counts = [count for entry in rounds.values() for count in entry["num_accepted"]]
    assert summary["acceptance_length_decoded"] == pytest.approx(1 + mean(counts))
    assert summary["joint_rates"] == pytest.approx([mean(n >= k for n in counts) for k in (1, 2, 3)])
    assert summary["num_rounds"] == len(counts)
    assert summary["generated_tokens"] == sum(len(entry["tokens"]) for entry in rounds.values())
    assert summary["prompts"] == summary["outputs_compared_with_plain"] == summary["outputs_equal_to_plain"] == 3
    assert summary["acceptance_length_walk"] == pytest.approx(summary["acceptance_length_decoded"])
    assert summary["rounds_differing_from_walk"] == []
    assert min(summary[key] for key in ("tokens_per_second", "plain_tokens_per_second", "speedup")) > 0
    assert summary["checkpoint"].endswith(read(cwd / RUN / "summary.json")["checkpoint"])
    assert {"config.yaml", "provenance.json"} <= tree(cwd / "outputs/eval/eagle3-tiny")


@pytest.mark.parametrize("family", FAMILIES)
def test_serve_export_writes_the_trained_head_and_its_serve_command(
    chain: Any, tiny_folder: Folder, family: str
) -> None:
    cwd, done = chain(family)
    config, tensors = read(cwd / EXPORT / "config.json"), load_file(cwd / EXPORT / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (200, 258)
    trained = load_file(cwd / RUN / "checkpoints" / "best" / "model.safetensors")
    assert bool((tensors["fc.weight"] == trained["fc.weight"].to(tensors["fc.weight"].dtype)).all())
    assert [*tensors["d2t"] + range_like(tensors["d2t"])] == [*trained["draft_to_target_ids"]]
    assert "README.md" in tree(cwd / EXPORT)
    (serve,) = [line for line in done["serve_export"].out.splitlines() if "vllm serve" in line]
    assert str(tiny_folder(family)) in serve and EXPORT in serve
    assert sorted(path.name for path in (cwd / EXPORT).parent.iterdir()) == [Path(EXPORT).name]


def range_like(tensor: Any) -> Any:
    return tensor.new_tensor(range(len(tensor)))


def test_nothing_is_left_outside_the_outputs_folder(chain: Any) -> None:
    cwd, _ = chain("qwen3")
    assert {path.name for path in cwd.iterdir()} == {"talk.jsonl", "prompts.jsonl", "outputs"}
    assert {path.name for path in (cwd / "outputs").iterdir()} == {"train", "eval", "serve_export"}
    assert tree(cwd / "outputs/eval") == {
        f"eagle3-tiny/{name}" for name in ("config.yaml", "provenance.json", "rounds.json", "summary.json")
    }  # fmt: skip


def test_export_again_replaces_the_first_and_other_folders_are_left_alone(chain: Any, launcher: Launcher) -> None:
    cwd, _ = chain("llama")
    first = load_file(cwd / EXPORT / "model.safetensors")
    launcher("serve_export", [f"checkpoint={RUN}", "dtype=float32"], cwd).succeeded()
    second = load_file(cwd / EXPORT / "model.safetensors")
    assert first.keys() == second.keys()
    assert str(second["fc.weight"].dtype) == "torch.float32" != str(first["fc.weight"].dtype)
    assert [path.name for path in (cwd / EXPORT).parent.iterdir()] == [Path(EXPORT).name]
    (cwd / "mine").mkdir()
    (cwd / "mine" / "thesis.txt").write_text("x")
    refused = launcher("serve_export", [f"checkpoint={RUN}", "output_dir=mine"], cwd)
    assert refused.code == 2 and "mine exists and is no export of ours" in refused.err
    assert tree(cwd / "mine") == {"thesis.txt"}


def test_eval_of_one_step_is_named_after_run_and_step(chain: Any, launcher: Launcher) -> None:
    cwd, _ = chain("llama")
    step = (cwd / RUN / "checkpoints" / "latest").resolve().name
    sampled = eval_args(f"{RUN}/checkpoints/{step}", "sampling=sampled", "plain_prompts=0")
    launcher("eval", sampled, cwd).succeeded()
    summary = read(cwd / f"outputs/eval/eagle3-tiny-{step}" / "summary.json")
    assert summary["temperature"] == 1.0
    assert "acceptance_length_walk" not in summary and "speedup" not in summary  # greedy alone can be compared


def test_eval_of_an_exported_head_is_that_of_its_checkpoint(
    chain: Any, launcher: Launcher, tiny_folder: Folder
) -> None:
    """As anybody's head is evaluated: by its folder, in the format of another trainer."""
    cwd, _ = chain("llama")
    options = ["dtype=float32", "output_dir=heads/vllm"]
    launcher("serve_export", [f"checkpoint={RUN}", "stack=vllm", *options], cwd).succeeded()
    head = [
        "+target=llama3", "+drafter=eagle3", "drafter.init_from=heads/vllm", f"target.path={tiny_folder('llama')}",
        "target.dtype=float32", "target.chat_template_kwargs={}", "output_dir=from-head", "plain_prompts=0",
    ]  # fmt: skip
    launcher("eval", eval_args("x", *head)[1:], cwd).succeeded()
    assert read(cwd / "from-head" / "rounds.json") == read(cwd / "outputs/eval/eagle3-tiny" / "rounds.json")
    assert read(cwd / "from-head" / "summary.json")["checkpoint"] == "heads/vllm"


def test_eval_of_several_runs_ends_with_one_comparison(chain: Any, launcher: Launcher) -> None:
    cwd, _ = chain("llama")
    argv = ["-m", *eval_args(RUN, "num_draft_tokens=1,2", "plain_prompts=1", "run_name=k${num_draft_tokens}")]
    done = launcher("eval", argv, cwd).succeeded()
    speeds = {name: read(cwd / "outputs/eval" / name / "summary.json")["speedup"] for name in ("k1", "k2")}
    assert done.out.rstrip().endswith(f"{max(speeds.values()):.2f}x plain decoding")
    assert f"fastest: {max(speeds, key=lambda name: speeds[name])}" in done.out
    last = done.out[done.out.rindex("┏") :]
    assert "…" not in last  # nothing is cut on 80 columns
    assert all(name in last and f"{speed:.3f}" in last for name, speed in speeds.items())
    assert "all: draft chain, T 0.000, dtype float32" in last  # what they share is said once


def test_multirun_trains_one_run_per_value(launcher: Launcher, tiny_folder: Folder, tmp_path: Path) -> None:
    write_corpus(tmp_path / "talk.jsonl", 8)
    argv = ["-m", *train_args(tiny_folder("qwen3"), "qwen3", "epochs=1", "seed=0,1", "run_name=seed${seed}")]
    launcher("train", argv, tmp_path).succeeded()
    curves = [[row["loss"] for row in rows(tmp_path / "outputs/train" / name)] for name in ("seed0", "seed1")]
    assert len(curves[0]) == len(curves[1]) > 0
    assert curves[0] != curves[1]
