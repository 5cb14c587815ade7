"""Weights of inner layers that a module's code reads directly: such layers cannot be packed.

Found in the source of its class: chains of attributes and indices that start from ``self`` and end
in ``.weight``, also through local variables, loops over lists of modules and arguments of the
class's own methods. Classes without source read nothing.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any, NamedTuple, TypeAlias, cast

from torch import nn

#: Names of modules, one inside another; "*" is any.
Path: TypeAlias = "tuple[str, ...]"
#: A condition in a method's code, and the value of it for which the weight is read.
Test: TypeAlias = "tuple[CodeType, bool]"
_Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"

#: Parts of the names of methods that do not run on a packed model: weights are initialised before
#: there are any to pack, and attention of diffusers joins its projections on request.
_NOT_RUN = ("init", "reset", "fuse_projections")


@dataclass(frozen=True)
class Read:
    """Where a module's code reads the weight of a layer inside it.

    Attributes:
        path: of the layer, from the module.
        tests: the conditions around it.
        asks: whether the method looks at ``_is_quantized``, and does otherwise in a
            quantised model.
    """

    path: Path
    tests: tuple[Test, ...]
    asks: bool


def readers(model: nn.Module, happens: Callable[[Read, nn.Module], bool]) -> dict[str, str]:
    """Names of modules whose weight an outer module reads, with the name of the outer module's
    class.

    Args:
        model: any.
        happens: whether a module performs a read that its class's code has.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for read in weight_reads(cast(Hashable, type(module))):
            if happens(read, module):
                for layer in _expanded(module, read.path):
                    found[f"{name}.{layer}" if name else layer] = type(module).__name__
    return found


def _expanded(module: nn.Module, path: Path) -> Iterator[str]:
    """The names of the modules inside a module that a path leads to."""
    if not path:
        return
    for child, inner in module._modules.items():
        if inner is not None and path[0] in (child, "*"):
            if len(path) == 1:
                yield child
            else:
                yield from (f"{child}.{rest}" for rest in _expanded(inner, path[1:]))


@cache
def weight_reads(cls: Any) -> tuple[Read, ...]:
    """The reads that a module's class has, with those of its bases."""
    functions: list[tuple[str, _Function]] = []
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        definition = _classes(base.__module__).get(base.__qualname__)
        for node in definition.body if definition is not None else ():
            if isinstance(node, _FUNCTIONS) and not any(part in node.name for part in _NOT_RUN):
                functions.append((base.__module__, node))
    # Methods that read a weight, or call such a method: most of a model's are neither.
    reading = {node.name for _, node in functions if _facts(node).reads}
    while callers := {node.name for _, node in functions if _facts(node).calls & reading} - reading:
        reading |= callers
    arguments: dict[str, dict[str, set[Path]]] = {}
    while True:
        known = sum(len(paths) for bound in arguments.values() for paths in bound.values())
        methods = [
            _Method(module, node, functions, arguments)
            for module, node in functions
            if node.name in reading
        ]
        if sum(len(paths) for bound in arguments.values() for paths in bound.values()) == known:
            return tuple(dict.fromkeys(read for method in methods for read in method.reads))


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class _Facts(NamedTuple):
    """What a method does: whether it reads ``.weight``, which methods of ``self`` it calls, and
    whether it looks at ``_is_quantized``.
    """

    reads: bool
    calls: frozenset[str]
    asks: bool


@cache
def _facts(function: _Function) -> _Facts:
    reads = asks = False
    calls = set()
    for node in ast.walk(function):
        match node:
            case ast.Attribute(attr="weight"):
                reads = True
            case ast.Call(func=ast.Attribute(attr=name, value=ast.Name(id="self"))):
                calls.add(name)
            case ast.Constant(value="_is_quantized"):
                asks = True
    return _Facts(reads, frozenset(calls), asks)


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The definitions of classes in a module's source, by their qualified names."""
    found: dict[str, ast.ClassDef] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                found[prefix + child.name] = child
                walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, _FUNCTIONS):
                walk(child, f"{prefix}{child.name}.<locals>.")
            else:
                walk(child, prefix)

    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # it has none
        return found
    walk(ast.parse(source), "")
    return found


class _Method:
    """One method's reads, and the arguments that it passes to other methods."""

    def __init__(
        self,
        module: str,
        node: _Function,
        functions: list[tuple[str, _Function]],
        arguments: dict[str, dict[str, set[Path]]],
    ) -> None:
        self.module = module
        self.asks = _facts(node).asks
        self.functions = {function.name: function for _, function in functions}
        self.arguments = arguments
        self.variables = {name: set(paths) for name, paths in arguments.get(node.name, {}).items()}
        self.reads: list[Read] = []
        for statement in node.body:
            self.walk(statement, ())

    def walk(self, node: ast.AST, tests: tuple[Test, ...]) -> None:
        match node:
            case ast.Attribute(attr="weight"):
                self.reads += [
                    Read(path, tests, self.asks) for path in sorted(self.paths(node.value)) if path
                ]
            case ast.If(test=test) | ast.IfExp(test=test):
                code = compile(ast.Expression(test), self.module, "eval")
                self.walk(test, tests)
                for branch, expected in ((node.body, True), (node.orelse, False)):
                    for statement in branch if isinstance(branch, list) else [branch]:
                        self.walk(statement, (*tests, (code, expected)))
                return
            case ast.Assign():
                for target in node.targets:
                    self.bind(target, node.value)
            case ast.NamedExpr():
                self.bind(node.target, node.value)
            case ast.For() | ast.comprehension():
                self.bind_items(node.target, node.iter)
            case ast.Call(func=ast.Attribute(attr=name, value=ast.Name(id="self"))) if (
                name in self.functions
            ):
                self.bind_arguments(name, node)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                for generator in node.generators:  # they bind the names that the elements use
                    self.walk(generator, tests)
        for child in ast.iter_child_nodes(node):
            self.walk(child, tests)

    def paths(self, node: ast.AST) -> set[Path]:
        """The modules that an expression may be, from ``self``."""
        match node:
            case ast.Name(id="self"):
                return {()}
            case ast.Name(id=name):
                return self.variables.get(name, set())
            case ast.Attribute(value=value, attr=name):
                return {(*path, name) for path in self.paths(value)}
            case ast.Subscript(value=value, slice=ast.Slice()):
                return self.paths(value)
            case ast.Subscript(value=value, slice=index):
                key = str(index.value) if isinstance(index, ast.Constant) else "*"
                return {(*path, key) for path in self.paths(value)}
            case ast.Call(
                func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]
            ):
                return {(*path, name) for path in self.paths(value)}
            case ast.IfExp(body=body, orelse=orelse):
                return self.paths(body) | self.paths(orelse)
            case ast.NamedExpr(value=value):
                return self.paths(value)
        return set()

    def bind(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Name):
            self.variables.setdefault(target.id, set()).update(self.paths(value))
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its_value in zip(target.elts, value.elts, strict=False):
                self.bind(one, its_value)

    def bind_items(self, target: ast.AST, items: ast.AST) -> None:
        match items, target:
            case ast.Call(func=ast.Name(id="enumerate"), args=[values, *_]), ast.Tuple(
                elts=[_, one]
            ):
                self.bind_items(one, values)
            case ast.Call(func=ast.Name(id="zip"), args=lists), ast.Tuple(elts=targets):
                for one, values in zip(targets, lists, strict=False):
                    self.bind_items(one, values)
            case ast.Call(
                func=ast.Attribute(attr="items" | "named_children", value=values)
            ), ast.Tuple(elts=[_, one]):
                self.bind_items(one, values)
            case ast.Call(func=ast.Attribute(attr="values" | "children", value=values)), _:
                self.bind_items(target, values)
            case ast.Tuple(elts=values) | ast.List(elts=values), _:
                for value in values:
                    self.bind(target, value)
            case _, ast.Name(id=name):
                self.variables.setdefault(name, set()).update(
                    (*path, "*") for path in self.paths(items)
                )

    def bind_arguments(self, name: str, call: ast.Call) -> None:
        """Keep what modules a method of the class is called with."""
        function = self.functions[name]
        static = any(
            isinstance(mark, ast.Name) and mark.id == "staticmethod"
            for mark in function.decorator_list
        )
        parameters = [
            argument.arg for argument in (*function.args.posonlyargs, *function.args.args)
        ][0 if static else 1 :]
        given = [
            *zip(parameters, call.args, strict=False),
            *((word.arg, word.value) for word in call.keywords if word.arg),
        ]
        for parameter, value in given:
            if paths := self.paths(value) - {()}:
                self.arguments.setdefault(name, {}).setdefault(parameter, set()).update(paths)
