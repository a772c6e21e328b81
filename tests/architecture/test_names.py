"""What things are called, and what no file may contain."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from repository import ROOT, SOURCE, fields_of, functions_of, repository_files, source_files, text_of, tree_of

BANNED_NAMES = {
    "utils", "util", "common", "misc", "helper", "helpers", "component", "components", "core", "protocol", "protocols",
    "tool", "tools", "manager", "managers",
}  # fmt: skip
# A scalar with one of these names is in some unit, and the name must end with it: timeout_s, bandwidth_bytes_per_s.
MEASURED = re.compile(r"(^|_)(timeout|latency|bandwidth|duration|delay|elapsed|deadline|throughput|seconds|time)$")
TO_DO_WITHOUT_LINK = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b(?!\(https?://)")
COMMANDS = {"app", "app/reports", "cli/verbs", "cli/verbs/conversion", "cli/verbs/reports"}
AGENT_OF_VERB = {
    "plan.py": "planner", "prove.py": "prover", "generate.py": "inference", "diagnose.py": "fault_tolerance",
    "export.py": "checkpoint/hf", "import_.py": "checkpoint/hf", "checkpoint.py": "checkpoint",
    "chaos.py": "prover",
}  # fmt: skip
"""The package that does what a command of app and cli is called after."""
FOREIGN_FOLDER = re.compile(r"(?<![\w.])/(home|Users)/\w+|file:///\w")


def test_packages_and_files_are_named_for_what_they_hold() -> None:
    parts = {part.removesuffix(".py"): file for file in source_files() for part in file.relative_to(SOURCE).parts}
    assert {name: str(file) for name, file in parts.items() if name in BANNED_NAMES} == {}


def test_no_two_public_classes_share_a_name() -> None:
    places = defaultdict(list)
    for file in source_files():
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(file.relative_to(SOURCE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_modules_share_a_file_name_only_where_they_play_one_part() -> None:
    folders = defaultdict(set)
    for file in source_files():
        folders[file.name].add(str(file.relative_to(SOURCE).parent))
    shared = {name: found for name, found in folders.items() if len(found) > 1 and name != "__init__.py"}
    parts = {name: (COMMANDS | {AGENT_OF_VERB.get(name)}, {"models", "checkpoint/hf/maps"}) for name in shared}
    alike = {name for name, found in shared.items() if any(found <= part for part in parts[name])}
    assert {name: found for name, found in shared.items() if name not in alike} == {}


def test_every_package_says_in_one_line_what_it_is() -> None:
    for file in source_files():
        if file.name == "__init__.py":
            docstring = ast.get_docstring(tree_of(file)) or ""
            first = docstring.split("\n")[0]
            assert 20 < len(first) <= 115, f"{file}: its first line is what the README's tree shows"


def test_a_measured_quantity_has_its_unit_in_its_name() -> None:
    names = [(place, name) for file in source_files() for place, name in fields_of(file)]
    names += [(f.place, name) for file in source_files() for f in functions_of(file) for name in f.parameters]
    assert {place: name for place, name in names if MEASURED.search(name)} == {}


def test_what_is_left_to_do_has_a_link() -> None:
    for file in repository_files():
        for number, line in enumerate(text_of(file).splitlines(), start=1):
            found = TO_DO_WITHOUT_LINK.search(line)
            assert found is None, f"{file}:{number}: {line.strip()} (write it as {found[1]}(https://...): condition)"


def test_no_file_names_a_folder_of_one_machine() -> None:
    here = [str(folder) for folder in (ROOT, Path.home()) if len(folder.parts) > 1]
    for file in repository_files():
        text = text_of(file)
        found = [folder for folder in here if re.search(re.escape(folder) + r"\b", text)]
        foreign = FOREIGN_FOLDER.search(text)
        assert not found, f"{file} names {found}"
        assert foreign is None, f"{file} names {foreign[0]}"
