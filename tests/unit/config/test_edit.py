"""A layout put into a job's text: comments stay, keys change where they are, and it reads back."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config.load import load_job
from meshwright.config.write import with_layout
from meshwright.spec.layout.layout import Layout

LAYOUT = Layout(pp=2, dp_shard=4, schedule="GPipe", stage_boundaries=(3,), compile=True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing but a comment\n",
        "[train]\nsteps = 5 # few\n",
        "[layout]  # mine\ntp = 8  # too much\nsearch = true\nvirtual_stages = 2\n\n[train]\nsteps = 5\n",
        'layout = { tp = 2, schedule = "1F1B" }\n',
    ],
)
def test_a_layout_reads_back_and_comments_stay(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(with_layout(text, LAYOUT))
    job = load_job(path).job
    assert job.layout.resolve(8) == LAYOUT
    assert not job.layout.search
    for comment in (line.split("#")[1] for line in text.splitlines() if "#" in line):
        assert comment in path.read_text()


def test_a_comment_on_a_search_that_is_over_is_replaced() -> None:
    text = with_layout("[layout]\nsearch = true      # let it choose\ntp = 2  # the nodes have 2\n", LAYOUT)
    assert "let it choose\n" not in text
    assert "search = false      # `meshwright plan` has chosen; true lets it choose again\n" in text
    assert "# the nodes have 2" in text
    assert (
        with_layout("[layout]\nsearch = false # by hand\n", Layout())
        == "[layout]\nsearch = false # by hand\ndp_shard = 1\n"
    )
    assert "search = false\n" in with_layout("[layout]\nsearch = true\n", LAYOUT)


def test_keys_at_their_defaults_are_not_added() -> None:
    assert with_layout("", Layout(dp_shard=2)) == "[layout]\ndp_shard = 2\n"
