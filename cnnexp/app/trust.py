"""What a config from elsewhere may not do: run code, unfold without end, or carry a password into the record.

Hydra itself imports and calls what `_target_` and logging handlers name, before our schema sees anything; so the whole
config is looked at as soon as it is composed. Code may be named by what ships with cnnexp and by installed plugins of
Hydra, and on the command line by `plugins`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from cnnexp.errors import ConfigError
from cnnexp.system.files import read_regular

TARGETS = {"cnnexp.app.hydra_app.SweepCallback"}
PLUGINS = ("hydra_plugins.", "hydra._internal.core_plugins.")  # installed: nobody can add to these from a file
LOGGING = {"logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "colorlog.ColoredFormatter"}
LOG_FILE = "${hydra.runtime.output_dir}/${hydra.job.name}.log"  # in the run's folder: lines in another may be code
STREAMS = {"ext://sys.stdout", "ext://sys.stderr"}
AS_TYPED = ("hydra.overrides", "hydra.job.override_dirname")  # the command line, as text
MAKES_KEYS = re.compile(r"oc\.(create|decode)|_target_")
RERUN = "--experimental-rerun"  # unpickles a file
PASSWORD = "CNNEXP_STORE_PASSWORD"
MOST_BYTES = 1 << 20  # of a config file
MOST_NODES = 100_000  # of a config file, its aliases followed


def check_words(words: Sequence[str]) -> None:
    """Raise ConfigError where a command line asks Hydra to unpickle a file."""
    for word in words:
        flag = word.partition("=")[0]
        if len(flag) > len("--") and RERUN.startswith(flag) and flag.startswith("--e"):
            raise ConfigError(f"{flag}: refused; it unpickles a file, which runs what is in it")


def hide_password(words: Sequence[str]) -> list[str]:
    """Return a command line with the password in `tracking.uri` moved into the environment, for jobs to find there.

    What Hydra and MLflow write down then holds the name of the variable alone.
    """
    shown = []
    for word in words:
        key, _, value = word.partition("=")
        password = None if "${" in value else _password(value.strip("'\""))
        if key.lstrip("+") == "tracking.uri" and password is not None:
            os.environ[PASSWORD] = password
            word = f"{key}={value.replace(f':{password}@', f':${{oc.env:{PASSWORD}}}@', 1)}"
        shown.append(word)
    return shown


def check_composed(config: Mapping[str, Any]) -> None:
    """Raise ConfigError where a composed config, unresolved, names code or holds a password.

    Args:
        config: as plain containers, Hydra's own section with it.
    """
    _check_code(config, "")
    hydra = config.get("hydra")
    if isinstance(hydra, Mapping):
        for section in ("job_logging", "hydra_logging"):
            _check_logging({section: hydra.get(section)}, "hydra")
        _check_job(hydra, hydra.get("job"))
    tracking = config.get("tracking")
    uri = tracking.get("uri") if isinstance(tracking, Mapping) else None
    if isinstance(uri, str) and "${" not in uri and _password(uri) is not None:
        raise ConfigError(
            "tracking.uri: a password in a config file would be copied beside every run; write ${oc.env:NAME} in its "
            "place and set the variable NAME"
        )


def check_file(path: Path) -> None:
    """Raise ConfigError where a config file is too large, no text, or unfolds without end by aliases."""
    try:
        text = read_regular(path, MOST_BYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from error
    try:
        root = yaml.compose(text, Loader=yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader)
        if root is not None and _nodes(root, {}) > MOST_NODES:
            raise ConfigError(f"{path}: unfolds to more than {MOST_NODES} values by its aliases")
    except yaml.YAMLError:
        return  # its reader says where
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deep") from error


def _password(uri: str) -> str | None:
    try:
        return urlsplit(uri).password
    except ValueError:  # brackets that hold no address
        found = re.search(r"://[^/@]*:([^@]*)@", uri)
        return found[1] if found else None


def _nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Return how many nodes are below a node, each alias counted as often as it is used."""
    if id(node) not in known:
        known[id(node)] = MOST_NODES + 1  # what holds itself has no end
        children = (
            [child for pair in node.value for child in pair] if isinstance(node, yaml.MappingNode) else node.value
        )
        inner = () if isinstance(node, yaml.ScalarNode) else children
        known[id(node)] = 1 + sum(_nodes(child, known) for child in inner)
    return known[id(node)]


def _check_code(value: Any, path: str) -> None:
    for key, item in _items(value):
        here = f"{path}.{key}" if path else str(key)
        if here in AS_TYPED:
            continue
        ours = path.startswith("hydra.") and isinstance(item, str) and (item in TARGETS or item.startswith(PLUGINS))
        if (key == "_target_" and not ours) or (isinstance(item, str) and MAKES_KEYS.search(item)):
            raise ConfigError(f"{here}={item!r}: refused; a config runs no code but what ships with cnnexp")
        _check_code(item, here)


def _check_logging(value: Any, path: str) -> None:
    """Refuse what `logging.config` would import or call, and what stands for something that is not looked at."""
    for key, item in _items(value):
        here = f"{path}.{key}"
        named = isinstance(item, str) and re.match(r"(ext|cfg)://|\$\{", item) and item not in STREAMS
        named = named and key not in ("filename", "level")
        if key == "filename" and item != LOG_FILE:
            raise ConfigError(f"{here}={item!r}: refused; legal: {LOG_FILE}")
        if named or (key in ("class", "()", "factory") and item not in LOGGING):
            raise ConfigError(f"{here}={item!r}: refused; legal: {', '.join(sorted(LOGGING | STREAMS))}")
        _check_logging(item, here)


def _check_job(hydra: Mapping[str, Any], job: Any) -> None:
    """Refuse variables for the job's processes, and names of its files that lead out of its folder."""
    job = job if isinstance(job, Mapping) else {}
    if job.get("env_set"):
        raise ConfigError(
            f"hydra.job.env_set={job['env_set']!r}: refused; a variable may name code, which processes of the run "
            "would load: set it where you type the command"
        )
    for key, name in (("output_subdir", hydra.get("output_subdir")), ("job.name", job.get("name"))):
        if name is not None and not re.fullmatch(r"(?!\.+$)[\w. -]+", str(name)):
            raise ConfigError(f"hydra.{key}={name!r}: refused; legal: a plain name, which stays in the run's folder")


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []
