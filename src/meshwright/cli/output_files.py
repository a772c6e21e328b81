"""Files that a command writes: refused before the work whose result they hold, not after it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from meshwright.errors import ConfigError


def require_file(option: str, file: Path) -> None:
    """Raise ConfigError unless `file` can be written: its folder, which is never made, exists and takes files."""
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {file.parent}: make it, or name one that exists")
    require_writable(option, file.parent)


def require_page(option: str, file: Path) -> None:
    """Raise as `require_file` does, and UnsupportedError where plotly, which draws the page, is not installed."""
    from meshwright.extras import import_extra
    from meshwright.pages.html.html_page import PURPOSE

    require_file(option, file)
    import_extra("plotly", PURPOSE)


def require_folder(option: str, folder: Path) -> None:
    """Make `folder` if it does not exist; raises ConfigError where it cannot be made or takes no files."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{option} {folder} is a file: name a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(option, folder, error) from error
    require_writable(option, folder)


def require_writable(option: str, folder: Path) -> None:
    """Raise ConfigError unless a file can be made in `folder`; none is left there."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _refused(option, folder, error) from error


def _refused(option: str, folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{option}: cannot write to the folder {folder} ({error.strerror or error}): name one that can be written"
    )
