"""What the code of a TorchScript module does to its attributes, read from its graph.

It is what ``model/src/engines/torch/shim.cpp`` reads in the linked engine, by the same rules.
Nothing here imports torch.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

#: Nodes through which a value is followed to all inputs.
_PASSED_ON = {
    "prim::TupleConstruct",
    "prim::ListConstruct",
    "prim::unchecked_cast",
    "prim::TupleUnpack",
    "prim::ListUnpack",
    "prim::TupleIndex",
    "prim::unchecked_unwrap_optional",
    "aten::__getitem__",
}

#: Nodes into which nobody can look.
_OPAQUE = {"prim::CallMethod", "prim::CallFunction", "prim::fork", "prim::awaitable"}

#: A name by which a schema says that two tensors are one memory, and whether it is written.
_ALIAS = re.compile(r"\(([a-z][a-z0-9]*)(!?)(?: -> [^()]*)?\)")


@dataclass
class Effects:
    """What running ``forward`` may do besides returning.

    Attributes:
        written: Tensors that it may change, by path from the module.
        surely: Those of them, and other attributes, that it changes whenever it runs.
        assigned: Attributes that it may assign to.
        writes_unknown: Whether it has code into which nobody can look.
        draws: Whether it may draw random numbers.
    """

    written: set[str] = field(default_factory=set)
    surely: set[str] = field(default_factory=set)
    assigned: set[str] = field(default_factory=set)
    writes_unknown: bool = False
    draws: bool = False


@dataclass
class Term:
    """An argument or a return of an operator: its name, its aliases, and whether it is written."""

    name: str
    aliases: set[str]
    is_written: bool


def schema(text: str) -> tuple[list[Term], list[Term]] | None:
    """Return the arguments and returns of an operator, from the text of its schema.

    ``None``: it has none.
    """
    begin = text.find("(")
    end = _closing(text, begin) if begin > 0 and not text.startswith("(") else -1
    if end < 0 or not text[end + 1 :].lstrip().startswith("->"):
        return None
    returns = text[end + 1 :].lstrip()[2:].strip()
    if returns.startswith("(") and _closing(returns, 0) == len(returns) - 1:
        returns = returns[1:-1]
    arguments = [part for part in _split(text[begin + 1 : end]) if part != "*"]
    return [_term(part) for part in arguments], [_term(part) for part in _split(returns)]


def _term(text: str) -> Term:
    declared = text.split("=", 1)[0].strip()
    found = _ALIAS.findall(declared)
    name = declared.rsplit(" ", 1)[-1] if " " in declared else ""
    return Term(name, {alias for alias, _ in found}, any(written for _, written in found))


def _letters(text: str, begin: int = 0) -> Iterator[tuple[int, str, int]]:
    """Yield place and letter of what is outside quotes, and the brackets open behind it."""
    depth, quote = 0, ""
    for at in range(begin, len(text)):
        letter = text[at]
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
            yield at, letter, depth


def _closing(text: str, begin: int) -> int:
    """Return where the bracket at ``begin`` ends; -1: nowhere."""
    ends = (at for at, letter, depth in _letters(text, begin) if letter in ")]}" and depth == 0)
    return next(ends, -1)


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    parts, begin = [], 0
    for at, letter, depth in _letters(text):
        if letter == "," and depth == 0:
            parts.append(text[begin:at].strip())
            begin = at + 1
    parts.append(text[begin:].strip())
    return [part for part in parts if part]


class _Graph:
    """A graph with all calls inlined, and where each value comes from."""

    def __init__(self, graph: Any) -> None:
        self._module = next(iter(graph.inputs())).unique()
        #: For each input of a loop's body: the loop, and its index.
        self._of_loop: dict[int, tuple[Any, int]] = {}
        #: Nodes, and whether each always runs.
        self.nodes: list[tuple[Any, bool]] = []
        self._walk(graph.nodes(), True)

    def _walk(self, nodes: Iterator[Any], always: bool) -> None:
        for node in nodes:
            self.nodes.append((node, always))
            for block in node.blocks():
                if node.kind() == "prim::Loop":
                    for index, value in enumerate(block.inputs()):
                        self._of_loop[value.unique()] = (node, index)
                self._walk(block.nodes(), False)

    def path(self, node: Any) -> str:
        """Return the path of the attribute that ``node`` gets or sets; empty: not the module's."""
        name = str(node.s("name"))
        value = node.inputsAt(0)
        while value.unique() != self._module:
            node = value.node()
            if node.kind() != "prim::GetAttr":
                return ""
            name = f"{node.s('name')}.{name}"
            value = node.inputsAt(0)
        return name

    def origins(self, value: Any) -> set[str]:
        """Return the paths of the attributes that a value may be, or be a view of."""
        seen: set[int] = set()
        found: set[str] = set()
        left = [value]
        while left:
            value = left.pop()
            if value.unique() in seen:
                continue
            seen.add(value.unique())
            node = value.node()
            if node.kind() == "prim::GetAttr":
                found.add(self.path(node))
            else:
                left.extend(self._sources(value, node, node.kind()))
        return found

    def _sources(self, value: Any, node: Any, kind: str) -> list[Any]:
        offset = value.offset()
        if kind == "prim::If":
            return [list(block.outputs())[offset] for block in node.blocks()]
        if kind == "prim::Loop":
            body = next(iter(node.blocks()))
            return [node.inputsAt(2 + offset), list(body.outputs())[1 + offset]]
        if kind == "prim::Param":
            loop, index = self._of_loop.get(value.unique(), (None, 0))
            if loop is None or index == 0:
                return []
            body = next(iter(loop.blocks()))
            return [loop.inputsAt(1 + index), list(body.outputs())[index]]
        if kind in _PASSED_ON:
            return list(node.inputs())
        terms = schema(node.schema())
        if terms is None or offset >= len(terms[1]):
            return []
        views = terms[1][offset].aliases
        pairs = zip(terms[0], node.inputs(), strict=False)
        return [source for argument, source in pairs if argument.aliases & views]


def effects(graph: Any, optional_tensor: Any, modules: Collection[str]) -> Effects:
    """Return what the code of ``forward`` does, from its graph with all calls inlined.

    Args:
        graph: The graph.
        optional_tensor: The type ``Optional[Tensor]``.
        modules: Full names of the classes of the module and those below it.
    """
    found, whole = Effects(), _Graph(graph)
    for node, always in whole.nodes:
        kind = node.kind()
        written: set[str] = set()
        terms = None if kind in _OPAQUE or kind == "prim::SetAttr" else schema(node.schema())
        if kind in _OPAQUE:
            found.writes_unknown = found.draws = True
        elif kind == "prim::SetAttr":
            # An object that is no module, such as that of `torch.no_grad()`, holds no tensor of the
            # module.
            owner = node.inputsAt(0).type()
            if owner.kind() != "ClassType" or owner.qualified_name() in modules:
                written = {whole.path(node)}
                found.assigned |= written
        elif terms is not None:
            for argument, value in zip(terms[0], node.inputs(), strict=False):
                is_tensor = value.type().isSubtypeOf(optional_tensor)
                # Normalisation updates its running statistics although its schema does not say so.
                is_running = argument.name.startswith("running_")
                if (argument.is_written and is_tensor) or is_running:
                    written |= whole.origins(value)
        found.written |= written
        if always:
            found.surely |= written
        found.draws = found.draws or node.isNondeterministic()
    # A tensor of another object is written, which may be one of the module.
    found.writes_unknown = found.writes_unknown or "" in found.written
    for paths in (found.written, found.surely, found.assigned):
        paths.discard("")
    return found


@dataclass
class Declared:
    """The attributes of a class, in their order, and which of them are buffers."""

    order: dict[str, int] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)


def declared(path: str) -> dict[str, Declared]:
    """Return what the classes in a TorchScript file declare, by their full names."""
    found: dict[str, Declared] = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            _, code, inside = name.partition("/code/")
            if code and inside.endswith(".py"):
                text = archive.read(name).decode("utf-8", "replace")
                found |= _classes(inside.removesuffix(".py").replace("/", "."), text)
    return found


def _classes(prefix: str, text: str) -> dict[str, Declared]:
    found: dict[str, Declared] = {}
    current: Declared | None = None
    for line in text.splitlines():
        if begins := re.match(r"class (\w+)\(Module\):", line):
            current = found[f"{prefix}.{begins[1]}"] = Declared()
        elif current is None or re.match(r"\S|  def ", line):
            current = None
        elif buffers := re.match(r"  __buffers__ = \[(.*)\]", line):
            current.buffers = set(re.findall(r'"([^"]*)"', buffers[1]))
        elif attribute := re.match(r'  (?:(\w+) : |__annotations__\["([^"]*)"\] = )', line):
            current.order[attribute[1] or attribute[2]] = len(current.order)
    return found
