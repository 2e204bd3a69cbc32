"""The command line, called in this process."""

import os
import signal
import sys

import pytest

from cnnexp import __main__ as cli
from cnnexp.app import hydra_app


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Return run(*arguments) -> (exit code, standard output, standard error), in this process."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> tuple[int, str, str]:
        folders = (f"hydra.run.dir={tmp_path}/run", f"hydra.sweep.dir={tmp_path}/sweep")
        monkeypatch.setattr(sys, "argv", ["cnnexp", *arguments, *(folders if "--help" not in arguments else ())])
        monkeypatch.setattr(hydra_app, "_failures", [])
        monkeypatch.setattr(hydra_app, "_recorders", {})
        monkeypatch.setattr(hydra_app.SweepCallback, "started", None)
        os.environ["HYDRA_FULL_ERROR"] = "0"
        try:
            cli.main()
            code = 0
        except SystemExit as left:
            code = left.code or 0
        return code, *capsys.readouterr()

    yield run
    signal.signal(signal.SIGTERM, handler)
