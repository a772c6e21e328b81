"""my_module:MyModel is looked for without importing it."""

from pathlib import Path

import pytest

from meshwright.app.job.object_problems import object_problems
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import ModelSection

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
    assert object_problems("model", ModelSection(source=source), folder) == []


def test_what_is_not_there_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(source: str) -> str:
        [problem] = object_problems("model", ModelSection(source=source), folder)
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
    assert object_problems("model", ModelSection(source="mine:MyModel"), Path("/")) == []


CLASSES = """\
from torch import nn
class Mine(nn.Module):
    def __init__(self, dim: int = 8, *, depth=2): self.dim = dim
class Free(nn.Module):
    def __init__(self, **options): ...
class Derived(Mine): ...
@wrapped
class Wrapped(nn.Module):
    def __init__(self): ...
def build(width): ...
"""

TABLE = """\
from torch import nn
from meshwright import hf
class Mine(nn.Module):
    hugging_face = {value}
class Method(nn.Module):
    def hugging_face(self): return names()
"""


@pytest.mark.parametrize(
    ("name", "options", "layout", "message"),
    [
        ("mine:Mine", {"dim": 4, "depth": 1}, {"dp_shard": 2}, None),
        ("mine:Mine", {"dmi": 3}, {}, "model.options = {'dmi': 3} do not fit mine:Mine(dim=8, *, depth=2): got an une"),
        ("mine:build", {}, {}, "model.options = {} do not fit mine:build(width): missing a required argument: 'width'"),
        ("json:dumps", {}, {}, "model.options = {} do not fit json:dumps(obj, *, skipkeys=False, "),
        (
            "mine:Mine",
            {},
            {"tp": 2},
            "layout.tp = 2: Mine ({file}) has no attribute tensor_parallel: set layout.tp to 1, or add it (see ",
        ),
        (
            "mine:Mine",
            {},
            {"pp": 2},
            "layout.pp = 2: Mine ({file}) has no attribute first_parts: set layout.pp to 1, or add it (see ",
        ),
        ("mine:Free", {"dmi": 3}, {}, None),
        # What a base class or a decorator adds is not known.
        ("mine:Derived", {"dmi": 3}, {"tp": 2}, None),
        ("mine:Wrapped", {"dmi": 3}, {"tp": 2}, None),
        ("mine:build", {"width": 1}, {"tp": 2}, None),
    ],
)
def test_options_and_layouts_are_compared_with_the_definition(
    tmp_path: Path, name: str, options: dict[str, int], layout: dict[str, int], message: str | None
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CLASSES)
    section = ModelSection(source=name, options=options)
    found = object_problems("model", section, tmp_path, Job.from_dict({"layout": layout}))
    if message is None:
        assert found == []
    else:
        [problem] = found
        assert problem.startswith(message.replace("{file}", str(file)))


OWN_ATTENTION = """{imports}
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.{layers} = nn.ModuleList(Attention() for _ in range(2))
"""


@pytest.mark.parametrize(
    ("imports", "layers", "refused"),
    [
        ("import math", "layers", ["layout.activation_offload", "layout.attention_backend"]),
        ("from meshwright.models.contract import loss_of", "blocks", ["layout.attention_backend"]),
        ("from my_layers import Attention", "blocks", []),
        ("from meshwright.models.llama import LlamaBlock as Attention", "blocks", []),
        (
            "from meshwright.models.attention.causal_attention import CausalAttention\nAttention = CausalAttention",
            "blocks",
            [],
        ),
    ],
)
def test_blocks_and_attention_that_a_layout_needs(
    tmp_path: Path, imports: str, layers: str, refused: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(OWN_ATTENTION.format(imports=imports, layers=layers))
    job = Job.from_dict({"layout": {"attention_backend": "flex", "activation_offload": True}})
    found = object_problems("model", ModelSection(source="mine:Mine"), tmp_path, job)
    assert [problem.partition(" ")[0] for problem in found] == refused


@pytest.mark.parametrize(
    ("value", "given"),
    [
        ('hf.HuggingFaceFormat(hf.NameMap(()), {"model_type": "llama"})', None),
        ("table_of(3)", None),
        ("hf.NameMap(())", "NameMap"),
        ('{"model_type": "llama"}', "Dict"),
        ("None", "Constant"),
    ],
)
def test_a_table_that_is_none_is_found_without_running_it(tmp_path: Path, value: str, given: str | None) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TABLE.replace("{value}", value))
    found = object_problems("model", ModelSection(source="mine:Mine"), tmp_path, Job())
    if given is None:
        assert found == []
    else:
        [problem] = found
        assert problem.startswith(f"model.source = 'mine:Mine': hugging_face ({file}:4) is a {given}, but must be a ")


def test_initial_weights_need_a_table(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TABLE.replace("{value}", "table()"))
    (tmp_path / "without.py").write_text(CLASSES)
    section = ModelSection(source="mine:Method", initial_weights="weights")
    assert object_problems("model", section, tmp_path, Job()) == []
    section = section.replace(source="without:Mine")
    job = Job.from_dict({"checkpoint": {"export": "float32"}})
    problems = object_problems("model", section, tmp_path, job)
    keys = ("model.initial_weights = 'weights'", "checkpoint.export = 'float32'")
    missing = f"Mine ({tmp_path / 'without.py'}) has no attribute hugging_face, which names its tensors"
    assert [problem.partition(", which")[0] for problem in problems] == [
        f"{key}: {missing.partition(', which')[0]}" for key in keys
    ]


UNUSED = """from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.forgotten = nn.Linear(4, 4), nn.Linear(4, 4)
        self.dropout = nn.Dropout()

    def forward(self, x):
        return {forward}

class Mine(nn.Module):
    last_parts = ("head",)
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(4, 4)

    def forward(self, x):
        return self.block(x)
"""


@pytest.mark.parametrize(
    ("forward", "data", "is_refused"),
    [
        ("self.up(x)", "stdlib", True),
        ("self.up(x)", "mine:Data", True),
        ("self.up(self.forgotten(x))", "stdlib", False),
        # Ways to read or to freeze a layer without its name, and a file that may do so.
        ("[part(x) for part in self.children()]", "stdlib", False),
        ("self.up.requires_grad_(False)(x)", "stdlib", False),
        ("self.up(x)", "other:Data", False),
    ],
)
def test_a_layer_that_nothing_reads_is_named(tmp_path: Path, forward: str, data: str, is_refused: bool) -> None:
    file = tmp_path / "mine.py"
    file.write_text(UNUSED.format(forward=forward))
    job = Job.from_dict({"model": {"source": "mine:Mine"}, "data": {"source": data}})
    found = object_problems("model", job.model, tmp_path, job)
    named = f"model.source = 'mine:Mine': Block.forgotten ({file}:6) is read nowhere in that file"
    assert [problem.startswith(named) for problem in found] == [True] * is_refused
