import pickle
import random
import re

import pytest
import yaml
from commands import TINY, one_line, raises
from fakes import Evil
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.default_element import ResultDefault
from hydra.core.plugins import Plugins
from tables import each

from cnnexp.app import config_security, hydra_app
from cnnexp.errors import ConfigError
from cnnexp.tracking.events import read_journal

RECORDED = [word for word in TINY if word != "tracking=none"]
MARK = "+hydra.callbacks.x._target_="


@pytest.mark.parametrize(
    "words",
    [
        [f"{MARK}shutil.copyfile", "+hydra.callbacks.x.src=FILE", "+hydra.callbacks.x.dst=MARKER"],
        [f"{MARK}builtins.open", "+hydra.callbacks.x.file=MARKER", "+hydra.callbacks.x.mode=w"],
        ["hydra.launcher._target_=builtins.open", "+hydra.launcher.file=MARKER", "+hydra.launcher.mode=w"],
        ["hydra.sweeper._target_=hydra_plugins.cnnexp_search.sweeper.Path"],
        ["+hydra.job_logging.handlers.x={class: builtins.open, filename: MARKER, mode: w}"],
        ["+hydra.job_logging.handlers.x={class: logging.StreamHandler, stream: 'ext://os.environ'}"],
        ["+evil={x: {_target_: builtins.open, file: MARKER, mode: w}}", "hydra.callbacks=${evil}"],
        ["+evil={handlers: {}}", "hydra.job_logging=${evil}"],
        ["+hydra.job_logging.handlers.x={class: logging.FileHandler, filename: MARKER}"],
        ["hydra.job_logging.handlers.file.filename=MARKER"],
        ["+hydra.job.env_set.PYTHONPATH=FILE"],
        ["hydra.output_subdir=MARKER"],
        ["hydra.job.name=../x"],
        ["--experimental-rerun", "FILE"],
        ["-m", f"{MARK}builtins.open", "+hydra.callbacks.x.file=MARKER", "+hydra.callbacks.x.mode=w"],
    ],
)
def test_keys_that_name_code_are_refused_and_nothing_runs(mistake, tmp_path, words):
    marker, file = tmp_path / "marker", tmp_path / "file"
    file.write_bytes(pickle.dumps(Evil(marker)))
    words = [word.replace("MARKER", str(marker)).replace("FILE", str(file)) for word in words]
    mistake(*TINY, *words, says=r"\S.*: refused; .*")
    assert not marker.exists()


FILES = {
    "code": "hydra: {callbacks: {x: {_target_: hydra_plugins.cnnexp_search.sweeper.Path.write_text, _args_: "
    "[{_target_: hydra_plugins.cnnexp_search.sweeper.Path, _args_: [MARKER]}, x]}}}",
    "environment": "tracking: {run_name: '${oc.env:CANARY}'}",
    "defaults": "defaults: [{override /model: '${oc.env:CANARY}'}]",
    "sweep": "hydra: {mode: MULTIRUN, sweeper: {params: {tracking.run_name: '$\\\\{oc.env\\\\:CANARY\\\\}'}}}",
}


@pytest.mark.parametrize("kind", FILES)
def test_a_config_file_from_elsewhere_ends_in_one_line(mistake, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("CANARY", "s3cr3t")
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = FILES[kind].replace("MARKER", f"{tmp_path}/marker")
    (tmp_path / "conf" / "experiment" / "evil.yaml").write_text(f"# @package _global_\n{text}\n")
    words = ("--config-dir", str(tmp_path / "conf"), *TINY[1:], "experiment=evil")
    said = mistake(*words, says=rf"{tmp_path}/conf/experiment/evil\.yaml\S*:? .*: refused; .*")
    assert "s3cr3t" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["conf"]


def test_a_config_that_others_call_primary_names_no_code_either(mistake, tmp_path):
    (tmp_path / "evil.yaml").write_text("hydra: {searchpath: ['pkg://evil']}\n")
    words = ("--config-dir", str(tmp_path), "--config-name", "evil")
    mistake(*words, says=".*evil.yaml, line 1: 'searchpath': refused; .*")


OURS, LAUNCHER = "hydra_plugins.cnnexp_search.sweeper", "hydra_plugins.hydra_joblib_launcher._core"
TARGETS = (
    *("builtins.open", "os.system", "pathlib.Path.write_text", "subprocess.run", "shutil.copyfile", "runpy.run_path"),
    *(f"{OURS}.{name}" for name in ("Path.touch", "Path.unlink", "OmegaConf.save", "math.sqrt")),
    *(f"{LAUNCHER}.{name}" for name in ("logging.io.open", "logging.FileHandler", "Parallel")),
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper.sweep",
    "hydra._internal.core_plugins.basic_launcher.configure_log",
    *(target for allowed in config_security.TARGETS.values() for target in sorted(allowed)),  # in another place
    *("${oc.env:CANARY}", " os.system", "os.systеm"),  # the last with a Cyrillic letter
)
SECRETS = (
    *("${oc.env:CANARY}", "a-${oc.env:CANARY,null}", "${ oc.env:CANARY}", "${oc.decode:${oc.env:CANARY}}"),
    *("${oc.create:{a:${oc.env:CANARY}}}", "${hydra:runtime.cwd}", "${by:${oc.env:CANARY},{},x}"),
    *("${oc.select:tracking.uri}", "${tracking.uri}", "${tracking}", "${..tracking.uri}", "${hydra.runtime.cwd}"),
    *("${${model.name}:CANARY}", "$\\{oc.env\\:CANARY\\}", "\\${oc.env:CANARY}", "${model.name}${oc.env:CANARY}"),
    *("${env:CANARY}", "${oc.dict.values:tracking}"),
)
STORES = (
    *("sqlite:///FILE", "sqlite:////home/user/.bashrc", "file:///FILE", "mssql+pyodbc://h/?driver=FILE"),
    *("http://h/?token=x", "http://bob:pw@h", "http://token@h", "postgresql://h/db?passfile=FILE", "http://h\n"),
    *("${outputs:}/x", "databricks://x"),
)
FOLDERS = (
    *("FILE", "../x", "..", "/tmp", "~/x", "${outputs:}", "${outputs:}/..", "${outputs:}/a/../../x"),
    *("${outputs:}/a//..", "x\n", "${outputs:}/${now:%z}..", "${outputs:}/.${now:}.", "${outputs:}/${model.name}"),
    *("${outputs:}x/../y", "${outputs:}/a\n"),
)
SHELL = ("touch FILE", "x\n#SBATCH --wrap=touch", "$(touch FILE)", "`touch FILE`", "a;b", "a b")
PLACES = {  # a key of the config, and what an attack puts there; words in capitals are drawn
    **dict.fromkeys(("hydra.callbacks.x", "hydra.launcher", "hydra.sweeper", "model.a.b"), "CODE"),
    **{key: [[{"x": "CODE"}]] for key in ("hydra.callbacks", "trainer.seed", "hydra.sweeper.params.trainer.seed")},
    **dict.fromkeys(("hydra.job_logging.handlers.x", "hydra.hydra_logging.formatters.x"), "HANDLER"),
    **dict.fromkeys(("tracking.run_name", "model.name", "dataset.root", "hydra.job.name", "SECRET"), "SECRET"),
    **{key: ["SECRET"] for key in ("trainer.resume", "hydra.sweeper.params.model", "hydra.sweeper.params.model ")},
    "defaults": [{"override /model": "SECRET"}],
    "defaults ": ["FOREIGN"],
    "tracking.uri": "STORE",
    **{f"hydra.{k}": "FOLDER" for k in ("run.dir", "sweep.dir", "sweep.subdir", "output_subdir", "sweeper.journal")},
    **dict.fromkeys(("hydra.launcher.submitit_folder", "hydra.launcher.temp_folder"), "FOLDER"),
    **dict.fromkeys(("hydra.launcher.partition", "hydra.launcher.python"), "SHELL"),
    "hydra.launcher.setup": ["SHELL"],
    "hydra.launcher.additional_parameters": {"wrap": "SHELL"},
    "hydra.job.env_set": {"PYTHONPATH": "FOLDER"},
    "hydra.job.env_copy": ["CANARY"],
    "hydra.searchpath": ["pkg://evil"],
    "hydra.sweeper.params.hydra.run.dir": "FOLDER",
    "hydra.sweeper.params.model@hydra.callbacks": "one_conv",
    "hydra.sweeper.params.dataset": "../../x",
    **dict.fromkeys(("hydra", "tracking", "hydra.run", "hydra.callbacks.y"), "MAPPING"),
}
FOREIGN = ("/../../x", "../x", "//etc/x", "pkg://evil", "/model: ../../x", "file:///x")


def attacks(count):
    """Yield (text of a config file, package that Hydra puts it under), each an attack, drawn with a seed."""
    draw = random.Random(25)

    def fill(value):
        match value:
            case list():
                return [fill(item) for item in value]
            case dict():
                return {fill(key): fill(item) for key, item in value.items()}
            case "CODE":
                code = {"_target_": draw.choice(TARGETS), draw.choice(["_args_", "file", "_partial_"]): ["FILE", "w"]}
                nested = draw.random() < 0.3
                return {draw.choice(["_args_", "params"]): [code, 1]} if nested else code
            case "HANDLER":
                return {draw.choice(["()", "class", "factory", "stream"]): draw.choice(TARGETS)}
            case "MAPPING":
                return "${by:x,{x:{y:{_target_:os.system}}},{run:{dir:/tmp}}}"
        drawn = {"SECRET": SECRETS, "STORE": STORES, "FOLDER": FOLDERS, "SHELL": SHELL, "FOREIGN": FOREIGN}
        return draw.choice(drawn[value]) if value in drawn else value

    for _ in range(count):
        key, value = draw.choice(list(PLACES.items()))
        values = fill(value)
        parts = fill(key.strip()).split(".") if key != "SECRET" else [fill(key)]
        package = ""
        if parts[0] == "hydra" and len(parts) > 2 and draw.random() < 0.3:
            package, parts = ".".join(parts[:2]), parts[2:]
        for part in reversed(parts):
            values = {part: values}
        if draw.random() < 0.2:
            values = {"model": {"filters": 3}, **values} if "model" not in values else values
        flow, style = draw.choice([True, False, None]), draw.choice([None, '"', "'"])
        unicode = draw.random() < 0.5
        text = yaml.safe_dump(values, default_flow_style=flow, default_style=style, allow_unicode=unicode)
        if draw.random() < 0.3:
            text = re.sub(r'"([^"\n]*)\$', r'"\1\\x24', text)
        if draw.random() < 0.2:
            text = f"trainer: {{seed: 1}}\n{text}" if text[0] not in "{" and "trainer" not in text else text
        yield f"# a comment\n{text}", package


@pytest.fixture
def place(tmp_path):
    """Return place(text, package): put a config file of `tmp_path/conf` where Hydra would."""
    folder = tmp_path / "conf"
    (folder / "experiment").mkdir(parents=True)
    Plugins.instance()  # they read files
    search = ConfigSearchPathImpl()
    search.append("main", f"file://{folder}")
    search.append("schema", "structured://")
    loader = hydra_app.ConfigLoaderImpl(search)  # which checks

    def place(text, package):
        (folder / "experiment" / "x.yaml").write_text(text, encoding="utf-8")
        default = ResultDefault(config_path="experiment/x", package=package)
        return loader._load_single_config(default, CachingConfigRepository(loader.repository)).config

    return place


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.thorough)])
def test_no_config_file_reaches_code_files_or_the_environment(place, tmp_path, monkeypatch, count):
    monkeypatch.setenv("CANARY", "s3cr3t")
    monkeypatch.chdir(tmp_path)
    for text, package in attacks(count):
        with one_line(ConfigError) as caught:
            assert not place(text.replace("FILE", f"{tmp_path}/marker"), package), text
        assert "s3cr3t" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["conf", "experiment", "x.yaml"]


def test_what_may_stand_in_any_folder(place):
    for group in ("experiment", "search", "debug", "model", "trainer"):
        for path in sorted((config_security.CONF / group).glob("*.yaml")):
            text = path.read_text(encoding="utf-8")
            assert place(text, "" if "@package _global_" in text else group) is not None
    place(  # and what anybody may set of hydra and tracking
        "hydra: {mode: MULTIRUN, run: {dir: '${outputs:}/mine/${now:%Y-%m-%d}/a.b'}, "
        "sweeper: {params: {model.filters: '2,3', optimizer: 'sgd,adam'}, trials: 3}, "
        "launcher: {n_jobs: 2, mem_gb: null, partition: gpu-a}}\n"
        "tracking: {uri: 'http://host.org:5000/a', experiment: mine, run_name: 'of ${model.name}'}",
        "",
    )


BOMB = "\n".join([f"a0: &a0 {['x'] * 9}", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))])


@each(
    (b"\xff\xfe", "not UTF-8 text"),
    (b"a: &a [*a]", "unfolds to more than"),
    (BOMB.encode(), "unfolds to more than 100000 values by its aliases"),
    (b"x" * (config_security.MOST_BYTES + 1), "more than the"),
)
def test_other_files_that_no_config_is(tmp_path, content, said):
    (tmp_path / "x.yaml").write_bytes(content)
    raises(ConfigError, f"x.yaml: .*{said}", config_security.check_file, tmp_path / "x.yaml")


def contents(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


URIS = {
    "password": "http://me:s3cr3t@127.0.0.1:9",
    "user": "http://s3cr3t@127.0.0.1:9/",
    "query password": "postgresql://bob@127.0.0.1:1/x?password=s3cr3t",
    "query passwd": "mysql://127.0.0.1:1/x?user=a&passwd=s3cr3t",
    "query token": "http://127.0.0.1:9/?token=s3cr3t",
    "any key": "http://127.0.0.1:9/a/b?x=1&anything=s3cr3t",
    "odd letters": "http://me:s3cr3t/s3cr3t?s3cr3t@127.0.0.1:9",
    "no scheme": "me:s3cr3t@127.0.0.1",
    "a space": "http://me:s3cr3t s3cr3t@127.0.0.1:9",
    "a file": "sqlite://me:s3cr3t@127.0.0.1/x",
}
WAYS = ("typed", "environment", "sweep", "quoted", "added")
OFTEN = [("query token", "typed"), *(("password", way) for way in WAYS[:3])]
RARE = [*(("query token", way) for way in WAYS[1:]), *(("password", way) for way in WAYS[3:])]
RARE += [(kind, "typed") for kind in URIS if kind not in ("password", "query token")]


@pytest.mark.parametrize(("kind", "way"), [*OFTEN, *(pytest.param(*rare, marks=pytest.mark.thorough) for rare in RARE)])
def test_a_secret_is_nowhere(run, tmp_path, monkeypatch, kind, way):
    monkeypatch.setenv("STORE", URIS[kind])
    monkeypatch.setenv(config_security.STORE, "")
    uri = "${oc.env:STORE}" if way == "environment" else URIS[kind]
    word = f"tracking.uri='{uri}'" if way == "quoted" or " " in uri else f"tracking.uri={uri}"
    sweep = ("-m", "model.filters=2,3") if way == "sweep" else ()
    code, out, err = run(*RECORDED, f"++{word}" if way == "added" else word, *sweep)
    assert code in (2, 5)
    assert re.fullmatch(r"cnnexp: error: .*tracking\.uri.*\n", err)
    assert "To look at it" not in out, "no hint to a store that could not be opened"
    assert "s3cr3t" not in out + err
    assert b"s3cr3t" not in contents(tmp_path)
    if way != "sweep" and code == 5:
        name = "STORE" if way == "environment" else config_security.STORE
        assert read_journal(tmp_path / "run")["config"]["tracking"]["uri"] == f"${{oc.env:{name}}}"


@pytest.mark.parametrize("word", ["tracking={uri: 'http://bob:s3cr3t@h'}", "+tracking={uri: 'http://h/?token=s3cr3t'}"])
def test_a_secret_in_a_mapping_is_not_shown(mistake, tmp_path, word):
    assert "s3cr3t" not in mistake(*TINY, word, says=".*must be a name of the group tracking.*")
    assert not (tmp_path / "run").exists()


def test_an_address_with_a_reference_and_a_secret_is_resolved_before_hydra_sees_it(mistake, tmp_path, monkeypatch):
    monkeypatch.setenv("HOST", "127.0.0.1:9")
    monkeypatch.setenv(config_security.STORE, "")
    said = r".*http://\*\*\*@127\.0\.0\.1:9: cannot be opened.*"
    mistake(*RECORDED, "tracking.uri=http://me:s3cr3t@${oc.env:HOST}", says=said, code=5)
    assert b"s3cr3t" not in contents(tmp_path)
    assert "s3cr3t" not in mistake(*RECORDED, "tracking.uri=http://me:s3cr3t@${oc.env:NOWHERE_SET}", says=".*")
