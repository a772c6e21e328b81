"""What the documents name exists: paths, commands, options, make targets, and the tree with its descriptions."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from meshwright.cli.main import VERBS, group
from meshwright.config.load import load_job
from repository import ROOT, SOURCE, repository_files, text_of

DOCUMENTS = [file for file in repository_files() if file.suffix == ".md"]
# Those that show the way around must name nothing that is not there; a decision record may name what was rejected.
GUIDES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/tour.md", "docs/STATUS.md")]
PATH = re.compile(r"[\w.-]*/[\w./-]*|[\w-]+\.(py|md|toml|txt|svg|lock)|Makefile")
# What a run writes, what a user would write, and what git ignores.
MADE_LATER = re.compile(
    r"^(runs|my_|path/|checkpoints|timelines|logs|\.demo|\.venv|job\.toml|/)|(^|/)(step|rank)-|NAME"
)
TREE_LINE = re.compile(r"^( *)(\S+)(?: {2,}(.+))?$")


def fences_of(text: str) -> list[str]:
    return re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def code_of(text: str) -> Iterator[str]:
    """Return each line of code: of the blocks, and each piece between backticks."""
    for fence in fences_of(text):
        yield from fence.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", prose)


def exists(name: str, document: Path) -> bool:
    return any((folder / name).exists() for folder in (ROOT, SOURCE, document.parent))


def commands_of(document: Path, program: str) -> list[list[str]]:
    """Return the words after `program` in each line of code that begins with it."""
    lines = (re.sub(r"\s+#.*", "", line.strip().removeprefix("$ ")) for line in code_of(text_of(document)))
    return [line.split()[1:] for line in lines if re.match(rf"{program}( |$)", line)]


@pytest.mark.parametrize("document", GUIDES, ids=lambda path: path.name)
def test_every_path_that_a_guide_names_exists(document: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", text_of(document), flags=re.MULTILINE | re.DOTALL)
    names = [name for name in re.findall(r"`([^`\n]+)`", prose) if PATH.fullmatch(name) and not MADE_LATER.search(name)]
    assert names, f"{document.name} names no path"
    assert [name for name in names if not exists(name, document)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|href)=\"([^\"#]+)\"", text_of(document))
    local = [one or other for one, other in targets if "://" not in one + other]
    assert [target for target in local if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_exists_with_its_options(document: Path) -> None:
    with group.make_context("meshwright", [], resilient_parsing=True) as context:
        for words in commands_of(document, "meshwright"):
            if words and not words[0].startswith("-") and words[0].isalpha() and words[0].islower():
                assert words[0] in VERBS, f"meshwright {' '.join(words)}"
                command = group.get_command(context, words[0])
                if isinstance(command, click.Group) and len(words) > 1 and not words[1].startswith("-"):
                    command = command.get_command(context, words[1])
                assert command is not None, f"meshwright {' '.join(words)}"
                known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
                asked = {word.split("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)}
                assert asked <= known | {"--help"}, f"meshwright {' '.join(words)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_that_is_named_exists(document: Path) -> None:
    named = [word for words in commands_of(document, "pytest") for word in words if "/" in word]
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_target_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    asked = {word for words in commands_of(document, "make") for word in words if word.replace("-", "").isalpha()}
    assert asked <= targets


def test_the_job_in_the_readme_is_one(tmp_path: Path) -> None:
    [text] = re.findall(r"^```toml\n(.*?)^```", text_of(ROOT / "README.md"), re.MULTILINE | re.DOTALL)
    (tmp_path / "job.toml").write_text(text)
    assert load_job(tmp_path / "job.toml", []).job.problems() == []


def test_the_tree_in_the_readme_is_the_tree() -> None:
    [tree] = [fence for fence in fences_of(text_of(ROOT / "README.md")) if "src/meshwright/\n" in fence]
    parents: list[tuple[int, Path]] = []
    described: dict[Path, str] = {}
    for line in tree.splitlines():
        match = TREE_LINE.match(line)
        assert match is not None, f"not a line of a tree: {line!r}"
        indent = len(match[1])
        parents = [(depth, folder) for depth, folder in parents if depth < indent]
        path = (parents[-1][1] if parents else ROOT) / match[2]
        assert path.exists(), f"{path.relative_to(ROOT)} is in the README's tree, and nowhere else"
        described[path] = match[3] or ""
        parents.append((indent, path))
    packages = {file.parent for file in SOURCE.glob("*/__init__.py")}
    assert packages == {path for path in described if path.parent == SOURCE and path.is_dir()}
    for package in packages:
        docstring = ast.get_docstring(ast.parse(text_of(package / "__init__.py"))) or ""
        is_empty = [file.name for file in package.rglob("*.py")] == ["__init__.py"]
        expected = ("not yet: " if is_empty else "") + docstring.split("\n")[0]
        assert described[package] == expected, f"{package.name}: tree and docstring differ"
