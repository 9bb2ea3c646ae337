"""The program ``ebb``: ``python -m ebbflow`` and the script of the wheel."""

import sys

from ebbflow import _native


def main() -> int:
    """Run ``ebb`` with the arguments of this process and return its exit code."""
    return _native.main(["ebb", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
