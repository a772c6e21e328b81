"""my_module:MyModel is looked for without importing it."""

from pathlib import Path

import pytest

from meshwright.app.job.job_problems import object_problems

MODULE = """\
raise RuntimeError("importing this would be a mistake")
from somewhere import Borrowed as Renamed
class MyModel: hidden = 1
if True:
    def build(): inner = 2
Alias = MyModel
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("class Model:\n  pass pass\n")
    (tmp_path / "stars.py").write_text("from mine import *\n")
    (tmp_path / "package" / "deep").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "deep" / "model.py").write_text("class Deep: ...\n")
    return tmp_path


@pytest.mark.parametrize(
    "source",
    ["mine:MyModel", "mine:build", "mine:Alias", "mine:Renamed", "stars:Anything", "package.deep.model:Deep",
     "collections:OrderedDict"],
)  # fmt: skip
def test_what_is_there_is_no_problem(folder: Path, source: str) -> None:
    assert object_problems("model.source", source, folder) == []


def test_what_is_not_there_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(source: str) -> str:
        [problem] = object_problems("model.source", source, folder)
        return problem

    assert refusal("mine:MyModle") == (
        f"model.source = 'mine:MyModle': {folder}/mine.py defines no MyModle: did you mean mine:MyModel?"
    )
    assert refusal("mine:hidden").endswith("defines no hidden: define it there, or change model.source")
    assert refusal("package.deep.other:Deep") == (
        f"model.source = 'package.deep.other:Deep': there is no module package.deep.other in {folder}, the working "
        "directory or the environment: put package/deep/other.py there, or change model.source"
    )
    assert refusal("broken:Model").startswith(f"model.source = 'broken:Model': {folder}/broken.py:2 is not Python (")
    monkeypatch.chdir(folder)
    assert object_problems("model.source", "mine:MyModel", Path("/")) == []
