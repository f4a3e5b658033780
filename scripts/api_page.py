"""docs/reference/api.md: every public name of lp with its signature and docstring, read from the source.

python scripts/api_page.py            # writes the page
python scripts/api_page.py --check    # writes nothing; exit code 1 if the page differs
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "api.md"
MAX_WIDTH = 100  # of a signature on one line
HEAD = """# Public interface

Every name that `import lp` has, with its signature and docstring. `python scripts/api_page.py` writes this page from
the code; a test fails while the two differ. How the names are used is in [the guide](../guide/python.md).
"""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(entry(name, node) for name, node in sorted(public().items(), key=by_name))])


def by_name(item: tuple[str, ast.stmt]) -> str:
    return item[0].lower()


def public() -> dict[str, ast.stmt]:
    """The definition of every name in `lp.__all__`, by the imports that lp/__init__.py has for type checkers."""
    tree = ast.parse((ROOT / "lp" / "__init__.py").read_text(encoding="utf-8"))
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lp.")
    ]
    module_of = {alias.name: str(node.module) for node in imports for alias in node.names}
    exported = next(node for node in tree.body if isinstance(node, ast.Assign) and "__all__" in names_of(node))
    return {name: definition(module_of[name], name) for name in ast.literal_eval(exported.value)}


def definition(module: str, name: str) -> ast.stmt:
    """The statement of a module that defines a name."""
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8"))
    return next(node for node in reversed(tree.body) if name in names_of(node))


def names_of(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    return [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]


def entry(name: str, node: ast.stmt) -> str:
    """The section of one public name."""
    if isinstance(node, Function):
        return "\n".join([f"## {name}\n", code(signature(name, node)), *text(node)])
    if not isinstance(node, ast.ClassDef):
        return "\n".join([f"## {name}\n", code(ast.unparse(node))])
    parts = [f"## {name}\n", *construction(node), *text(node)]
    for base in map(ast.unparse, node.bases):
        if base in public():
            parts.append(f"It has what [{base}](#{base.lower()}) has, too.\n")
    for method in (each for each in node.body if isinstance(each, Function) and not each.name.startswith("_")):
        parts.append(f"### {name}.{method.name}\n")
        if not any("property" in ast.unparse(each) for each in method.decorator_list):
            parts.append(code(signature(method.name, method)))
        parts += text(method)
    return "\n".join(parts)


def construction(node: ast.ClassDef) -> Iterator[str]:
    """How an object of a class is made: its `__init__`, the fields of a dataclass, or the members of an enum."""
    init = next((each for each in node.body if isinstance(each, Function) and each.name == "__init__"), None)
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and not ast.unparse(each).startswith("_")]
    members = [each for each in node.body if isinstance(each, ast.Assign)]
    if init is not None:
        init.returns = None
        yield code(signature(node.name, init))
    elif any("dataclass" in ast.unparse(each) for each in node.decorator_list) and fields:
        yield code("\n".join([f"{node.name}(", *(f"    {ast.unparse(each)}," for each in fields), ")"]))
    elif any("Enum" in ast.unparse(base) for base in node.bases):
        yield f"One of {', '.join(f'`{ast.unparse(each.value)}`' for each in members)}.\n"


def signature(name: str, node: Function) -> str:
    """The call as the source has it, on several lines where it is long."""
    arguments = node.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        del arguments.args[0]
    arrow = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    defaults: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults))
    defaults += arguments.defaults
    parts = [one(argument, default) for argument, default in zip(arguments.args, defaults, strict=True)]
    if arguments.vararg or arguments.kwonlyargs:
        parts.append(f"*{one(arguments.vararg, None) if arguments.vararg else ''}")
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parts += [one(argument, default) for argument, default in named]
    if arguments.kwarg:
        parts.append(f"**{one(arguments.kwarg, None)}")
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) <= MAX_WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){arrow}"])


def one(argument: ast.arg, default: ast.expr | None) -> str:
    """An argument with its type and its default."""
    return ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")


def text(node: Function | ast.ClassDef) -> Iterator[str]:
    """The docstring: its sentences as text, its lists of arguments and errors as a block."""
    doc = ast.get_docstring(node) or ""
    found = re.search(r"^(Args|Attributes|Raises|Returns|Yields):$", doc, flags=re.MULTILINE)
    said, lists = (doc[: found.start()], doc[found.start() :]) if found else (doc, "")
    if said.strip():
        yield f"{said.strip()}\n"
    if lists:
        yield code(lists, "text")


def code(block: str, language: str = "python") -> str:
    """A block of code."""
    return f"```{language}\n{block.strip()}\n```\n"


def main(arguments: list[str]) -> int:
    """Write the page, or compare it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page differs")
    check = parser.parse_args(arguments).check
    made = page()
    if not check:
        PAGE.write_text(made, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made:
        print("docs/reference/api.md is not up to date; run python scripts/api_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
