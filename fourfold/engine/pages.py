"""HTML pages, by Jinja: every page extends page.html, so that all have one look."""

import functools
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import fourfold


def page(template: str, back: str = "", **values: Any) -> str:
    """Return a page.

    Args:
        template: its file, within this package.
        back: the address of the page that links to it; "" for none.
        **given: the names that it reads.
    """
    return _environment().get_template(template).render(back=back, **values) + "\n"


@functools.cache
def _environment() -> Environment:
    loader = FileSystemLoader(Path(fourfold.__file__).parent)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
