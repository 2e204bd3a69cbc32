"""The command line: what a user types, and every mistake in it as one line."""

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import yaml
from commands import ROOT, TINY, starting
from tables import each

import cnnexp
from cnnexp import __main__ as cli
from cnnexp.app import hydra_app
from cnnexp.errors import BackendUnavailable, DataError, Diverged
from cnnexp.tracking.events import read_journal
from cnnexp.training.checkpoint import find

HOWTO = (ROOT / "docs" / "howto.md").read_text(encoding="utf-8")
HUGE_RATE = ("trainer.batch_size=40", "dataset.train_size=40", "optimizer.lr=1e38")
DIVERGED = "the test loss became nan after epoch 1, at learning rate 1e.38; .*"


@each(
    (["trian.lr=1"], "trian.lr=1: unknown key; legal: model, backend, .*; did you mean 'optimizer.lr'"),
    (["model=lenet"], "model=lenet: unknown; legal: custom, .*, two_conv_pool4"),
    (["hydra.mode=x"], r"hydra.mode=x: Invalid value 'x', expected one of \[RUN, MULTIRUN\]"),
    (["experiment=smoke", "model=custom"], "experiment=smoke sets it: add ~model.filters, or choose no other"),
    (["--nope"], "--nope: unknown flag; legal: --help, --hydra-help, --version, --cfg, .*, --info"),
    (["--confg-dir=x"], "--confg-dir=x: unknown flag; .*did you mean '--config-dir'"),
    (["-h=1"], "-h=1: -h takes no value"),
    (["--cfg"], "--cfg=hydra.run.dir.*: its value must be one of job, hydra, all"),
    (["--info=nope"], "--info=nope: its value must be one of all, config, defaults, "),
    (["trainer.epochs=1", "--config-dir", "-m"], "--config-dir: its value must be given, as --config-dir VALUE"),
    (["--resolve"], "The --resolve flag can only be used in conjunction with --cfg"),
    (["model=ffn", "model.filters=3"], "model.filters=3: unknown key; legal in model: name, hidden, loss_name"),
    (["+model.bogus=1"], "model.bogus=1: unknown key; legal: filters, kernel, pool, padding"),
    (["~trainer.bogus"], "trainer.bogus: unknown key; legal in trainer: epochs"),
    (["~model"], "model is missing"),
    (["experiment=smok"], "experiment=smok: unknown; legal: .*; did you mean 'smoke'"),
    (["modle=one_conv"], "modle=one_conv: unknown key; legal: model, .*; did you mean 'model'"),
    (["predcit", "x"], "predcit: no such command; .*did you mean 'predict'"),
    (["model.filters=["], r"model.filters=\[: cannot be read .no viable alternative.*; close its brackets"),
    (["model.filters"], "Error parsing override 'model.filters'"),
    (["tracking.run_name=日本"], "cannot read tracking.run_name=日本; quote a value of other letters"),
    (["trainer.epochs=1,2"], "trainer.epochs=1,2: several values; add -m to run them all, or quote them"),
    (["model.filters=???"], "model.filters: must be given, as model.filters=VALUE"),
    (["tracking.uri=${oc.env:CNNEXP_TEST_MISSING}"], "tracking.uri: .*CNNEXP_TEST_MISSING"),
    (["trainer.epochs='3'"], "trainer.epochs='3': must be a whole number"),
    (["optimizer={a: 1}"], r"optimizer={a: 1}: must be a name of the group optimizer"),
    (["workers=local", "workers.patience_s=3"], "unknown key;.* did you mean 'workers.heartbeat_timeout_s'"),
    (["--config-dir", "nowhere"], "Additional config directory '.*nowhere' not found"),
)
def test_a_mistake_is_one_line_and_exit_code_2(mistake, arguments, message):
    mistake(*arguments, says=f".*{message}.*")


@each(
    (b"model: [1\nb: 2", r"mine\.yaml, line 2: not YAML"),
    (b"model:\n\tfilters: 1\n", r"mine\.yaml, line 2: not YAML"),
    (b"a: 1\na: 2\n", r"mine\.yaml, line 2: not YAML: found duplicate key a"),
    (b"\xff\xfe", "not UTF-8"),
    (b"# @package _global_\nmodel: {filtres: 3}", "model.filtres=3: unknown key; .*did you mean 'filters'"),
)
def test_a_mistake_in_a_file_of_the_user(mistake, tmp_path, text, message):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "mine.yaml").write_bytes(text)
    mistake("--config-dir", str(tmp_path / "mine"), "experiment=mine", says=f".*{message}.*")


@each(
    (("dataset=mnist", "dataset.root=/nowhere"), DataError, ".*nowhere.*"),
    ((*HUGE_RATE, "backend=numpy"), Diverged, DIVERGED),
    ((*HUGE_RATE, "backend=numpy-parallel"), Diverged, DIVERGED),
    (("backend=gpu",), BackendUnavailable, ".*backend=cpu.*"),
)
def test_other_errors_are_one_line_with_a_code_of_their_own(mistake, words, error, said):
    if words == ("backend=gpu",) and importlib.util.find_spec("numba_cuda"):
        pytest.skip("numba-cuda is installed")
    mistake(*TINY[1:], *words, says=said, code=error.exit_code)


def test_a_full_traceback_on_request(run, monkeypatch):
    monkeypatch.setattr(cli.os.environ, "get", lambda key, default=None: "1" if key == "HYDRA_FULL_ERROR" else default)
    with pytest.raises(Exception, match=r"Could not override 'trian\.lr'"):
        run("trian.lr=1")


def test_every_command_tells_its_arguments_and_is_in_the_help(run):
    assert run("--version")[:2] == (0, f"cnnexp {cnnexp.__version__}\n")
    _, told, _ = run("--help")
    assert "Usage: cnnexp" in told
    for command in cli.COMMANDS:
        assert f"cnnexp {command} " in told
        code, out, _ = run(command, "--help")
        assert code == 0
        assert re.match(rf"Usage: cnnexp {command}\b", out)
        assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("words", [(), ("model=resnet",), ("experiment=rendon_results",), ("search=tpe",)], ids=str)
def test_help_fits_a_terminal_and_names_all(run, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    text = run("help", *words)[1] if not words else run("--help", *words)[1]
    assert max(map(len, text.splitlines())) <= 80
    names = {path.stem for path in (ROOT / "conf").glob("*/*.yaml")}
    assert names <= set(re.findall(r"[\w-]+", text)), "nothing is clipped"
    monkeypatch.setenv("COLUMNS", "0")
    assert run("help")[0] == 0


def test_help_of_a_group_says_what_each_name_is_and_of_a_name_its_keys(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for group in sorted(path for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name != "hydra"):
        files = sorted(group.glob("*.yaml"))
        text = run("help", group.name)[1]
        assert max(map(len, text.splitlines())) <= 80
        if len(files) > 1:
            assert all(re.search(rf"^{file.stem}\s+\S", text, re.MULTILINE) for file in files)
        for file in files:
            text = run("help", f"{group.name}={file.stem}")[1]
            keys = yaml.safe_load(file.read_text(encoding="utf-8"))
            assert yaml.safe_load(text) == keys, "as it stands there"
            prose = [line for line in text.splitlines() if re.match(r" *# (?! |python)", line)]
            assert max(map(len, prose), default=0) <= 80
    assert run("help", "ui")[1].startswith("Usage: cnnexp ui ")
    assert "'model'?" in run("help", "modl")[2]
    assert "'explain'?" in run("help", "explan")[2]
    assert "'resnet'?" in run("help", "model=resnot")[2]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash is installed")
def test_bash_completes_commands_groups_names_and_keys(run, tmp_path, monkeypatch):
    command = tmp_path / "cnnexp"
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m cnnexp "$@"\n')
    command.chmod(0o755)
    (install,) = re.findall(r"^eval .*cnnexp -sc install=bash.*$", HOWTO, re.MULTILINE)
    complete = "COMP_LINE='cnnexp pre' COMP_POINT=10 COMP_CWORD=1 COMPREPLY=() && hydra_bash_completion"
    script = f"{install}\n{complete}\necho ${{COMPREPLY[0]}}"
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environ)
    assert done.stdout == "predict\n", done.stderr
    for line, completed in {"dataset=f": "dataset=fashion_mnist", "optimizer.l": "optimizer.lr="}.items():
        monkeypatch.setenv("COMP_LINE", f"cnnexp {line}")
        monkeypatch.setenv("COMP_POINT", str(len(line) + 7))
        assert completed in run("-sc", "query=bash")[1].split()


@each(
    (ZeroDivisionError("a\nbug"), "unexpected ZeroDivisionError: a bug"),
    (MemoryError(), "out of memory; lower trainer.batch_size, the size of the model or the data set"),
    (RecursionError("deep"), "unexpected RecursionError: deep"),
)
def test_a_bug_is_one_line_that_names_a_file_with_the_traceback(run, monkeypatch, tmp_path, error, said):
    monkeypatch.setattr(hydra_app, "train", MagicMock(side_effect=error))
    code, _, err = run(*TINY)
    (file,) = tmp_path.glob("run/traceback-*.txt")
    assert (code, err) == (1, f"cnnexp: error: {said}; its traceback is in {file}\n")
    assert type(error).__name__ in file.read_text(encoding="utf-8")
    assert read_journal(tmp_path / "run")["status"] == "FAILED"
    code, out, err = run("-m", *TINY, "model.filters=2,3")
    assert code == 1
    assert "Traceback" not in out + err, "of a job of a sweep"
    assert len([*(tmp_path / "sweep").glob("*/traceback-*.txt")]) == 2

    monkeypatch.setattr(hydra_app, "launch", lambda: [][0])
    code, _, err = run(*TINY)
    assert code == 1
    file = re.fullmatch(r"cnnexp: error: unexpected IndexError: .*; its traceback is in (.*)\n", err)[1]
    assert "IndexError" in Path(file).read_text(encoding="utf-8")
    os.unlink(file)


def test_a_reader_that_leaves_ends_the_run_as_any_program(tmp_path):
    with starting(*TINY, f"hydra.run.dir={tmp_path}", "trainer.epochs=50") as process:
        process.stdout.readline()
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 141)


def test_the_default_run_learns_the_digits_shows_its_epochs_and_keeps_a_journal(run, tmp_path):
    code, out, err = run("tracking=none", "trainer.baseline=null")
    assert (code, err) == (0, "")
    assert re.search(r"^accuracy +\d\d\.\d\d% of the test images", out, re.MULTILINE)
    assert re.search(rf"^folder +{tmp_path}/run$", out, re.MULTILINE)
    journal = read_journal(tmp_path / "run")
    assert journal["status"] == "FINISHED"
    assert journal["metrics"]["final/test_accuracy"] >= 0.95
    shown = re.findall(r"^ +(\d+)/\d+ ", out, re.MULTILINE)
    assert shown == [str(epoch["epoch"]) for epoch in journal["epochs"]]


def test_debug_small_shrinks_any_run_and_progress_off_shows_the_verdict_alone(run, tmp_path):
    words = ("backend=numpy", "tracking=none", "trainer.baseline=null", "model.filters=4", "trainer.progress=false")
    code, out, _ = run("debug=small", *words)
    assert code == 0
    assert " 1/2 " not in out
    assert re.match("(cut short|speed) ", out)
    assert read_journal(tmp_path / "run")["config"]["dataset"]["train_size"] == 200


def test_a_sweep_into_the_folder_of_another_is_refused_unless_it_goes_on(run, mistake, tmp_path):
    words = (*TINY, "-m", "trainer.seed=0,1")
    assert run(*words)[::2] == (0, "")
    mistake(*words, says=rf"hydra.sweep.dir={tmp_path}/sweep: holds the runs of another sweep; .*")
    assert run(*words, "trainer.resume=auto")[::2] == (0, "")


def test_a_sweep_goes_on_past_a_failing_job_and_says_why(run, tmp_path):
    code, _, err = run(*TINY, "-m", "model.kernel=3,4,0,5")
    assert code == 1
    first, second = err.splitlines()
    assert re.fullmatch(r"cnnexp: error: job in folder 1 .*model\.kernel=4.*2\.5 is not a whole number.*", first)
    assert "model.kernel=0: must be a whole number >= 1" in second
    statuses = [read_journal(tmp_path / "sweep" / str(i))["status"] for i in range(4)]
    assert statuses == ["FINISHED", "FAILED", "FAILED", "FINISHED"]
    assert (tmp_path / "sweep" / "summary.csv").is_file()


def test_help_loads_nothing_heavy():
    command = [sys.executable, "-X", "importtime", "-m", "cnnexp", "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "Usage: cnnexp" in printed.stdout
    loaded = set(re.findall(r"\| +([a-z_0-9]+)$", printed.stderr, re.MULTILINE))
    assert not loaded & {"numba", "mlflow", "torch", "sklearn", "matplotlib", "scipy", "pandas"}


def test_a_flag_may_stand_between_words(run, tmp_path):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "own.yaml").write_text("name: one_conv\nfilters: 7\n")
    for flag in (["--config-dir", f"{tmp_path}/mine"], [f"-cd={tmp_path}/mine"]):
        code, out, _ = run("trainer.epochs=1", *flag, "experiment=null", "model=own", "-c", "job", "optimizer=adam")
        assert code == 0
        assert {"filters: 7", "name: adam"} <= {line.strip() for line in out.splitlines()}
    for flag in (["--info", "defaults"], ["--info"]):
        code, out, _ = run("model=knm", *flag, "optimizer=adam")
        assert (code, "model/knm" in out, "optimizer/adam" in out) == (0, True, True)


@each(
    ("leaves.py", "import sys; sys.exit(3)", "cannot be imported: SystemExit: 3"),
    ("raises.py", "raise ValueError('a\\nb')", "cannot be imported: ValueError: a b"),
    ("no_python.py", "1 +", "cannot be imported: SyntaxError: "),
    ("lacks.py", "import nowhere_at_all", "cannot be imported: ModuleNotFoundError"),
    ("gone.py", None, "no such file"),
    ("json.py", "", "another module is called json; rename the file"),
)
def test_a_plugin_that_exits_or_raises_or_is_none_is_one_line(mistake, tmp_path, no_plugins, name, code, said):
    file = tmp_path / name
    if code is not None:
        file.write_text(code)
    mistake("model=knm", f"plugins={file}", *TINY, says=rf"plugins={file}: {said}.*")


def test_runs_go_to_the_checkout_from_any_folder_and_never_share_one(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("--cfg", "hydra", "--package", "hydra.run.dir", "--resolve")
    assert code == 0
    microseconds = r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-\d{6}"
    assert re.search(f"{re.escape(str(ROOT / 'outputs' / 'runs'))}/{microseconds}$", out.strip())


@each(
    (signal.SIGTERM, 143, "terminated"),
    pytest.param(signal.SIGHUP, 129, "terminated", marks=pytest.mark.thorough),
    pytest.param(signal.SIGINT, 130, "inter", marks=pytest.mark.thorough),  # test_resume sends it, too
)
def test_signals_end_the_run_as_killed_and_verbose_is_free_of_the_noise_of_libraries(run, tmp_path, number, code, word):
    words = [*TINY, "backend=cpu", "hydra.verbose=true", "trainer.epochs=1000000", f"hydra.run.dir={tmp_path}"]
    # nohup, above the tests, has SIGHUP ignored
    with starting(*words, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL)) as process:
        for line in process.stdout:
            assert "numba" not in line.lower()
            if line.strip().startswith("1/"):
                break
        process.send_signal(number)
        _, err = process.communicate(timeout=180)
    assert process.returncode == code
    said = re.fullmatch(f"cnnexp: error: {word}[a-z]*; its checkpoint is (.*); to go on: (.*)\n", err)
    assert read_journal(tmp_path)["status"] == "KILLED"
    assert Path(said[1]) == find(tmp_path)
    done = len(read_journal(tmp_path)["epochs"])
    command = said[2].replace("trainer.epochs=1000000", f"trainer.epochs={done + 1}").replace("hydra.verbose=true ", "")
    python, *words = shlex.split(command)
    assert (Path(python).name, words[:2]) == ("python", ["-m", "cnnexp"])
    assert run(*words[2:])[0] == 0
    assert [epoch["epoch"] for epoch in read_journal(tmp_path)["epochs"]] == list(range(1, done + 2))


def test_a_rank_that_a_launcher_left_in_the_environment_leads(run, monkeypatch):
    monkeypatch.setattr("cnnexp.workers.mpi.lead", MagicMock(side_effect=BackendUnavailable("no MPI")))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert run(*TINY, "workers=mpi")[0] == 4


def test_jobs_return_their_objective(run, tmp_path, monkeypatch):
    job, returned = hydra_app.run, []
    monkeypatch.setattr(hydra_app, "run", lambda composed: returned.append(job(composed)) or returned[-1])
    for objective, metric in {"test_accuracy": "final/test_accuracy", "epoch_s": "time/median_epoch_s"}.items():
        folder = tmp_path / objective
        assert run(*TINY, f"sweep.objective={objective}", f"hydra.run.dir={folder}")[0] == 0
        assert returned[-1] == read_journal(folder)["metrics"][metric]
