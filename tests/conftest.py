"""What holds for all tests."""

import copy
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hypothesis import HealthCheck, settings

from cnnexp.system import registry

# Workers of xdist share the cores: threads of OpenMP that wait would spin, two thirds of what PyTorch's tests cost.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts its background jobs with Ctrl-C ignored, and they and their children stay deaf to it; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example may take as long as a busy machine needs.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


# what a later run of the tests need not make again: programs by the hash of what they are made of, an empty store
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cnnexp" / "tests"
EMPTY_STORE = "import sys, mlflow; mlflow.MlflowClient('sqlite:///' + sys.argv[1]).search_experiments()"


@pytest.fixture(autouse=True, scope="session")
def _compiled_once():
    """Keep all that tests compile from run to run, beside the user's cache: that one holds fewer programs than they.

    They are compiled in this process: a child for each of hundreds costs minutes.
    """
    from cnnexp.backends import cache

    find, users = cache.cache_folder, cache.cache_folder()

    def folder(name: str = "compiled") -> Path | None:
        return KEPT / name if users is not None and find() == users else find(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cache_folder", folder)
        patch.setattr(cache, "KEEP", 5000)
        patch.setattr("cnnexp.backends.simd.runtime.compilation.compile_in_subprocess", lambda key, described: None)
        yield


@pytest.fixture(scope="session")
def new_store() -> Callable[[Path], str]:
    """Return new_store(folder) -> the URI of an empty MLflow store in it, a copy: to make one takes MLflow seconds."""
    empty = KEPT / f"empty-{version('mlflow-skinny')}.db"
    KEPT.mkdir(parents=True, exist_ok=True)
    with empty.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not empty.exists():
            making = empty.with_suffix(".making")
            subprocess.run([sys.executable, "-c", EMPTY_STORE, making], check=True, capture_output=True)
            making.rename(empty)
    return lambda folder: f"sqlite:///{shutil.copy(empty, folder / 'mlflow.db')}"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Return run(*arguments) -> (exit code, standard output, standard error), in this process."""
    from cnnexp import __main__ as cli
    from cnnexp.app import hydra_app

    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> tuple[int, str, str]:
        folders = (f"hydra.run.dir={tmp_path}/run", f"hydra.sweep.dir={tmp_path}/sweep")
        folders = folders if not any(word.startswith(("hydra.run.dir", "-sc")) for word in arguments) else ()
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


@pytest.fixture
def mistake(run):
    """Return mistake(*arguments, says, code): expect one line of error, a pattern; after exit code 2 it is all."""

    def mistake(*arguments: str, says: str, code: int = 2) -> str:
        left, out, err = run(*arguments)
        assert re.fullmatch(f"cnnexp: error: {says}\n", err), err
        assert left == code
        assert code != 2 or out == ""
        return err

    return mistake


@pytest.fixture
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test load plugins of its own: none is there before it, and none stays."""
    monkeypatch.setattr(registry, "_added", {group: {} for group in registry._added})
    monkeypatch.setattr(registry, "_shipped", {**registry._shipped})
    monkeypatch.delitem(sys.modules, "outside", raising=False)  # another test's, which would not register again
    monkeypatch.setattr(sys, "path", [*sys.path])
    Plugins.instance()  # Hydra's own put themselves in the store when they are first loaded: not in the copy
    monkeypatch.setattr(ConfigStore.instance(), "repo", copy.deepcopy(ConfigStore.instance().repo))
    monkeypatch.setenv(registry.VARIABLE, "")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # which the command line sets
