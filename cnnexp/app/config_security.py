"""What a config from elsewhere may not do: run code, reach files or the environment, unfold without end.

Hydra itself imports and calls what `_target_` and logging handlers name, before our schema sees anything. So every
config file is checked as text when it is read (`check_file`), what it sets is checked when Hydra has put it in place
(`check_placed`), and the whole config is checked before Hydra acts on it (`check_composed`). Code may be named by
`TRUSTED` files and on the command line by `plugins`.
"""

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cnnexp.errors import ConfigError, first_line, may_hold_secret, refused
from cnnexp.system.files import read_regular
from cnnexp.tracking.metrics import leaves

PACKAGE = Path(__file__).resolve().parents[1]
# a checkout holds conf/ beside the package, an installed package inside it
CONF = next((path for path in (PACKAGE / "conf", PACKAGE.parent / "conf") if path.is_dir()), PACKAGE / "conf").resolve()
HYDRA = Path(str(importlib.util.find_spec("hydra").origin)).resolve().parent / "conf"  # type: ignore[union-attr]
TRUSTED = {CONF / "config.yaml", CONF / "hydra/sweeper/tpe.yaml", *HYDRA.rglob("*.yaml")}

# by the key of Hydra's that may name it: what Hydra, cnnexp and the extra `sweep` bring
TARGETS = {
    r"hydra\.callbacks\.\w+\._target_": {"cnnexp.app.hydra_app.SweepCallback"},
    r"hydra\.sweeper\._target_": {
        "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "hydra_plugins.cnnexp_search.sweeper.TpeSweeper",
    },
    r"hydra\.launcher\._target_": {
        "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
        "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
    },
}
INSTANTIATE = {"_target_", "_args_", "_partial_", "_recursive_", "_convert_"}  # keys that Hydra's `instantiate` reads
MAKES_KEYS = re.compile(r"oc\.(create|decode)|_target_")
LOGGING = {"logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "colorlog.ColoredFormatter"}
LOG_FILE = "${hydra.runtime.output_dir}/${hydra.job.name}.log"  # in the run's folder: lines in another may be code
STREAMS = {"ext://sys.stdout", "ext://sys.stderr"}
NAMES = ("hydra.output_subdir", "hydra.job.name")  # of a run's folder and of its files
AS_TYPED = ("hydra.overrides", "hydra.job.override_dirname")  # the command line, as text

# all that may follow a $ in a file that is not trusted: a value of a section that holds no address, and three resolvers
SECTION = r"(?:model|backend|optimizer|dataset|trainer|workers|sweep)(?:\.\w+)*"
NOW = r"\$\{now:%[YmdHMS][\w%-]*\}"
HARMLESS = re.compile(rf"\$\{{{SECTION}\}}|\$\{{by:|\$\{{outputs:\}}|{NOW}")
# all that such a file may set in the sections `hydra` and `tracking`: key -> what the value must match
_PART = rf"(?:[\w,=-]|{NOW})(?:[\w.,=-]|{NOW})*"  # of a path; it begins with no dot
_COUNT = r"-?\d+|null"
FROM_FILES = {
    r"hydra\.mode": r"RUN|MULTIRUN|null",
    r"hydra\.(run|sweep)\.dir": rf"\$\{{outputs:\}}(/{_PART})+",
    r"hydra\.sweeper\.params\.(model|backend|optimizer|dataset|trainer|workers)": r"[^/\\]*",  # in no other folder
    rf"hydra\.sweeper\.params\.{SECTION}": r"(?s:.*)",
    r"hydra\.sweeper\.(study|direction)": r".*",
    r"hydra\.sweeper\.(trials|at_once|seed|max_batch_size)": _COUNT,
    r"hydra\.launcher\.(n_jobs|timeout_min|nodes|(tasks|gpus)_per_node|cpus_per_(task|gpu)|mem_gb)": _COUNT,
    r"hydra\.launcher\.(partition|qos|account|constraint|gres)": r"[\w.:-]+",
    r"tracking\.name": r"mlflow|none",
    r"tracking\.uri": r"null|https?://[\w.-]+(:\d+)?(/[\w./-]*)?",
    r"tracking\.(experiment|run_name)": r".*",
}
# how these say what is legal of a key: the first that it begins with
LEGAL = {
    r"hydra\.(run|sweep)\.dir$": "it must be ${outputs:}/NAME, NAME may hold ${now:%Y-%m-%d}",
    r"hydra": "legal of hydra: mode, run.dir, sweep.dir, counts and plain names of sweeper and launcher",
    r"tracking\.uri$": "it must be http://HOST:PORT or null",
    r"tracking": "legal: name, uri, experiment, run_name",
}
RERUN = "--experimental-rerun"  # unpickles a file
STORE = "CNNEXP_STORE_URI"
MOST_BYTES = 1 << 20  # of a config file
MOST_NODES = 100_000  # of a config file, its aliases followed


def hide_secrets(words: Sequence[str]) -> list[str]:
    """Return a command line with a `tracking.uri` that may hold a secret moved into the environment, whole.

    What Hydra and MLflow write down then holds the name of the variable alone; the processes of jobs inherit it.
    ConfigError is raised where the address holds an interpolation that leads nowhere.
    """
    shown = []
    for word in words:
        key, _, value = word.partition("=")
        uri = value[1:-1] if value[:1] in ("'", '"') and value.endswith(value[0]) else value
        if key.lstrip("+") == "tracking.uri" and may_hold_secret(uri):
            try:
                os.environ[STORE] = str(OmegaConf.create({"uri": uri})["uri"])
            except OmegaConfBaseException as error:
                raise ConfigError(f"tracking.uri: {first_line(error)}") from error
            word = f"{key}=${{oc.env:{STORE}}}"
        shown.append(word)
    return shown


def check_file(path: Path) -> None:
    """Raise ConfigError where a config file is too large, no text, or unfolds without end by aliases.

    And, but for `TRUSTED` files, where it reads the environment or leads out of the folders of configs.
    """
    try:
        with refused(ConfigError, str(path)):
            text = read_regular(path, MOST_BYTES).decode("utf-8")
        root = yaml.compose(text, Loader=yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader)
        if root is not None and _nodes(root, {}) > MOST_NODES:
            raise ConfigError(f"{path}: unfolds to more than {MOST_NODES} values by its aliases")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from error
    except yaml.YAMLError:
        return  # its reader says where
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deep") from error
    if root is not None and path.resolve() not in TRUSTED:
        _check_texts(root, path)


def check_placed(values: Any, file: Path) -> None:
    """Raise ConfigError where a file that is not `TRUSTED` sets, by its unresolved values, what `FROM_FILES` lacks."""
    if file.resolve() in TRUSTED:
        return
    for key, value in leaves(values).items() if isinstance(values, Mapping) else ():
        if key.partition(".")[0] not in ("hydra", "tracking"):
            continue
        text = "null" if value is None else str(value)
        rules = [rule for name, rule in FROM_FILES.items() if re.fullmatch(name, key)]
        if key == "tracking.uri" and may_hold_secret(text):
            typed = "type tracking.uri=STORE, or tracking.uri='${oc.env:NAME}' and set the variable NAME"
            why = f"what it holds besides a host would be copied beside every run: {typed}"
            raise ConfigError(f"{file}: tracking.uri: refused; {why}")
        if not rules or not re.fullmatch(rules[0], text):
            legal = next(said for name, said in LEGAL.items() if re.match(name, key))
            raise ConfigError(f"{file}: {key}={value!r}: refused; in a file, {legal}; else type it")


def check_composed(config: Mapping[str, Any]) -> None:
    """Raise ConfigError where a composed config, unresolved, names code, or files outside the run's folder."""
    for here, key, item in _walk(config):
        ours = (str(item) in targets for place, targets in TARGETS.items() if re.fullmatch(place, here))
        if (key in INSTANTIATE and not any(ours)) or (isinstance(item, str) and MAKES_KEYS.search(item)):
            raise ConfigError(f"{here}={item!r}: refused; a config runs no code but what ships with cnnexp")
        if re.match(r"hydra\.(job|hydra)_logging\b", here):
            # refuse what `logging.config` would import or call, and what stands for something that is not looked at
            if key == "filename" and item != LOG_FILE:
                raise ConfigError(f"{here}={item!r}: refused; legal: {LOG_FILE}")
            named = isinstance(item, str) and re.match(r"(ext|cfg)://|\$\{", item) and item not in STREAMS
            imported = key in ("class", "()", "factory") and item not in LOGGING
            if (named and key not in ("filename", "level")) or imported:
                raise ConfigError(f"{here}={item!r}: refused; legal: {', '.join(sorted(LOGGING | STREAMS))}")
        if here == "hydra.job.env_set" and item:
            why = "a variable may name code, which processes of the run would load: set it where you type the command"
            raise ConfigError(f"{here}={item!r}: refused; {why}")
        if here in NAMES and item is not None and not re.fullmatch(r"(?!\.+$)[\w. -]+", str(item)):
            raise ConfigError(f"{here}={item!r}: refused; legal: a plain name, which stays in the run's folder")


def _nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Return how many nodes are below a node, each alias counted as often as it is used."""
    if id(node) not in known:
        known[id(node)] = MOST_NODES + 1  # what holds itself has no end
        known[id(node)] = 1 + sum(_nodes(child, known) for child in _children(node))
    return known[id(node)]


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.ScalarNode):
        return []
    return [child for pair in node.value for child in pair] if isinstance(node, yaml.MappingNode) else node.value


def _check_texts(node: yaml.Node, path: Path, defaults: bool = False) -> None:
    """Refuse in all texts of a file, keys included, what is not `HARMLESS`; in a defaults list, other folders."""
    if isinstance(node, yaml.ScalarNode):
        where = f"{path}, line {node.start_mark.line + 1}: {node.value!r}: refused; "
        if "$" in HARMLESS.sub("", node.value):
            legal = "${SECTION.KEY} (but of tracking), ${by:...}, ${outputs:}, ${now:%Y...}"
            raise ConfigError(f"{where}in a file, $ stands only in {legal}: what reads the environment is typed")
        if MAKES_KEYS.search(node.value):
            raise ConfigError(f"{where}a config runs no code but what ships with cnnexp")
        if node.value == "searchpath" or (defaults and re.search(r"\.\.|//|\\|:", node.value)):
            raise ConfigError(f"{where}a file leads to no other folder of configs: give --config-dir")
    pairs = node.value if isinstance(node, yaml.MappingNode) else [(None, child) for child in _children(node)]
    for key, child in pairs:
        if key is not None:
            _check_texts(key, path, defaults)
        _check_texts(child, path, defaults or (key is not None and key.value == "defaults"))


def _walk(value: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted key, the key and the value of all that a config holds, at any depth, but for `AS_TYPED`."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        here = f"{prefix}{key}"
        if here not in AS_TYPED:
            yield here, key, item
            yield from _walk(item, f"{here}.")
