"""Configuration of the documentation site (Sphinx, MyST, furo)."""

from __future__ import annotations

import builtins
import re
import sys
import tomllib
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from sphinx.addnodes import pending_xref

from mmfsdp.basics.installing import REPOSITORY

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from tools.llms_txt import llms_txt  # noqa: E402

project = "mmfsdp"
author = "mmfsdp developers"
project_copyright = author
release = tomllib.loads((HERE.parent / "packages/core/pyproject.toml").read_text())["project"]["version"]
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["_build", "requirements.txt", "adr"]  # decisions are read in the repository

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
html_static_path = ["static"]
html_css_files = ["wide.css"]  # tables use the width that the window has
html_js_files = [("versions.js", {"defer": "defer"})]
if REPOSITORY != "URL":  # then each page has a link to its file
    html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}
python_maximum_signature_line_length = 100


def plain(annotation: Any) -> str:
    """Return a type without what pydantic attaches to it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return plain(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(map(plain, arguments))
    if origin is not None and origin is not Literal and arguments:
        return f"{origin.__name__}[{', '.join(map(plain, arguments))}]"
    if annotation is type(None) or annotation is Ellipsis:
        return "None" if annotation is not Ellipsis else "..."
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def fields(model: type[BaseModel]) -> str:
    """Return the signature of a model: its fields with plain types and defaults."""
    parts = []
    for name, field in model.model_fields.items():
        is_short = isinstance(field.default, (str, int, float, bool, NoneType))
        default = "" if field.is_required() else f" = {field.default!r}" if is_short else " = ..."
        parts.append(f"{name}: {plain(field.annotation)}{default}")
    return f"(*, {', '.join(parts)})"


def shorten(app: Any, what: str, name: str, thing: Any, options: Any, signature: str, returns: str) -> Any:
    """Return signatures without internals: Sphinx calls this for each object that it documents."""
    if isinstance(thing, type) and issubclass(thing, BaseModel):
        return fields(thing), returns
    return re.sub(r"<(?:[^<>]|<[^<>]*>)*>", "...", signature) if signature else signature, returns


def break_names(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Let names in tables wrap behind their dots and underscores: Sphinx calls this for each page."""

    def wrap(cell: re.Match[str]) -> str:
        return re.sub(r'(?<=<span class="pre">)[^<]+', lambda name: re.sub(r"([._])", r"\1<wbr>", name[0]), cell[0])

    context["body"] = re.sub(r"<td.*?</td>", wrap, context.get("body", ""), flags=re.DOTALL)


def unlink_builtins(app: Any, doctree: Any) -> None:
    """Leave names such as `bytes` in signatures without a link, which would lead to attributes of that name."""
    for reference in [*doctree.findall(pending_xref)]:
        if reference.get("refdomain") == "py" and reference.get("reftarget") in vars(builtins):
            reference.replace_self(reference.children)


def write_llms_txt(app: Any, error: Exception | None) -> None:
    """Write the list of pages for programs: Sphinx calls this after the last page."""
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "llms.txt").write_text(llms_txt(HERE), encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("build-finished", write_llms_txt)
    app.connect("autodoc-process-signature", shorten)
    app.connect("doctree-read", unlink_builtins)
    app.connect("html-page-context", break_names)
