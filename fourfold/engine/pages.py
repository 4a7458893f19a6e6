"""HTML pages, by Jinja: every page extends page.html, so that all have one look."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, select_autoescape

import fourfold


def page(template: str, **given: Any) -> str:
    """Return a page.

    Args:
        template: its file, within this package.
        **given: the names that it reads.
    """
    loader = FileSystemLoader(Path(fourfold.__file__).parent)
    environment = Environment(
        loader=loader, autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**given) + "\n"
