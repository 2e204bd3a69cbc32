"""What holds for all tests."""

import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

# A shell starts its background jobs with Ctrl-C ignored, and they and their children stay deaf to it; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example may take as long as a busy machine needs.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Return run(*arguments) -> (exit code, standard output, standard error), in this process."""
    from cnnexp import __main__ as cli
    from cnnexp.app import hydra_app

    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> tuple[int, str, str]:
        folders = (f"hydra.run.dir={tmp_path}/run", f"hydra.sweep.dir={tmp_path}/sweep")
        folders = folders if not any(word.startswith("hydra.run.dir=") for word in arguments) else ()
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
