"""Models that huggingface_hub has downloaded to this machine, found by their id; nothing is downloaded here."""

import os
import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Return whether `name` has the form ORGANISATION/MODEL and is neither a file nor a file's name."""
    return _HUB_ID.fullmatch(name) is not None and not name.endswith((".json", ".csv")) and not os.path.exists(name)


def local_path(name: str) -> Path:
    """Return the path that `name` means: itself with ~ expanded, or the snapshot in the cache for the id of a model."""
    snapshot = _snapshot(name) if is_hub_id(name) else None
    return snapshot or Path(os.path.expanduser(name))


def hub_advice(name: str) -> str:
    """Return how to get the model with the id `name`, as the end of a message; "" for what is no id."""
    if not is_hub_id(name):
        return ""
    return (
        f"; if it is a model of the Hugging Face Hub, `hf download {name}` puts it into the cache {hub_cache()}, where "
        "it is found by this name"
    )


def hub_cache() -> Path:
    """Return the folder that huggingface_hub keeps models in, from the variables that it reads."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(named)))


def _snapshot(hub_id: str) -> Path | None:
    """Return the newest downloaded snapshot of the branch main, or the only snapshot there is; None without one."""
    folder = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        found = [folder / "snapshots" / commit]
    except OSError:
        found = sorted((folder / "snapshots").glob("*"))
    return found[0] if len(found) == 1 and found[0].is_dir() else None
