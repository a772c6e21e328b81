import pytest

from meshwright.cli.train import choose_num_ranks
from meshwright.spec.job import Job


@pytest.mark.parametrize(
    ("layout", "asked", "expected"),
    [({"dp_shard": -1}, None, 1), ({"dp_shard": -1}, 3, 3), ({"dp_shard": 2, "dp_replicate": 2}, None, 4)],
)
def test_ranks_come_from_the_command_then_the_layout_then_the_machine(
    layout: dict[str, int], asked: int | None, expected: int
) -> None:
    job = Job.from_dict({"layout": layout, "run": {"device": "cpu"}})
    assert choose_num_ranks(job, asked) == expected
