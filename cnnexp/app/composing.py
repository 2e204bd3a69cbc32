"""Turn what Hydra, OmegaConf and YAML say of a config that cannot be composed, in many lines, into one of ours."""

import re
import traceback
from collections.abc import Callable, Sequence

from yaml import MarkedYAMLError

from cnnexp.app.config_security import CONF
from cnnexp.errors import ConfigError, did_you_mean

COMPOSERS = {"hydra", "omegaconf", "yaml", "antlr4", "codecs"}

# of OmegaConf, where a value of one form is given for one of another
MERGES = {
    "Cannot merge DictConfig with ListConfig": "must be a list, not a mapping",
    "Cannot merge ListConfig with DictConfig": "must be a mapping, not a list",
}

# what other libraries call a key of ours
SYNONYMS = {
    "learning_rate": "lr",
    "batch": "batch_size",
    "epoch": "epochs",
    "num_epochs": "epochs",
    "n_filters": "filters",
    "patience_s": "heartbeat_timeout_s",
}


def explain(error: Exception, config_keys: Callable[[], Sequence[str]]) -> ConfigError | None:
    """Return the user's error behind an exception, or None where it was not raised while composing.

    `config_keys` returns the dotted keys of a config that does compose; it is asked only when a key is unknown.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = str(frames[-1].f_globals["__name__"])
    if not {module.partition(".")[0] for module in (raised_in, type(error).__module__)} & COMPOSERS:
        return None
    text = re.sub(r"^LexerNoViableAltException: ", "", said := str(error) or str(error.__cause__))
    if match := re.match(r"Could not (?:override|delete from config\.) '([^']+)'", text):
        return _unknown_key(match[1], text, config_keys())
    if match := re.search(r"Could not (?:find|load) '(.+?)/([^/']+)'", text):
        group, name = match[1], match[2]
        listed = re.search(r"Available options in .*?:\n((?:\t.+\n?)+)", text)
        options = listed[1].split() if listed else sorted(path.stem for path in (CONF / group).glob("*.yaml"))
        legal = f"; legal: {', '.join(options)}" if options else ""
        return ConfigError(f"{group}={name}: unknown{legal}{did_you_mean(name, options)}")
    if match := re.match(r"Ambiguous value for argument '(.+?)=(.+)'", text):
        key, value = match[1], match[2]
        return ConfigError(f"{key}={value}: several values; add -m to run them all, or quote them: {key}=\"'{value}'\"")
    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark
        return ConfigError(f"{mark.name}, line {mark.line + 1}: not YAML: {error.problem}")
    if isinstance(error, UnicodeDecodeError):
        read = [frame.f_locals["full_path"] for frame in frames if "full_path" in frame.f_locals]  # of Hydra
        return ConfigError(f"{read[-1] if read else 'a config file'}: not UTF-8 text: {error}")
    if text != said or "token recognition error" in text:
        how = "quote a value of other letters: KEY=\"'VALUE'\""
        return ConfigError(f"cannot read {_one_line(text).rstrip(' ^')}; {how}")
    if match := re.match(r"Error merging override (.+)", text):
        why = (str(error.__cause__).splitlines() or [""])[0]
        return ConfigError(f"{match[1]}: {MERGES.get(why, why)}")
    typed = getattr(error, "override", None)  # of Hydra's parser
    how = "close its brackets, or quote the value: KEY=\"'VALUE'\""
    return ConfigError(f"{typed}: cannot be read ({_one_line(text)}); {how}" if typed else _one_line(text))


def _unknown_key(key: str, text: str, keys: Sequence[str]) -> ConfigError:
    """`key` is no key of the config: list those beside it."""
    given = re.search(r"use \+(.+)$", text, re.MULTILINE)
    parent = key.rpartition(".")[0]
    prefix = f"{parent}." if any(k.startswith(f"{parent}.") for k in keys) else ""
    legal = list(dict.fromkeys(k[len(prefix) :].split(".")[0] for k in keys if k.startswith(prefix)))
    where = f" in {parent}" if prefix else ""
    leaf = SYNONYMS.get(key.rpartition(".")[2], key.rpartition(".")[2])
    meant = [k for k in keys if k.rpartition(".")[2] == leaf]  # lr: optimizer.lr
    near = f"; did you mean {meant[0]!r}?" if meant else did_you_mean(key, [*keys, *(legal if not prefix else ())])
    return ConfigError(f"{given[1] if given else key}: unknown key; legal{where}: {', '.join(legal)}{near}")


def _one_line(text: str) -> str:
    return " ".join(text.partition("\nConfig search path")[0].partition("\nSee https")[0].split())
