"""Which key was meant: for a key or section that a job does not have, by names.toml or by spelling."""

import tomllib
from difflib import get_close_matches
from pathlib import Path

from meshwright.config.keys import SECTIONS, job_keys
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_source import FIELD_NAMES


def _by_name(meanings: dict[str, list[str]]) -> dict[str, str]:
    return {name: meant for meant, names in meanings.items() for name in names}


_NAMES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ALIASES = _by_name(_NAMES["keys"])
"""The key that another trainer's means, or an explanation, which has a space in it."""
SECTION_ALIASES = _by_name(_NAMES["sections"])


def meant_section(section: str) -> str | None:
    """Return the section that an unknown name most probably means, or None."""
    close = get_close_matches(section, SECTIONS, n=1, cutoff=0.6)
    return SECTION_ALIASES.get(section) or (close[0] if close else None)


def advice_for_key(dotted: str) -> str:
    """Return what to write instead of an unknown key: the end of a sentence."""
    section, _, name = dotted.rpartition(".")
    section = section.partition(".")[0]
    meant = _meant_key(section, name)
    if meant is None:
        return _where_to_look(section)
    return meant if " " in meant else f"did you mean {meant}?"


def _meant_key(section: str, name: str) -> str | None:
    keys = job_keys()
    same_name = [dotted for dotted, key in keys.items() if key.name == name]
    here = meant_section(section) if section not in SECTIONS else section
    if f"{section}.{name}" in ALIASES:
        return ALIASES[f"{section}.{name}"]
    if f"{here}.{name}" in keys:
        return f"{here}.{name}"
    if here == "model" and (field := FIELD_NAMES.get(name, name)) in LlamaArchitecture.model_fields:
        return f"model.options.{field}"
    if len(same_name) == 1:
        return same_name[0]
    if name in ALIASES:
        return ALIASES[name]
    in_section = [key.name for key in keys.values() if key.section == here]
    close = get_close_matches(name, in_section, n=1, cutoff=0.6)
    if close:
        return f"{here}.{close[0]}"
    close = get_close_matches(f"{here or ''}.{name}", keys, n=1, cutoff=0.75)
    return close[0] if close else None


def _where_to_look(section: str) -> str:
    section = meant_section(section) or section
    if section in SECTIONS:
        names = ", ".join(key.name for key in job_keys().values() if key.section == section)
        return f"leave it out, or use one of [{section}]'s keys: {names}"
    return f"leave it out, or use one of the sections: {', '.join(SECTIONS)}"
