"""Every yaml states its dataclass, every choice composes into a valid job, and every mistake gives one sentence."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.utils import get_class
from omegaconf import OmegaConf

import conf
from conf import InputError
from conf.cli import build, check_overrides, choices, rebuild

FOLDER = Path(conf.__file__).parent
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml"))
JOBS = [name.removesuffix(".yaml") for name in FILES if "/" not in name]
EXPERIMENTS = [name for name in FILES if name.startswith("experiment/")]
COMPONENTS = [name for name in FILES if "/" in name and name not in EXPERIMENTS]
TARGET = "+target=smollm2"
REQUIRED = {
    "train": [TARGET], "data": [TARGET], "eval": ["checkpoint=outputs/train/x"],
    "serve_export": ["checkpoint=outputs/train/x"],
}  # fmt: skip


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return content


def groups_of(job: str) -> list[str]:
    """Groups in the job's defaults list, and the target that it takes from the command line."""
    listed = [next(iter(entry)) for entry in read(f"{job}.yaml")["defaults"] if entry != "_self_"]
    listed = [group for group in listed if not group.startswith("override ")]  # of Hydra's own groups
    return [*listed, *(["target"] if TARGET in REQUIRED[job] else [])]


def fields(name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(get_class(read(name)["_target_"]))}


def plain(value: Any) -> Any:
    """Tuples as lists, to compare built values with yaml."""
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def complaint(job: str, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        build(check_overrides(job, list(overrides)))
    return str(caught.value)


def test_the_jobs_are_known_to_this_file() -> None:
    assert sorted(REQUIRED) == JOBS
    assert len(COMPONENTS) > 10


@pytest.mark.parametrize("name", [f"{job}.yaml" for job in JOBS] + COMPONENTS)
def test_first_line_names_the_dataclass(name: str) -> None:
    first = (FOLDER / name).read_text().splitlines()[0]
    assert first == f"_target_: {read(name)['_target_']}"
    assert dataclasses.is_dataclass(get_class(read(name)["_target_"]))


@pytest.mark.parametrize("name", COMPONENTS)
def test_component_keys_are_the_fields(name: str) -> None:
    assert read(name).keys() - {"_target_"} == fields(name)


@pytest.mark.parametrize("job", JOBS)
def test_job_keys_and_groups_are_the_fields(job: str) -> None:
    own = read(f"{job}.yaml").keys() - {"_target_", "defaults", "hydra"}
    groups = groups_of(job)
    assert len({*own, *groups}) == len(own) + len(groups)
    assert {*own, *groups} == fields(f"{job}.yaml")


@pytest.mark.parametrize("job", JOBS)
def test_job_defaults_build(job: str) -> None:
    built = build(check_overrides(job, REQUIRED[job]))
    assert type(built) is get_class(read(f"{job}.yaml")["_target_"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.run_name = "other"


@pytest.mark.parametrize(
    ("job", "group", "choice"),
    [(job, group, choice) for job in JOBS for group in groups_of(job) for choice in choices(group)],
)
def test_every_choice_builds_with_the_values_of_its_yaml(job: str, group: str, choice: str) -> None:
    values = read(f"{group}/{choice}.yaml")
    given = [f"{group}.{key}=given" for key, value in values.items() if value == "???"]
    chosen = f"+target={choice}" if group == "target" else f"{group}={choice}"
    others = [override for override in REQUIRED[job] if group != "target" or override != TARGET]
    composed = check_overrides(job, [*others, chosen, *given])
    section = getattr(build(composed), group)
    assert type(section) is get_class(values.pop("_target_"))
    for key, value in values.items():
        wanted = composed[value[2:-1]] if isinstance(value, str) and value.startswith("${") else value
        assert plain(getattr(section, key)) == ("given" if value == "???" else wanted)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_are_changes_to_a_training_job(name: str) -> None:
    assert (FOLDER / name).read_text().startswith("# @package _global_\n")
    stem = Path(name).stem
    plain_job = build(check_overrides("train", [TARGET]))
    assert build(check_overrides("train", [TARGET, f"+experiment={stem}"])) != plain_job


def test_choices_are_the_yaml_files_of_a_group() -> None:
    assert choices("deepspeed") == ["zero0", "zero1", "zero2", "zero2_offload", "zero3"]
    assert choices("sampling") == ["greedy", "sampled"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("drafter=eagle4", "unknown drafter 'eagle4' | did you mean 'eagle3'? | choices: "),
        ("optim=moun", "unknown optim 'moun' | did you mean 'muon'? | choices: adamw, adamw_8bit, muon"),
        ("drafter.ttt_step=3", "unknown key 'drafter.ttt_step' | did you mean 'drafter.ttt_steps'?"),
        ("epoch=3", "unknown key 'epoch' | did you mean 'epochs'?"),
        ("target.pth=x", "unknown key 'target.pth' | did you mean 'target.path'?"),
        ("drafter.ttt_steps=abc", "drafter.ttt_steps: | valid integer | got 'abc'"),
        ("drafter.aux_layers=[1,x]", "drafter.aux_layers.1: | valid integer | got 'x'"),
        ("epochs=0", "epochs: | greater than 0 | got 0"),
        ("optim.schedule=linear", "optim.schedule: | 'cosine', 'wsd' or 'constant' | got 'linear'"),
        ("target.dtype=float16", "target.dtype: | 'float32' or 'bfloat16' | got 'float16'"),
        ("+drafter.tttsteps=3", "drafter.tttsteps: | unexpected | got 3"),
        ("+nonsense=1", "nonsense: | unexpected | got 1"),
        ("corpus=jsonl", "missing: corpus.path=..."),
        ("epochs", "cannot read the argument 'epochs' | key=value"),
        ("epochs=[1", "cannot read the argument 'epochs=[1' | key=value"),
    ],
)
def test_mistakes_are_named_with_the_nearest_valid_name(override: str, said: str) -> None:
    message = complaint("train", TARGET, override)
    assert [part for part in said.split(" | ") if part not in message] == []
    assert "\n" not in message


def test_unknown_target_lists_the_choices() -> None:
    message = complaint("train", "+target=qwen33")
    assert "unknown target 'qwen33'" in message
    assert "did you mean 'qwen3'?" in message
    assert f"choices: {', '.join(choices('target'))}" in message


@pytest.mark.parametrize("job", ["train", "data"])
def test_missing_target_lists_the_choices(job: str) -> None:
    message = complaint(job)
    assert "no target" in message
    assert all(f"+target={name}" in message for name in choices("target"))


def test_missing_value_is_named() -> None:
    assert complaint("train", TARGET, "corpus=jsonl") == "missing: corpus.path=..."


def test_a_target_without_its_plus_gets_the_plus_proposed() -> None:
    assert "+target=smollm2" in complaint("train", "target=smollm2")


def test_every_field_of_the_target_can_be_proposed() -> None:
    assert "did you mean 'target.chat_template_kwargs'" in complaint("train", TARGET, "target.chat_template_kwarg=1")


def test_a_sweep_without_its_flag_gets_the_flag_proposed() -> None:
    assert "-m" in complaint("train", TARGET, "epochs=1,2")


def test_saved_configuration_builds_an_equal_job() -> None:
    composed = check_overrides("train", [TARGET, "drafter.ttt_steps=5", "optim=adamw"])
    built = build(composed)
    assert build(OmegaConf.create(OmegaConf.to_yaml(composed))) == built
    assert (built.drafter.ttt_steps, built.optim.name) == (5, "adamw")


TARGET_SECTION = {
    "_target_": "data.target.TargetConfig", "name": "a", "path": "x", "revision": None, "dtype": "float32",
    "chat_template_kwargs": {}, "trust_remote_code": False,
    "compile": False,
}  # fmt: skip


def test_rebuild_accepts_a_section_of_its_own_kind() -> None:
    built = rebuild(OmegaConf.create(TARGET_SECTION), ("data.target.",))
    assert (built.name, built.dtype) == ("a", "float32")


@pytest.mark.parametrize("named", ["os.mkdir", "data.targets.TargetConfig", ""])
def test_rebuild_refuses_other_modules(named: str) -> None:
    with pytest.raises(InputError, match=r"expected something under data\.target\."):
        rebuild(OmegaConf.create(TARGET_SECTION | {"_target_": named}), ("data.target.",))


@pytest.mark.parametrize(
    "where",
    [
        "nested",
        "through an import",
        "another class of the module",
    ],
)  # fmt: skip
def test_rebuild_runs_nothing_but_the_allowed_class(tmp_path: Path, where: str) -> None:
    made = tmp_path / "made by the yaml"
    section: dict[str, Any] = {"_target_": "data.target.Path.mkdir", "_args_": [str(made)]}
    if where == "nested":
        section = TARGET_SECTION | {"chat_template_kwargs": {"x": {"_target_": "os.mkdir", "path": str(made)}}}
    elif where == "another class of the module":
        section = TARGET_SECTION | {"_target_": "data.target.Target"}
    with pytest.raises(InputError):
        rebuild(OmegaConf.create(section), ("data.target.",))
    assert not made.exists()
