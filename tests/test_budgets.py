"""Size budgets: files and functions that a newcomer can read in one go. Failures list every offender."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = sorted(
    path for package in ("conf", "data", "train", "eval", "serve_export") for path in (ROOT / package).rglob("*.py")
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
FILE_LINES, FUNCTION_LINES, PARAMETERS, MAIN_LINES = 300, 60, 8, 30
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            yield node


def function_lines(function: Function) -> int:
    """From the first decorator to the last line."""
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    return (function.end_lineno or first) - first + 1


def num_parameters(function: Function) -> int:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))


def over_file_budget(paths: list[Path], budget: int) -> list[str]:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    return [f"{path.relative_to(ROOT)}: {count} lines > {budget}" for path, count in lines.items() if count > budget]


def over_function_budget(paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}: {function_lines(function)} lines"
        for path in paths
        for function in functions(path)
        if function_lines(function) > FUNCTION_LINES
    ]


def listed(offenders: list[str]) -> str:
    return "\n".join(["over budget:", *offenders])


def test_the_measures_count_as_worked_out_by_hand() -> None:
    tree = ast.parse(
        "class A:\n    @property\n    def f(self, a, /, b, *c, d, **e):\n        return (\n            1)\n"
    )
    function = tree.body[0].body[0]
    assert (function_lines(function), num_parameters(function)) == (4, 5)
    assert num_parameters(ast.parse("def g(ctx, a): ...").body[0]) == 1
    assert num_parameters(ast.parse("def g(a, self): ...").body[0]) == 2


def test_everything_is_looked_at() -> None:
    assert len(SOURCE) > 35
    assert Path(__file__) in TESTS
    assert sum(1 for path in SOURCE for _ in functions(path)) > 150


def test_source_files_fit_in_300_lines() -> None:
    offenders = over_file_budget(SOURCE, FILE_LINES)
    assert not offenders, listed(offenders)


def test_source_functions_fit_in_60_lines() -> None:
    offenders = over_function_budget(SOURCE)
    assert not offenders, listed(offenders)


def test_source_functions_have_at_most_8_parameters() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}: {num_parameters(function)} parameters"
        for path in SOURCE
        for function in functions(path)
        if num_parameters(function) > PARAMETERS
    ]
    assert not offenders, listed(offenders)


def test_main_files_fit_in_30_lines() -> None:
    mains = [path for path in SOURCE if path.name == "__main__.py"]
    assert len(mains) >= 3
    offenders = over_file_budget(mains, MAIN_LINES)
    assert not offenders, listed(offenders)


def test_test_files_fit_in_300_lines() -> None:
    offenders = over_file_budget(TESTS, FILE_LINES)
    assert not offenders, listed(offenders)


def test_test_functions_fit_in_60_lines() -> None:
    offenders = over_function_budget(TESTS)
    assert not offenders, listed(offenders)
