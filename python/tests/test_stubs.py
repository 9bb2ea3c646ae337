"""What type checkers read: ``_native.pyi`` has the names and parameters that Rust gives."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import ebbflow
from ebbflow import _native

STUB = Path(ebbflow.__file__).with_name("_native.pyi")

#: The parameters of a function; ``None`` for an attribute.
Parameters = list[str] | None


def parameters(function: ast.FunctionDef) -> Parameters:
    if function.decorator_list:
        return None
    return [argument.arg for argument in function.args.args]


def described() -> dict[str, Parameters]:
    """Return what the stub has: functions, classes with their constructors, and their methods."""
    found: dict[str, Parameters] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = parameters(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = []
            for part in node.body:
                if not isinstance(part, ast.FunctionDef):
                    continue
                if part.name == "__init__":
                    found[node.name] = [argument.arg for argument in part.args.args[1:]]
                elif not part.name.startswith("_"):
                    found[f"{node.name}.{part.name}"] = parameters(part)
    return found


def given() -> dict[str, Parameters]:
    """Return what the module has."""
    found: dict[str, Parameters] = {}
    for name, value in vars(_native).items():
        if name.startswith("_"):
            continue
        if not inspect.isclass(value):
            found[name] = list(inspect.signature(value).parameters)
            continue
        # A class without a constructor has no signature.
        has_text = getattr(value, "__text_signature__", None) is not None
        found[name] = list(inspect.signature(value).parameters) if has_text else []
        for part, method in vars(value).items():
            if not part.startswith("_"):
                is_attribute = inspect.isgetsetdescriptor(method)
                names = None if is_attribute else list(inspect.signature(method).parameters)
                found[f"{name}.{part}"] = names
    return found


def test_the_stub_has_the_names_and_parameters_of_the_module() -> None:
    assert described() == given()


def test_type_checkers_find_the_types_of_the_installed_package() -> None:
    assert STUB.with_name("py.typed").is_file()
