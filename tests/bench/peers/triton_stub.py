"""SpecForge imports Triton, which has no build for CPUs: what it names of it, and never runs here."""

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class TritonStub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`import triton` and whatever of it is named; nothing of it is ever run."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] != "triton":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.jit = lambda function: function
        module.constexpr = SimpleNamespace
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """From now on `import triton` works.

    After transformers, whose import asks torch for what only the real one has.
    """
    importlib.import_module("transformers.modeling_utils")
    sys.meta_path.insert(0, TritonStub())
