"""A script on machines of a platform, or in containers: ``ebb run train.py --on slurm``.

One launch is a master, ps and agents, which a platform starts on its machines. The script is sent
to this master, and everything is taken away at the end. What all platforms share is in ``cluster``,
and each platform is one module. ``python -m ebbflow.launchers`` is the program that ``ebb run``
becomes.
"""

from __future__ import annotations

from ebbflow.launchers.platform import Platform, Settings

__all__ = ["NAMES", "Platform", "Settings", "platform"]

#: The platforms, as ``--on`` names them. ``local`` starts everything on this host, for tests.
NAMES = ("slurm", "ray", "kubernetes", "compose", "local")

#: The platforms of containers, which have an image.
_OF_CONTAINERS = ("kubernetes", "compose")


def platform(name: str, settings: Settings) -> Platform:
    """Return the platform ``name``, which has started nothing yet.

    Raises:
        InvalidJobError: There is no such platform, or it does not take the settings.
        UnsupportedError: A program or a package is missing.
    """
    from ebbflow.errors import InvalidJobError

    if settings.image is not None and name not in _OF_CONTAINERS:
        raise InvalidJobError(f"--image: only with --on {' or '.join(_OF_CONTAINERS)}")
    if settings.mounts and name != "compose":
        raise InvalidJobError("--mount: only with --on compose")
    if name == "local":
        from ebbflow.launchers.local import Local

        return Local(settings)
    if name == "slurm":
        from ebbflow.launchers.slurm import Slurm

        return Slurm(settings)
    if name == "ray":
        from ebbflow.launchers.ray import Ray

        return Ray(settings)
    if name == "kubernetes":
        from ebbflow.launchers.kubernetes import Kubernetes

        return Kubernetes(settings)
    if name == "compose":
        from ebbflow.launchers.compose import Compose

        return Compose(settings)
    raise InvalidJobError(f"--on {name}: expected one of {', '.join(NAMES)}")
