"""From [model] of a job to a module, or one clear error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.build import build_model
from meshwright.models.llama import Llama
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.job.user_object import import_object

OWN = """
from torch import nn

class Mine(nn.Module):
    def __init__(self, width, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

def text(): return "not a model"
number = 3
"""


def build(source: str, **options: Any) -> nn.Module:
    return build_model(ModelSection(source=source, options=options))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    return tmp_path


@pytest.fixture
def own(here: Path, request: pytest.FixtureRequest) -> str:
    # A module's name stays taken in the process: each test has its own.
    name = "own_" + "".join(letter if letter.isalnum() else "_" for letter in request.node.name)
    (here / f"{name}.py").write_text(OWN)
    return name


def test_preset_on_the_default_device() -> None:
    with torch.device("meta"):
        model = build("llama-1m", num_layers=2)
    assert isinstance(model, Llama)
    assert len(model.blocks) == 2
    assert all(parameter.is_meta for parameter in model.parameters())


def test_own_class_from_the_working_directory(own: str) -> None:
    model = build(f"{own}:Mine", width=3)
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(3, 3), (3,)] * 2


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("Mien", {}, "did you mean Mine"),
        ("Unlike", {}, "define it there"),
        ("Mine", {}, "missing a required argument: 'width'"),
        ("Mine", {"width": 3, "heigth": 1}, "unexpected keyword argument 'heigth'"),
        ("text", {}, "returned a str, but must return an nn.Module"),
        ("number", {}, "is int, but a class"),
    ],
)
def test_mistakes_in_the_name_or_the_options(own: str, name: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build(f"{own}:{name}", **options)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("module", ["no_such_module", "no_such_package.module"])
def test_module_that_is_not_there(module: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no module no_such_\w+ in the working directory"):
        import_object("model.source", f"{module}:Mine")


def test_module_that_imports_what_is_not_installed(here: Path) -> None:
    (here / "wants_more.py").write_text("import no_such_dependency\n")
    with pytest.raises(ConfigError, match="wants_more imports no_such_dependency, which is not installed"):
        import_object("model.source", "wants_more:Mine")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1 / 0", r"importing it raised ZeroDivisionError: division by zero \(.*broken_0\.py, line 1\)"),
        ("def (", r"importing it raised SyntaxError: .*broken_1\.py, line 1"),
        ("def Mine(): raise ValueError('odd')", r"building it raised ValueError: odd \(.*broken_2\.py, line 1\)"),
    ],
)
def test_error_inside_the_users_module_says_where(
    here: Path, text: str, told: str, request: pytest.FixtureRequest
) -> None:
    name = f"broken_{request.node.callspec.indices['text']}"
    (here / f"{name}.py").write_text(text)
    with pytest.raises(ConfigError, match=told):
        build(f"{name}:Mine")
