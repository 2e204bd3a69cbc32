"""`cnnexp help`, `cnnexp help GROUP` and `cnnexp help GROUP=NAME`: commands, and what `conf/` says of its keys."""

import contextlib
import io
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from cnnexp.app.config_security import CONF
from cnnexp.app.console import LINE, make_console, say
from cnnexp.app.hydra_app import launch
from cnnexp.errors import ConfigError, did_you_mean

NAME = 20  # columns of a name
COMMAND = 23  # columns before what a command does
PROSE = re.compile(r" *# (?! |@|python )")  # what stands before a line of a comment's prose
USAGE = """Train convolutional networks with hand-written kernels, and measure how much
faster each one is.

Usage: cnnexp [GROUP=NAME ...] [GROUP.KEY=VALUE ...]
                       one run (also: python -m cnnexp ...)
       cnnexp -m GROUP=NAME1,NAME2 GROUP.KEY=1,2
                       a sweep: every combination, in turn"""


def show_all(commands: Mapping[str, str]) -> None:
    """Print the help of the command line of this process: what each command does, then Hydra's of groups and keys."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        launch()  # prints and leaves
    console = make_console()
    width = min(console.width, LINE)
    lines = USAGE.splitlines()
    for name, does in commands.items():
        begin = f"       cnnexp {name} ".ljust(COMMAND)
        lines += textwrap.wrap(does, width, initial_indent=begin, subsequent_indent=" " * COMMAND)
    for line in ["", *printed.getvalue().splitlines()]:  # Hydra has all names of a group in one line
        fits = len(line) <= width
        lines += [line] if fits else textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False)
    say(console, "\n".join(lines))


def show(word: str, commands: Iterable[str]) -> None:
    """Print the names of a group, each with what its file says it is; of one name, or of a group of one, the file.

    The word is GROUP or GROUP=NAME, there is help for commands, too; ConfigError is raised where there is no such name.
    """
    group, _, name = word.partition("=")
    groups = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")
    if group not in groups:
        legal = [*commands, *groups]
        raise ConfigError(f"help {word}: unknown; legal: {', '.join(legal)}{did_you_mean(group, legal)}")
    files = dict(sorted((path.stem, path) for path in (CONF / group).glob("*.yaml")))
    if name and name not in files:
        raise ConfigError(f"help {word}: unknown; legal: {', '.join(files)}{did_you_mean(name, files)}")
    console = make_console()
    width = min(console.width, LINE)
    if not name and len(files) > 1:
        lines = [line for name, path in files.items() for line in _titled(name, path, width)]
        lines += ["", f"cnnexp help {group}=NAME shows its keys, each with what it may be."]
    else:
        lines = list(_file(files[name] if name else next(iter(files.values())), width))
    say(console, "\n".join(lines))


def _titled(name: str, path: Path, width: int) -> list[str]:
    """Return a name and the first comment of its file."""
    comments = (line.lstrip("# ") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    first = next(comment for comment in comments if not comment.startswith("@package")).rstrip(":")
    text = first.partition(": python -m cnnexp")[0]
    alone, begin = ([name], "") if len(name) >= NAME else ([], name)
    return [*alone, *textwrap.wrap(text, width, initial_indent=begin.ljust(NAME), subsequent_indent=" " * NAME)]


def _file(path: Path, width: int) -> Iterator[str]:
    """Yield the lines of a file; comments are filled, but for what is to be typed."""
    texts = path.read_text(encoding="utf-8").splitlines()
    for begun, lines in groupby(texts, lambda line: (PROSE.match(line) or [""])[0]):
        if begun:
            text = " ".join(line.removeprefix(begun) for line in lines)
            yield from textwrap.wrap(text, width, initial_indent=begun, subsequent_indent=begun)
        else:
            yield from (line for line in lines if not line.startswith("# @package"))
