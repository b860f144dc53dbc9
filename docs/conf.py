"""Configuration of the documentation site (Sphinx, MyST, furo)."""

from __future__ import annotations

import tomllib
from pathlib import Path

HERE = Path(__file__).parent

project = "mmfsdp"
author = "mmfsdp developers"
project_copyright = author
release = tomllib.loads((HERE.parent / "packages/core/pyproject.toml").read_text())["project"]["version"]
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["_build", "requirements.txt"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3  # links to `page.md#heading` work as they do in an unrendered file

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Console blocks show output, which no lexer promises to read.
suppress_warnings = ["misc.highlighting_failure"]

# The copy button copies the commands of a console block, without prompts and output.
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"

html_theme = "furo"
html_title = f"mmfsdp {release}"
