"""``docs/behaviours.md`` and the tests that it names give each other the same ids."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: The first and the last number of each range of ids. Numbers between ranges stand for nothing.
RANGES = {
    "S0": [(1, 14), (20, 38), (40, 50)],
    "S1": [(1, 17)],
    "S2": [(1, 13), (20, 26), (30, 40)],
    "S3": [(1, 16)],
    "S4": [(1, 25)],
}

ID = re.compile(r"\bS\d-\d\d\b")

#: A test that a row names, with its file.
NAMED = re.compile(r"\[`(\w+)`\]\(\.\./([^)#]+)\)")

#: Where tests are.
SOURCES = ("python/tests/*.py", "src/**/*.rs", "tests/**/*.rs", "*/src/**/*.rs", "*/tests/**/*.rs")


def rows() -> dict[str, set[tuple[str, str]]]:
    """Return the tests of each behaviour, by its id: file and function."""
    found: dict[str, set[tuple[str, str]]] = {}
    for line in (ROOT / "docs/behaviours.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not ID.fullmatch(cells[0]):
            continue
        assert len(cells) == 4 and all(cells), f"id, behaviour, here, test: {line}"
        assert cells[0] not in found, f"two rows: {line}"
        named = NAMED.findall(cells[3])
        assert NAMED.sub("", cells[3]).strip(", ") == "" and named, f"not only tests: {line}"
        found[cells[0]] = {(file, function) for function, file in named}
        assert len(found[cells[0]]) == len(named), f"a test twice: {line}"
    return found


def marked(file: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the tests in a file: name, first and last line. Comments above a test belong to it."""
    lines = file.read_text().splitlines()
    functions: list[tuple[str, int, int]] = []
    if file.suffix == ".py":
        above: tuple[str, ...] = ("#",)
        for node in ast.parse("\n".join(lines)).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                begin = min([node.lineno, *(part.lineno for part in node.decorator_list)])
                functions.append((node.name, begin, node.end_lineno or begin))
    else:
        above = ("//", "#[")
        for number, line in enumerate(lines, start=1):
            found = re.match(r"( *)(?:async )?fn (\w+)\(", line)
            if found is not None and re.fullmatch(r" *#\[(tokio::)?test.*", lines[number - 2]):
                end = lines.index(found[1] + "}", number) + 1
                functions.append((found[2], number, end))
    for name, begin, end in functions:
        while begin > 1 and lines[begin - 2].strip().startswith(above):
            begin -= 1
        yield name, begin, end


def claims() -> set[tuple[str, str, str]]:
    """Return the ids at tests: id, file and function."""
    found = set()
    for file in {file for pattern in SOURCES for file in ROOT.glob(pattern)}:
        text = file.read_text()
        if ID.search(text) is None:
            continue
        path = file.relative_to(ROOT).as_posix()
        lines = text.splitlines()
        lost = {number for number, line in enumerate(lines, start=1) if ID.search(line)}
        for name, begin, end in marked(file):
            lost -= set(range(begin, end + 1))
            ids = ID.findall("\n".join(lines[begin - 1 : end]))
            found |= {(behaviour, path, name) for behaviour in ids}
        assert not lost, f"{path}: ids at no test, in the lines {sorted(lost)}"
    return found


def test_every_behaviour_has_one_row_in_the_order_of_the_ids() -> None:
    expected = [
        f"{system}-{number:02}"
        for system, ranges in RANGES.items()
        for first, last in ranges
        for number in range(first, last + 1)
    ]
    assert list(rows()) == expected


def test_the_tests_that_a_row_names_have_its_id_and_no_other_test_has_it() -> None:
    named = {(behaviour, *test) for behaviour, tests in rows().items() for test in tests}
    claimed = claims()
    assert sorted(named - claimed) == [], "a test is not there, or lacks the id that its row has"
    assert sorted(claimed - named) == [], "a test has an id whose row does not name it"
