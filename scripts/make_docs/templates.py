"""Reads from the source the texts with which errors are raised, as templates.

    raise StrategyError(f"{path}: not a strategy file" + (f": {why}" if why else ""))     ─▶
        <path>: not a strategy file[: <why>]

A value that is known only when the program runs stands in angle brackets, under its name in the
source. ``[text]`` is left out in some cases; ``[a | b]`` is one of both. Constants, variables of
the same function that hold a text, and functions that only make a text are filled in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mindresume"
DEPTH = 6  # texts within texts
# a template with fewer letters of its own only passes on the text of another error
_LETTERS = 10
REFUSAL = "Refusal"  # no error: the reason why a checkpoint is not taken
# {(function that returns texts, words in them): error that is raised with them elsewhere}
PASSED_ON = {
    ("_error_text", "requested checkpoint"): "MissingCheckpointError",
    ("fresh_start_refusal", ""): "MissingCheckpointError",
    ("_error_text", "none can be used"): "NoUsableCheckpointError",
}


@dataclass(frozen=True)
class Message:
    """Describes one text of an error, or of a REFUSAL. ``room``: the part of the package that has
    it."""

    error: str
    template: str
    room: str


@dataclass
class Source:
    """Holds the modules of the package. ``constants`` and ``functions``: those whose names are
    unique in it."""

    trees: dict[Path, ast.Module]
    constants: dict[str, ast.expr] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    classes: list[ast.ClassDef] = field(default_factory=list)

    @classmethod
    def read(cls) -> Source:
        """Reads all modules."""
        return cls.of(
            {
                path: ast.parse(path.read_text(encoding="utf-8"))
                for path in sorted(PACKAGE.rglob("*.py"))
            }
        )

    @classmethod
    def of(cls, trees: dict[Path, ast.Module]) -> Source:
        """Returns the source of these modules."""
        classes = [
            node
            for tree in trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        ]
        return cls(
            trees,
            _unique(map(_constants, trees.values())),
            _unique(map(_functions, trees.values())),
            classes,
        )

    def imported(self, tree: ast.Module) -> dict[str, ast.expr]:
        """Returns the constants that a module imports from others of the package."""
        found: dict[str, ast.expr] = {}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                path = ROOT.joinpath(*node.module.split("."))
                other = self.trees.get(path.with_suffix(".py")) or self.trees.get(
                    path / "__init__.py"
                )
                values = _constants(other) if other else {}
                found |= {
                    item.asname or item.name: values[item.name]
                    for item in node.names
                    if item.name in values
                }
        return found

    def exceptions(self, *roots: str) -> set[str]:
        """Returns the names of the classes that descend from one of ``roots``, and these."""
        found = set(roots)
        while True:
            more = {
                node.name
                for node in self.classes
                if any(isinstance(base, ast.Name) and base.id in found for base in node.bases)
            } - found
            if not more:
                return found
            found |= more


def messages(source: Source, errors: set[str]) -> list[Message]:
    """Returns the different texts of these errors and of refusals, in the order of the source."""
    found: dict[tuple[str, str], Message] = {}
    for path, tree in source.trees.items():
        room = _room(path)
        known = replace(
            source,
            constants={**source.constants, **source.imported(tree), **_constants(tree)},
            functions={**source.functions, **_functions(tree)},
        )
        for call, function in _calls(tree):
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            if name in errors and call.args:
                texts = [
                    text
                    for bound in _bindings(known, tree, call, function)
                    for text in _texts(_Renderer(known, function, bound), name, call)
                ]
                found |= _different(name, room, texts)
            elif name == REFUSAL and len(call.args) > 1:
                found |= _different(
                    REFUSAL, room, _choices(_Renderer(known, function), call.args[1])
                )
            elif isinstance(call.func, ast.Attribute) and call.func.attr == "refuse" and call.args:
                found |= _different(
                    REFUSAL, room, _choices(_Renderer(known, function), call.args[0])
                )
        for (function_name, words), name in PASSED_ON.items():
            made = _functions(tree).get(function_name)
            texts = (
                [
                    text
                    for value in _returned(made)
                    for text in _choices(_Renderer(known, made), value)
                ]
                if made
                else []
            )
            found |= _different(name, room, [text for text in texts if words in text])
    return list(found.values())


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _different(error: str, room: str, texts: Iterable[str]) -> dict[tuple[str, str], Message]:
    """Returns the texts that are more than the text of another error."""
    lines = [" ".join(text.replace("\n", " ⏎ ").split()) for text in texts]
    return {
        (error, line): Message(error, line, room)
        for line in lines
        if len(re.findall(r"[a-z]", re.sub(r"<[^>]*>", "", line))) >= _LETTERS
    }


def _bindings(
    source: Source, tree: ast.Module, call: ast.Call, function: ast.FunctionDef | None
) -> list[dict[str, str]]:
    """Returns the texts of the parameters of a function that returns an error, one for each of its
    calls; else one without texts."""
    if function is None or call not in _returned(function):
        return [{}]
    names = [argument.arg for argument in function.args.args if argument.arg != "self"]
    found = []
    for other, caller in _calls(tree):
        called = (
            other.func.id
            if isinstance(other.func, ast.Name)
            else other.func.attr
            if isinstance(other.func, ast.Attribute)
            else ""
        )
        if called == function.name:
            renderer = _Renderer(source, caller)
            found.append(
                {
                    key: text
                    for key, value in zip(names, other.args, strict=False)
                    if (text := renderer.known_text(value)) is not None
                }
            )
    return found or [{}]


def _choices(renderer: _Renderer, value: ast.expr) -> list[str]:
    """Returns the templates of an expression: several, if it chooses between texts."""
    if isinstance(value, ast.IfExp):
        return [
            text for branch in (value.body, value.orelse) for text in _choices(renderer, branch)
        ]
    if isinstance(value, ast.Name) and value.id not in renderer.bound:
        values = _assigned(renderer.function, value.id) or ()
        texts = [text for text in map(renderer.known_text, values) if text is not None]
        if texts:
            return texts
    return [renderer.text(value)]


def _texts(renderer: _Renderer, name: str, call: ast.Call) -> Iterator[str]:
    """Yields the texts with which an error is made."""
    initializer = _initializer(renderer.source, name)
    if initializer is None:
        yield from _choices(renderer, call.args[0])
        return
    names = [argument.arg for argument in initializer.args.args[1:]]
    position = min(_message_position(initializer), len(call.args) - 1)
    for text in _choices(renderer, call.args[position]):
        bound = {key: f"<{key}>" for key in names} | {names[position]: text}
        yield _Renderer(renderer.source, None, bound).text(_passed_on(initializer))


def _returned(function: ast.FunctionDef) -> list[ast.expr]:
    return [
        item.value
        for item in ast.walk(function)
        if isinstance(item, ast.Return) and item.value is not None
    ]


def _initializer(source: Source, name: str) -> ast.FunctionDef | None:
    """Returns the ``__init__`` of an error or of its nearest base that has one; None: it takes the
    text alone."""
    by_name = {node.name: node for node in source.classes}
    while node := by_name.get(name):
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                return item
        name = next((base.id for base in node.bases if isinstance(base, ast.Name)), "")
    return None


def _passed_on(initializer: ast.FunctionDef) -> ast.expr:
    """Returns the argument of ``super().__init__(...)``."""
    calls = [
        node
        for node in ast.walk(initializer)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "__init__"
    ]
    return calls[0].args[0]


def _message_position(initializer: ast.FunctionDef) -> int:
    """Returns the position of the parameter that is the text: the last one that is passed on."""
    names = [argument.arg for argument in initializer.args.args[1:]]
    used = {node.id for node in ast.walk(_passed_on(initializer)) if isinstance(node, ast.Name)}
    return max(position for position, name in enumerate(names) if name in used)


@dataclass
class _Renderer:
    """Makes templates of expressions in one function. ``bound``: the texts of its parameters, if
    they are known."""

    source: Source
    function: ast.FunctionDef | None
    bound: dict[str, str] = field(default_factory=dict)
    depth: int = 0

    def text(self, node: ast.expr) -> str:
        """Returns the template of an expression."""
        found = self.known_text(node)
        return f"<{_name(node)}>" if found is None else found

    def known_text(self, node: ast.expr) -> str | None:
        """Returns the template of an expression that makes a text; None for any other value."""
        if isinstance(node, ast.Constant):
            return str(node.value) if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(part.value) if isinstance(part, ast.Constant) else self.text(part.value)
                for part in node.values
                if isinstance(part, (ast.Constant, ast.FormattedValue))
            )
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.known_text(node.left), self.known_text(node.right)
            return (
                None
                if left is None and right is None
                else self.text(node.left) + self.text(node.right)
            )
        if isinstance(node, ast.IfExp):
            return self._alternatives(node.body, node.orelse)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            return self._alternatives(*node.values)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            return self.known_text(node.value)
        if isinstance(node, ast.Name):
            return self._of_name(node.id)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        return None

    def _alternatives(self, *nodes: ast.expr) -> str | None:
        if all(self.known_text(node) is None for node in nodes):
            return None
        texts = list(dict.fromkeys(self.text(node) for node in nodes))
        whole = [text for text in texts if text]
        return whole[0] if len(texts) == 1 else f"[{' | '.join(whole)}]"

    def _of_name(self, name: str) -> str | None:
        if name in self.bound:
            return self.bound[name]
        values = _assigned(self.function, name)
        if values is None:
            constant = self.source.constants.get(name)
            if isinstance(constant, ast.Constant) and type(constant.value) is int:
                return str(constant.value)
            return None if constant is None else self.known_text(constant)
        if not values or self.depth >= DEPTH:
            return None
        inner = replace(self, depth=self.depth + 1)
        texts = [inner.known_text(value) for value in values]
        return inner._alternatives(*values) if None not in texts else None

    def _of_call(self, node: ast.Call) -> str | None:
        function, arguments = node.func, node.args
        name = function.id if isinstance(function, ast.Name) else ""
        if isinstance(function, ast.Attribute):
            if function.attr == "join" and isinstance(function.value, ast.Constant) and arguments:
                return self._joined(str(function.value.value), arguments[0])
            if function.attr in ("format", "removeprefix", "removesuffix", "rstrip"):
                return self.known_text(function.value)
            name = (
                function.attr
                if isinstance(function.value, ast.Name) and function.value.id == "self"
                else ""
            )
        if name == "listed" and arguments:
            return f"<{_name(arguments[0])}>, ..."
        if name == "counted" and isinstance(arguments[-1], ast.Constant):
            return f"<{_name(arguments[0])}> {arguments[-1].value}[s]"
        made = self.source.functions.get(name)
        if made is None or self.depth >= DEPTH:
            return None
        returned = _returned(made)
        names = [argument.arg for argument in made.args.args if argument.arg != "self"]
        known = {
            key: text
            for key, value in zip(names, arguments, strict=False)
            if (text := self.known_text(value)) is not None
        }
        inner = _Renderer(self.source, made, known, self.depth + 1)
        if not returned or any(inner.known_text(value) is None for value in returned):
            return None
        return inner._alternatives(*returned)

    def _joined(self, separator: str, node: ast.expr) -> str:
        if isinstance(node, ast.Name) and isinstance(
            constant := self.source.constants.get(node.id), (ast.Tuple, ast.List)
        ):
            values = [self.known_text(item) for item in constant.elts]
            if None not in values:
                return separator.join(map(str, values))
        if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
            return f"{self.text(node.elt)}{separator}..."
        return f"<{_name(node)}>{separator}..."


def _words(name: str) -> str:
    return name.strip("_").replace("_", " ").lower()


def _name(node: ast.expr) -> str:
    """Returns a name for a value that is known only when the program runs."""
    if isinstance(node, ast.Name):
        return _words(node.id)
    if isinstance(node, ast.Attribute):
        return (
            f"type of {_name(node.value.args[0])}"
            if node.attr == "__name__" and isinstance(node.value, ast.Call) and node.value.args
            else _words(node.attr)
        )
    if isinstance(node, ast.Subscript):
        return (
            _words(node.slice.value)
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
            else _name(node.value)
        )
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called == "len" and node.args:
            return f"number of {_name(node.args[0])}"
        if called == "map" and len(node.args) > 1:
            return _name(node.args[1])
        if called == "os.path.join" and node.args:
            return _name(node.args[-1])
        if called.endswith(".get") and node.args and isinstance(node.args[0], ast.Constant):
            return _words(str(node.args[0].value))
        if node.args and not isinstance(node.args[0], (ast.Constant, ast.Lambda)):
            return _name(node.args[0])
        return _name(
            node.func.value
            if called.endswith(".format") and isinstance(node.func, ast.Attribute)
            else node.func
        )
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, (ast.Add, ast.Sub)):
            return (
                f"{_name(node.left)} {'+' if isinstance(node.op, ast.Add) else '-'} "
                f"{_name(node.right)}"
            )
        return _name(node.right if isinstance(node.left, ast.Constant) else node.left)
    if isinstance(node, (ast.BoolOp, ast.List, ast.Tuple, ast.Set)):
        values = node.values if isinstance(node, ast.BoolOp) else node.elts
        return _name(values[0]) if values else "..."
    if isinstance(node, ast.IfExp):
        return _name(node.body)
    if isinstance(node, (ast.Starred, ast.NamedExpr, ast.UnaryOp)):
        return _name(
            node.target
            if isinstance(node, ast.NamedExpr)
            else node.operand
            if isinstance(node, ast.UnaryOp)
            else node.value
        )
    if isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp)):
        return _name(node.elt)
    return str(node.value) if isinstance(node, ast.Constant) else "..."


def _assigned(function: ast.FunctionDef | None, name: str) -> list[ast.expr] | None:
    """Returns the values that a variable of ``function`` gets; empty if some are not known; None:
    it is no such variable."""
    return None if function is None else _variables(function).get(name)


@cache
def _variables(function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """Returns the values of each variable of a function, as ``_assigned``."""
    values: dict[str, list[ast.expr]] = {}
    unknown = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    targets = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    targets.add(target)
                    values.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            unknown.add(node.name)
    unknown |= {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in targets
    }
    return {**values, **dict.fromkeys(unknown, [])}


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, ast.FunctionDef | None]]:
    """Yields each call with the innermost function that holds it."""
    waiting: list[tuple[ast.AST, ast.FunctionDef | None]] = [(tree, None)]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, ast.Call):
            yield node, function
        inner = node if isinstance(node, ast.FunctionDef) else function
        waiting += [(child, inner) for child in reversed([*ast.iter_child_nodes(node)])]


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
        and target.id.lstrip("_").isupper()
        and isinstance(node.value, (ast.Constant, ast.Tuple, ast.List, ast.JoinedStr))
    }


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _unique(modules: Iterable[dict[str, Node]]) -> dict[str, Node]:
    """Returns the definitions of all modules, without the names that two modules define."""
    known: dict[str, Node] = {}
    ambiguous: set[str] = set()
    for found in modules:
        ambiguous |= found.keys() & known.keys()
        known |= found
    return {name: node for name, node in known.items() if name not in ambiguous}
