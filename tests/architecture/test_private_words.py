"""The project's words are the field's: words that only its authors would use are found here, with what to write."""

from __future__ import annotations

import re

import pytest

from repository import ROOT, SOURCE, repository_files, text_of

INSTEAD = {
    r"told|tells?|telling": "report, infer, distinguish, extrapolate",
    r"nobody|somebody|anybody|whoever": "none, no rank, a user",
    r"anew": "again",
    r"mend(s|ed|ing)?": "fix",
    r"beside": "next to, compared with",
    r"as far as": "to the extent that",
    r"at hand": "available, installed, existing",
    r"in view": "known",
    r"stands? (in|for)|standing (in|for)|stood (in|for)": "is defined in, represents, multiplicity",
    r"comput(e|es|ed|ing) again": "recompute",
    r"meet(s|ing|ings)?": "communication op, collective, arrive",
    r"play(s|ed|er|ing)?": "simulate, execute, replay",
    r"for ?ever": "deadlock, indefinitely",
    r"nouns?": "data type",
    r"efsdp": "expert FSDP, expert_dp_shard",
    r"sum scatter": "reduce_scatter",
    r"slowness": "StackFactors",
    r"is no (key|verb|command)": "unknown key, unknown command",
    r"is none of": "must be one of",
    r"nothing is wrong": "configuration valid",
    r"(does|do|could) without": "candidates at the peak, omit",
    r"unasked": "without --overwrite",
}
"""Pattern of lower-case words: what to write."""

STORED_NAMES = re.compile("stands_for")
"""Names in files that older versions wrote, which are still read."""

PAGES = [file for file in (ROOT / "docs").rglob("*.md") if file.name != "LOG.md"]
PARTS = {
    **{folder.name: sorted(folder.rglob("*.py")) for folder in sorted(SOURCE.iterdir()) if folder.is_dir()},
    "(top)": sorted(SOURCE.glob("*.py")),
    "docs": [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(PAGES)],
}
_WORD_ENDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_+")
_ALTERNATIVES = "|".join(rf"(?P<w{number}>{words})" for number, words in enumerate(INSTEAD))
_FOUND = re.compile(rf"\b(?:{_ALTERNATIVES})\b")


def words_of(text: str) -> str:
    """Return text in lower case, identifiers as their words."""
    return _WORD_ENDS.sub(" ", text).lower()


def private_words(part: str) -> list[str]:
    """Return the place of each private word in the files of `part`, with what to write instead."""
    known, newline = set(repository_files()), "\n"
    return [
        f"{file.relative_to(ROOT)}:{found.string.count(newline, 0, found.start()) + 1}: {found[0]!r}: "
        f"write {instead_of(found)}"
        for file in PARTS[part]
        if file in known
        for found in _FOUND.finditer(words_of(STORED_NAMES.sub("", text_of(file))))
    ]


def instead_of(found: re.Match[str]) -> str:
    """Return what INSTEAD says of a word that was found."""
    assert found.lastgroup is not None
    return list(INSTEAD.values())[int(found.lastgroup[1:])]


@pytest.mark.parametrize("part", sorted(PARTS))
def test_no_private_words(part: str) -> None:
    assert private_words(part) == []


def test_private_words_are_found() -> None:
    found = _FOUND.search(words_of("def is_told_by(self): ..."))
    assert found is not None
    assert "infer" in instead_of(found)
