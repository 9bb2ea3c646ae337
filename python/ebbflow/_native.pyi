"""What Rust gives to the package. Everything here is private to it."""

from collections.abc import Sequence

__version__: str

def main(arguments: Sequence[str]) -> int:
    """Run ``ebb``; ``arguments[0]`` is the program's name. Returns the exit code."""
