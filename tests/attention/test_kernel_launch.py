"""Every launch of a Triton kernel has lp's launch options."""

from __future__ import annotations

import ast
from pathlib import Path

LP = Path(__file__).resolve().parents[2] / "lp"


def test_every_launch_has_the_options() -> None:
    """A kernel that leaves FP fusion open rounds otherwise with Triton 3.10, and Triton 3.9 warns."""
    launches, bare = 0, []
    for path in LP.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "@triton.jit" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
                continue
            if not ast.unparse(node.func.value).endswith("_kernel"):
                continue
            launches += 1
            if not any(each.arg is None and ast.unparse(each.value) == "LAUNCH" for each in node.keywords):
                bare.append(f"{path.name}:{node.lineno}")
    assert launches >= 9 and not bare, bare
