"""How large a file, a function and a list of parameters may grow before it must be split."""

import re

import meshwright
from repository import ROOT, SOURCE, Function, functions_of, python_files, source_files, text_of

FILE_LINES_TO_NOTE = 400
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 6
MAX_TOUR_LINES = 300


def is_command(function: Function) -> bool:
    """Return whether the function is a command, or the same in Python: its parameters are options, each explained."""
    is_public = "/app/" in function.place and function.name in meshwright.__all__
    return is_public or any("command" in decorator for decorator in function.decorators)


def test_no_file_is_too_long() -> None:
    num_lines = {str(file.relative_to(ROOT)): len(text_of(file).splitlines()) for file in python_files()}
    for name, count in num_lines.items():
        if count > FILE_LINES_TO_NOTE:
            print(f"{name} has {count} lines: more than {FILE_LINES_TO_NOTE}, soon to be split")
    assert {name: count for name, count in num_lines.items() if count > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    functions = [function for file in python_files() for function in functions_of(file)]
    assert {f.place: f.num_lines for f in functions if f.num_lines > MAX_FUNCTION_LINES} == {}


def test_no_function_has_too_many_parameters() -> None:
    functions = [function for file in source_files() for function in functions_of(file) if not is_command(function)]
    assert {f.place: f.parameters for f in functions if len(f.parameters) > MAX_PARAMETERS} == {}


def test_the_tour_is_short() -> None:
    stops = re.findall(r"^\*\*\d+\. `([^`]+)`", text_of(ROOT / "docs" / "tour.md"), re.MULTILINE)
    assert len(stops) > 5
    num_lines = {name: len(text_of(SOURCE / name).splitlines()) for name in stops}
    assert {name: count for name, count in num_lines.items() if count >= MAX_TOUR_LINES} == {}
