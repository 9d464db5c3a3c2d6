"""The five generic package names are ours, and nothing hides them or is hidden by them."""

import ast
import importlib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["conf", "data", "train", "eval", "serve_export"]
FOLDERS = sorted(
    {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.name != "__main__.py"}
)
DEPENDENCIES = [
    re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower().replace("_", "-")
    for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
]


def dependency_modules() -> set[str]:
    """Top-level modules of the declared dependencies."""
    names = set()
    for module, distributions in importlib.metadata.packages_distributions().items():
        if any(name.lower().replace("_", "-") in DEPENDENCIES for name in distributions):
            names.add(module)
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_the_one_of_this_checkout(package: str) -> None:
    assert Path(importlib.import_module(package).__file__).resolve() == ROOT / package / "__init__.py"


def test_dependencies_are_found_under_their_module_names() -> None:
    assert {"torch", "transformers", "deepspeed", "hydra", "pydantic", "safetensors", "wandb"} <= dependency_modules()


def test_no_module_is_named_like_a_package_the_standard_library_or_a_dependency() -> None:
    taken = {*PACKAGES, *sys.stdlib_module_names, *dependency_modules()} - {"__main__"}
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    offenders = [
        path.relative_to(ROOT).as_posix()
        for path in modules
        if (path.parent.name if path.name == "__init__.py" else path.stem) in taken
        and path not in [ROOT / package / "__init__.py" for package in PACKAGES]
    ]
    assert offenders == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_every_code_folder_is_a_package_whose_init_is_only_a_docstring(folder: Path) -> None:
    body = ast.parse((folder / "__init__.py").read_text()).body
    assert ast.get_docstring(ast.Module(body, []))
    if folder != ROOT / "conf":
        assert len(body) == 1


def test_no_package_below_tests() -> None:
    below = [path for path in (ROOT / "tests").rglob("*.py") if path.name == "__init__.py"]
    assert below == []


def test_test_files_have_no_name_of_a_module_outside() -> None:
    taken = {*PACKAGES, *sys.stdlib_module_names, *dependency_modules()}
    assert [path.name for path in (ROOT / "tests").rglob("*.py") if path.stem in taken] == []
