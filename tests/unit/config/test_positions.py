"""The line of every key, for every way in which TOML lets one be written."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.positions import key_lines

EVERY_FORM = '''\
# a comment with [brackets] and key = 1
top = 1
"quoted \\"key\\"" = 2
a.b . "c.d" = 3
[table] # key = 2
text = """
fake = 1
[fake]
still \\""" text""""
raw = \'\'\'
fake2 = 1\'\'\'\'
numbers = [
  1, # a comment, with ] and "
  2, [3, "]"],
  { hidden = 1 },
]
inline = { one = 1, two = { three = "}" }, four.five = 5 }
when = 1979-05-27 07:32:00
[table.deeper]
last = true'''

LINES = {
    ("top",): 2,
    ('quoted "key"',): 3,
    ("a",): 4,
    ("a", "b"): 4,
    ("a", "b", "c.d"): 4,
    ("table",): 5,
    ("table", "text"): 6,
    ("table", "raw"): 10,
    ("table", "numbers"): 12,
    ("table", "inline"): 17,
    ("table", "inline", "one"): 17,
    ("table", "inline", "two"): 17,
    ("table", "inline", "two", "three"): 17,
    ("table", "inline", "four"): 17,
    ("table", "inline", "four", "five"): 17,
    ("table", "when"): 18,
    ("table", "deeper"): 19,
    ("table", "deeper", "last"): 20,
}


def test_each_form_of_key_is_found_on_its_line() -> None:
    tomllib.loads(EVERY_FORM)
    assert key_lines(EVERY_FORM) == LINES


def test_windows_line_ends_count_once() -> None:
    text = EVERY_FORM.replace("\n", "\r\n")
    assert key_lines(text) == LINES
    assert key_lines("") == {}


names = st.sampled_from(["a", "b", "c", '"d e"', "'f.g'", "1", "-"])
keys = st.lists(names, min_size=1, max_size=3).map(" . ".join)
values = st.recursive(
    st.sampled_from(
        [
            "1",
            "-0.5e3",
            "true",
            '""',
            '"a # b = [ \\" {"',
            "'c\\'",
            '"""\n[x]\ny = 1\n"""',
            "'''\n'z = ]'''",
            "07:32:00",
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[ # ]\n" + ",\n".join(items) + "\n]")
        | st.lists(st.tuples(keys, inner), max_size=2).map(
            lambda pairs: "{ " + ", ".join(f"{key} = {value}" for key, value in pairs) + " }"
        )
    ),
    max_leaves=4,
)
statements = (
    st.tuples(keys, values).map(lambda pair: f"  {pair[0]}= {pair[1]} # ''' \"")
    | keys.map(lambda key: f"[ {key} ] # [x]")
    | st.sampled_from(["", "# a = 1", "\t"])
)


@pytest.mark.slow
@given(st.lists(statements, max_size=8).map("\n".join))
def test_the_keys_are_those_that_tomllib_reads(text: str) -> None:
    try:
        read = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return  # the scan is only ever given what tomllib accepts
    lines = key_lines(text)
    assert set(lines) == set(paths(read, ()))
    rows = text.split("\n")
    assert all(path[-1] in rows[line - 1] for path, line in lines.items())


def paths(table: dict[str, Any], above: tuple[str, ...]) -> list[tuple[str, ...]]:
    here = [(*above, name) for name in table]
    below = [path for name, value in table.items() if isinstance(value, dict) for path in paths(value, (*above, name))]
    return here + below
