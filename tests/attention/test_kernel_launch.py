"""Every launch of a Triton kernel has lp's launch options."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_launch_has_the_options() -> None:
    """A kernel that leaves FP fusion open rounds otherwise with Triton 3.10, and Triton 3.9 warns."""
    paths = [*ROOT.joinpath("lp").rglob("*.py"), *ROOT.joinpath("tests").rglob("*.py")]
    sources = {path: path.read_text(encoding="utf-8") for path in paths}
    trees = {path: ast.parse(source) for path, source in sources.items() if "triton" in source or "_kernel" in source}
    kernels: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and "triton.jit" in map(ast.unparse, node.decorator_list):
                kernels.add(node.name)
    launched: set[str] = set()
    bare: list[str] = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
                continue
            name = ast.unparse(node.func.value).rpartition(".")[2]
            if name in kernels:
                launched.add(name)
                if not any(each.arg is None and ast.unparse(each.value) == "LAUNCH" for each in node.keywords):
                    bare.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not bare
    assert {name for name in kernels if name.endswith("_kernel")} <= launched, "a launch is not seen"
