"""What config calls by name: the classes that we ship, and those that plugins add.

A plugin is a module, or a file, that calls `register`. It is loaded where the command line (`plugins=FILE.py`) or the
environment (`CNNEXP_PLUGINS`) names it; and, once a name is asked for that is not ours, where an installed package
offers it as an entry point of the group `cnnexp_plugins`. No config file names one: it may come from elsewhere.
"""

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from cnnexp.errors import PLUGINS, ConfigError, did_you_mean, said

T = TypeVar("T")
C = TypeVar("C", bound=type)

ENTRY_POINTS = "cnnexp_plugins"
VARIABLE = "CNNEXP_PLUGINS"  # files and modules, with os.pathsep between; child processes inherit it

_added: dict[str, dict[str, type]] = {g: {} for g in ("model", "layer", "backend", "optimizer", "dataset", "workers")}
_shipped: dict[str, Mapping[str, object]] = {}


class Registry(Mapping[str, type[T]], Generic[T]):
    """The classes of a group, of `conf/` or `layer`, by name; one given as `module:Class` is imported at need."""

    def __init__(self, group: str, shipped: Mapping[str, type[T] | str], package: str = "cnnexp") -> None:
        self._group, self._ours, self._package = group, shipped, package
        if taken := [name for name in _added[group] if name in shipped]:
            raise _taken(group, taken[0])
        _shipped[group] = shipped

    def __getitem__(self, name: str) -> type[T]:
        entry: Any = self._ours[name] if name in self._ours else _added[self._group][name]
        if isinstance(entry, str):
            module, _, cls = entry.partition(":")
            entry = getattr(importlib.import_module(f"{self._package}.{module}"), cls)
        return entry

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._ours or name in _added[self._group])

    def __iter__(self) -> Iterator[str]:
        return iter([*self._ours, *_added[self._group]])

    def __len__(self) -> int:
        return len(self._ours) + len(_added[self._group])

    def find(self, name: object, key: str) -> type[T]:
        """Return the class of a name, from an installed plugin if need be; else ConfigError says so of the `key`."""
        if name not in self:
            load_installed()
        if name not in self:
            near = did_you_mean(str(name), self)
            shown = "null" if name is None else repr(name)
            raise ConfigError(f"{key}={shown}: unknown; legal: {', '.join(self)}{near}")
        return self[str(name)]


def register(group: str, name: str) -> Callable[[C], C]:
    """Add a frozen dataclass to a group under a name, as a decorator; its fields are the keys of its config.

    Args:
        group: `model`, `layer`, `backend`, `optimizer`, `dataset` or `workers`.
        name: that config calls it by.

    Raises:
        ConfigError: there is no such group, the name is taken, or the class is no dataclass.
    """
    if group not in _added:
        raise ConfigError(f"register({group!r}): unknown; legal: {', '.join(_added)}{did_you_mean(group, _added)}")

    def add(cls: C) -> C:
        if not dataclasses.is_dataclass(cls):
            raise ConfigError(f"register({group!r}, {name!r}): {cls.__name__} must be a dataclass")
        if group == "layer" and name != cls.__name__:  # a stored network names it by its class
            raise ConfigError(f"register({group!r}, {name!r}): must be called as its class, {cls.__name__!r}")
        other = _added[group].get(name, cls)
        same = (other.__module__, other.__qualname__) == (cls.__module__, cls.__qualname__)
        if not same or name in _shipped.get(group, ()):
            raise _taken(group, name)
        _added[group][name] = cls
        PLUGINS.add(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")
        return cls

    return add


def added(group: str) -> Mapping[str, type]:
    """Return what plugins have added to a group, by name."""
    return _added[group]


def files(group: str) -> dict[str, str]:
    """Return the file that each class of a group comes from that plugins have added, by name."""
    return {
        name: os.path.realpath(file)
        for name, cls in _added[group].items()
        if (file := getattr(sys.modules.get(cls.__module__), "__file__", None))
    }


def load(plugin: str) -> None:
    """Import a plugin: a module, or a file that ends in .py, under its own name; raise ConfigError where that fails."""
    name = plugin
    if plugin.endswith(".py"):
        path = Path(plugin).expanduser().resolve()
        if not path.is_file():
            raise ConfigError(f"plugins={plugin}: no such file")
        name = path.stem
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # last, so that it hides nothing; workers find its classes there
    try:
        module = importlib.import_module(name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"plugins={plugin}: cannot be imported: {said(error)}") from error
    if plugin.endswith(".py") and Path(module.__file__ or "").resolve() != path:
        raise ConfigError(f"plugins={plugin}: another module is called {name}; rename the file")


def load_named() -> None:
    """Load the plugins that the environment names."""
    for plugin in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        load(plugin)


def load_installed() -> None:
    """Load the plugins that the environment names and those that installed packages offer."""
    load_named()
    from importlib import metadata  # slow to import, and rarely needed

    for point in metadata.entry_points(group=ENTRY_POINTS):
        load(point.module)


def take_plugins(words: Sequence[str]) -> list[str]:
    """Load what `plugins=FILE.py`, `plugins=[FILE.py,module]` on a command line names; return its other words."""
    others = []
    for word in words:
        key, given, value = word.partition("=")
        if key.lstrip("+") != "plugins" or not given:
            others.append(word)
            continue
        named = [part.strip(" '\"") for part in value.strip("[]").split(",")]
        files = [str(Path(part).expanduser().resolve()) if part.endswith(".py") else part for part in named if part]
        os.environ[VARIABLE] = os.pathsep.join(filter(None, [os.environ.get(VARIABLE, ""), *files]))
    load_named()
    return others


def _taken(group: str, name: str) -> ConfigError:
    return ConfigError(f"register({group!r}, {name!r}): the name is taken; choose another")
