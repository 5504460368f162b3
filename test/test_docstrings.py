"""Required docstring contents: shapes of tensors, and raised exceptions. Getters need no docstring."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from test.sources import ROOT, source_files

Function = ast.FunctionDef | ast.AsyncFunctionDef
NO_FAILURE = {"StopIteration", "AssertionError", "SystemExit", "NotImplementedError", "AttributeError"}


class Documented:
    """A public function with its docstring."""

    def __init__(self, file: Path, node: Function, owner: ast.ClassDef | None) -> None:
        self.node = node
        self.name = f"{file.relative_to(ROOT)}:{node.lineno} {owner.name + '.' if owner else ''}{node.name}"
        self.doc = ast.get_docstring(node) or ""
        if owner is not None and node.name in ("__init__", "__call__"):
            self.doc += ast.get_docstring(owner) or ""
        arguments = [*node.args.args, *node.args.kwonlyargs, *filter(None, [node.args.vararg])]
        annotations = [argument.annotation for argument in arguments] + [node.returns]
        self.annotations = [ast.unparse(annotation) for annotation in annotations if annotation is not None]

    @property
    def refers_elsewhere(self) -> bool:
        """Whether the docstring refers to another one."""
        return self.doc.startswith(("See ", "As naive"))

    @property
    def is_handler(self) -> bool:
        """Whether it handles a route: clients see its docstring, and the route lists the errors."""
        return isinstance(self.node, ast.AsyncFunctionDef) and self.annotations[:1] == ["Context"]

    @property
    def is_getter(self) -> bool:
        """Whether it only returns an attribute, a name or a constant: the name and the type say everything."""
        body = self.node.body[1:] if ast.get_docstring(self.node) else self.node.body
        statement = body[0] if len(body) == 1 else None
        return isinstance(statement, ast.Return) and isinstance(
            statement.value, ast.Attribute | ast.Name | ast.Constant | None
        )

    def raised(self) -> set[str]:
        """Return the names of the exceptions that it raises itself."""
        nodes = (one.exc for one in ast.walk(self.node) if isinstance(one, ast.Raise) and one.exc is not None)
        names = {ast.unparse(one.func if isinstance(one, ast.Call) else one).split(".")[-1] for one in nodes}
        return {name for name in names if name in exceptions()} - NO_FAILURE


@cache
def trees() -> tuple[tuple[Path, ast.Module], ...]:
    return tuple((file, ast.parse(file.read_text(encoding="utf-8"))) for file in sorted(source_files()))


@cache
def exceptions() -> frozenset[str]:
    """Return the names of built-in exceptions and this project's exception classes."""
    found = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
    classes = [node for _, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while more := {c.name for c in classes if {ast.unparse(base) for base in c.bases} & found} - found:
        found |= more
    return frozenset(found)


def public_functions() -> Iterator[Documented]:
    """Yield public functions and methods of public classes. __init__ and __call__ are included, getters are not."""

    def enter(file: Path, node: ast.AST, owner: ast.ClassDef | None) -> Iterator[Documented]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
                yield from enter(file, child, child)
            elif isinstance(child, Function) and (
                not child.name.startswith("_") or child.name in ("__init__", "__call__")
            ):
                documented = Documented(file, child, owner)
                if not documented.is_getter:
                    yield documented

    for file, tree in trees():
        yield from enter(file, tree, None)


def test_functions_of_tensors_name_shapes() -> None:
    silent = [
        one.name
        for one in public_functions()
        if any("Tensor" in annotation.replace("HostTensors", "") for annotation in one.annotations)
        and "[" not in one.doc
        and not one.refers_elsewhere
    ]
    assert not silent, "say the shapes, as [T, C] fp16: " + ", ".join(silent)


def test_functions_that_raise_say_so() -> None:
    silent = [
        f"{one.name} ({', '.join(sorted(one.raised()))})"
        for one in public_functions()
        if one.raised()
        and "aises" not in one.doc
        and not one.refers_elsewhere
        and not one.is_handler
        and not any(name in one.doc for name in one.raised())
    ]
    assert not silent, "say what is raised: " + ", ".join(silent)


def test_the_kernel_contract_is_whole() -> None:
    tree = ast.parse((ROOT / "rwkv_batch/model/ops.py").read_text(encoding="utf-8"))
    protocols = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    functions = [node for one in protocols for node in one.body if isinstance(node, Function)]
    assert functions and all(ast.get_docstring(node) for node in functions)
