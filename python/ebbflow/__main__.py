"""The program ``ebb``: ``python -m ebbflow`` and the script of the wheel."""

import os
import sys

from ebbflow import _native


def main() -> int:
    """Run ``ebb`` with the arguments of this process and return its exit code."""
    if sys.executable:
        # Scripts of `ebb run SCRIPT.py` find this package.
        os.environ.setdefault("EBB_PYTHON", sys.executable)
    return _native.main(["ebb", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
