"""Ebbflow: elastic deep-learning training on sharded parameter servers.

Every record is applied once per epoch, and in canonical order the trained bits do not depend on
which process computed what.

Importing this package is light: numpy, torch and other libraries are imported where they are used.
"""

from ebbflow._native import __version__

__all__ = ["__version__"]
