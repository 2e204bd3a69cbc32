"""`cnnexp check BACKEND`: whether a backend computes what the others do, for who writes one; see `testing`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cnnexp.backends import backend_class
from cnnexp.errors import CnnexpError, ConfigError
from cnnexp.testing import NETWORKS, examine, reference_of


def command(arguments: Sequence[str]) -> None:
    """Hold the backend of `cnnexp check BACKEND` to another, and say of each network what was found.

    Raises:
        ConfigError: no backend is named, or one that nobody knows.
        BackendUnavailable: the machine lacks what it needs.
        CnnexpError: it is wrong on a network, or takes none.
    """
    if len(arguments) != 1 or "=" in arguments[0]:
        raise ConfigError("check: give one backend, and its file where it is yours: check BACKEND [plugins=FILE.py]")
    name = arguments[0]
    backend = backend_class(name)()
    other = reference_of(name)
    found = []
    sys.stdout.write(f"{name} beside {other}: scores, losses, gradients, steps taken twice, resumed steps\n")
    for title in NETWORKS:
        verdict, text = examine(backend, backend_class(other)(), title)
        found.append(verdict)
        sys.stdout.write(f"  {title:<20}{text}\n")
        sys.stdout.flush()
    if "WRONG" in found:
        raise CnnexpError(f"check {name}: wrong on {found.count('WRONG')} of {len(found)} networks")
    if "right" not in found:
        raise CnnexpError(f"check {name}: takes none of the networks")
    sys.stdout.write(f"{name} is right on {found.count('right')} of {len(found)} networks\n")
