"""Random networks, the tests' own, on every backend of this machine, compared with the tests' float64 oracle.

`python -m soak.networks SEED COUNT` does it in a process of its own: what compilers leave goes with it, and the end of
one that dies is seen.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, Phase, given, seed, settings

from cnnexp.backends import BACKENDS, backend_class
from cnnexp.backends.protocol import Backend
from cnnexp.backends.simd.runtime import compilation
from cnnexp.errors import BackendUnavailable
from soak.commands import ROOT, chunks

CHUNK = 20  # networks that one process tries


def networks(folder: Path, seed: int) -> Iterator[str | None]:
    """Hold every backend to the oracle on random networks, a network a trial."""
    yield from chunks(__name__, [], seed, CHUNK, {"XDG_CACHE_HOME": str(folder)})


def backends() -> list[Backend]:
    """Return the backends that compute on this machine's CPU."""
    found = []
    for name in BACKENDS:
        try:
            found.append(backend_class(name)())
        except BackendUnavailable as error:
            sys.stderr.write(f"{name}: {error}\n")
    return [backend for backend in found if not backend.on_gpu]


def main() -> None:
    """Try random networks; print a line of JSON for each: null, or what did not hold."""
    number, count = int(sys.argv[1]), int(sys.argv[2])
    sys.path.insert(0, str(ROOT / "tests"))
    from conformance import check_case
    from networks import KINDS, cases

    here = backends()

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases([*KINDS][number % len(KINDS)]))
    def check(case):
        wrong = []
        for backend in here:
            try:
                check_case(backend, case)
            except Exception as error:
                wrong.append(f"{backend.name}: {type(error).__name__}: {error}")
        fault = f"{case.network!r}, {case.loss}, {len(case.images)} images: {'; '.join(wrong)}"
        print(json.dumps(fault if wrong else None), flush=True)

    with mock.patch.object(compilation, "compile_in_subprocess", return_value=None):  # this is one already
        check()


if __name__ == "__main__":
    main()
