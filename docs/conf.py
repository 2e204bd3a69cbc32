"""The documentation site: `make docs` builds it into build/docs."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import config_pages  # noqa: E402

from cnnexp import __version__  # noqa: E402

project = "cnnexp"
author = copyright = "the cnnexp developers"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
napoleon_google_docstring = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
suppress_warnings = ["myst.xref_missing"]  # the papers' pages link to files that a sweep writes
html_theme = "furo"
html_title = "cnnexp"

config_pages.write(HERE.parent / "conf", HERE / "reference" / "config.md")
