"""What an agent asks the Python interpreter of its scripts.

    check FILE     whether the interpreter satisfies the requirements in FILE
    make FOLDER    a virtual environment with all packages of this interpreter

``check`` prints one object of JSON.
"""

import json
import os
import site
import sys
from pathlib import Path


def check(path: str) -> None:
    """Compare the packages that this interpreter finds with requirements, one a line."""
    from importlib import metadata

    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import InvalidRequirement, Requirement

    wrong = []
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    waiting = [(line.split(" --hash=")[0].strip(), None, None) for line in lines]
    seen = set()
    while waiting:
        text, of, extras = waiting.pop(0)
        if (text, extras) in seen:
            continue
        seen.add((text, extras))
        about = {"requirement": text, "of": of, "name": None, "found": None, "invalid": None}
        try:
            required = Requirement(text)
        except InvalidRequirement as error:
            wrong.append({**about, "invalid": " ".join(str(error).split())})
            continue
        about["name"] = required.name
        applies = required.marker is None or any(
            required.marker.evaluate({"extra": extra}) for extra in extras or ("",)
        )
        if not applies:
            continue
        try:
            found = metadata.version(required.name)
        except metadata.PackageNotFoundError:
            wrong.append(about)
            continue
        try:
            fits = required.specifier.contains(found, prereleases=True)
        except (TypeError, ValueError):
            # A version that is none.
            fits = False
        if not fits:
            wrong.append({**about, "found": str(found)})
        elif required.extras:
            # It was installed with all that it needs, except for its extras.
            names = tuple(sorted(required.extras))
            needed = metadata.requires(required.name) or []
            waiting += [(need, of or text, names) for need in needed if "extra" in need]
    version = sys.version.split()[0]
    interpreter = f"{version} at {sys.executable}, {os.path.realpath(sys.executable)}"
    print(json.dumps({"interpreter": interpreter, "wrong": wrong}))


def make(folder: str) -> None:
    """Make a virtual environment whose packages come before those of this interpreter."""
    import importlib.util
    import venv

    # Packages of a virtual environment are not those of the interpreter that it stands on.
    system = sys.base_prefix in site.PREFIXES
    with_pip = importlib.util.find_spec("pip") is None
    venv.EnvBuilder(system_site_packages=system, symlinks=True, with_pip=with_pip).create(folder)
    if sys.prefix != sys.base_prefix:
        name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        folders = site.getsitepackages([sys.prefix])
        lines = [f"import site; site.addsitedir({packages!r})\n" for packages in folders]
        path = Path(folder, "lib", name, "site-packages", "of_the_agent.pth")
        path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    {"check": check, "make": make}[sys.argv[1]](*sys.argv[2:])
