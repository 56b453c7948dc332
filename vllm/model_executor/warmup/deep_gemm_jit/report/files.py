"""Decides how a report becomes a file: by its suffix, whole or not at all."""

import json
import pathlib
import secrets

from .document import to_json
from .values import Report

_HTML = (".html", ".htm")


def write_report(report: Report, path: pathlib.Path) -> None:
    """Write the page to a ``path`` that ends in ``.html``, else the JSON.

    Raises:
        OSError: The folder cannot be written, or ``path`` is there and no file:
            a rename by root would take the place of a device as well.

    """
    if path.suffix.lower() in _HTML:
        # Brings a template library, which only the page needs.
        from .page import to_html

        _write(to_html(report), path)
    else:
        _write(json.dumps(to_json(report), indent=1), path)


def _write(text: str, path: pathlib.Path) -> None:
    # What a link leads to is written, and the link stays.
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError("it is there and is not a regular file")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by tempfile, whose files are their owner's alone: a monitor reads reports.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
