"""Who may import whom: import-linter's contracts, and the halves that must stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import grimp

from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Manifest
from repository import ROOT, SOURCE, source_files, text_of

PREDICT_HALF = ("spec", "config", "hardware", "cost", "simulator", "planner", "pages", "units", "errors", "log")
MAX_REACHED_MODULES = 5
MAX_REACHED_LINES = 2000
CHOOSE_PRICING = {
    "cost/step_times.py", "cost/compute/op_time.py", "cost/memory/footprint.py", "cost/achieved_rates.py",
    "simulator/simulate_step.py",
}  # fmt: skip
"""Modules that choose between pricing of hosts and of accelerators: steps, operators, memory, rates, traces."""


def modules_loaded_by(code: str, *arguments: str) -> set[str]:
    """Return the top-level names of the modules in a new Python that has run `code`."""
    script = f"import sys\n{code}\nprint(*{{name.split('.')[0] for name in sys.modules}}, file=sys.stderr)"
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def run_command_line(*arguments: str) -> set[str]:
    code = "from meshwright.cli.main import main\ntry: main()\nexcept SystemExit as end: assert not end.code, end.code"
    return modules_loaded_by(code, *arguments)


def defines_module_class(file: Path) -> bool:
    """Return whether the file is a model's: it derives a class from nn.Module."""
    classes = (node for node in ast.walk(ast.parse(text_of(file))) if isinstance(node, ast.ClassDef))
    return any(ast.unparse(base) == "nn.Module" for one in classes for base in one.bases)


def imports_of(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(text_of(file))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_the_contracts_of_pyproject_hold() -> None:
    # In a process of its own: import-linter switches off every logger that exists.
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_predict_half_loads_no_torch() -> None:
    names = [
        ".".join(("meshwright", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for file in source_files()
        if file.relative_to(SOURCE).with_suffix("").parts[0] in PREDICT_HALF
    ]
    assert len(names) > len(PREDICT_HALF)
    loaded = modules_loaded_by(f"import importlib\nfor name in {names}: importlib.import_module(name)")
    assert loaded & {"torch", "transformers", "safetensors"} == set()


def test_check_loads_no_torch() -> None:
    assert "torch" not in run_command_line("check", str(ROOT / "examples" / "tiny.toml"))


def test_examining_checkpoints_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(Manifest(job=Job(), seed=0, num_parameters=1).to_json())
    assert "torch" not in run_command_line("checkpoint", "ls", str(tmp_path))
    assert "torch" not in run_command_line("checkpoint", "gc", str(tmp_path))
    code = "import meshwright as mw\nmw.checkpoints.verify\nimport meshwright.checkpoint.remote.upload"
    assert "torch" not in modules_loaded_by(code)


def test_examining_data_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 200)
    keys = [f"data.source={tmp_path / 'text.txt'}", f"data.cache_dir={tmp_path / 'cache'}"]
    for verb in ("verify", "prepare", "stats", "preview"):
        assert "torch" not in run_command_line("data", verb, str(ROOT / "examples" / "tiny.toml"), *keys)


def test_help_loads_neither_torch_nor_numpy() -> None:
    assert run_command_line("--help") & {"torch", "numpy", "pydantic"} == set()


def test_only_who_chooses_between_pricings_asks_for_hosts() -> None:
    asking = {file.relative_to(SOURCE).as_posix() for file in source_files() if ".is_host" in text_of(file)}
    assert asking - {"spec/machine/device.py"} == CHOOSE_PRICING, "others ask a Device what it can: has_own_memory, ..."


def test_models_import_no_distributed_torch() -> None:
    guilty = [
        str(file.relative_to(ROOT))
        for file in source_files()
        if file.parent.name == "models" and any(name.startswith("torch.distributed") for name in imports_of(file))
    ]
    assert guilty == []


def test_a_model_file_is_readable_alone() -> None:
    graph = grimp.build_graph("meshwright", cache_dir=None)
    files = [file for file in source_files() if file.parent == SOURCE / "models" and defines_module_class(file)]
    assert files, "no model was found"
    for file in files:
        reached = graph.find_upstream_modules(f"meshwright.models.{file.stem}")
        paths = [file, *(ROOT / "src" / (name.replace(".", "/") + ".py") for name in reached)]
        num_lines = sum(len(text_of(path).splitlines()) for path in paths if path.exists())
        assert len(reached) <= MAX_REACHED_MODULES, f"{file.name} reaches {sorted(reached)}"
        assert num_lines <= MAX_REACHED_LINES, f"{file.name} reaches {num_lines} lines"
        print(f"{file.name} reaches {len(reached)} modules, {num_lines} lines in all: {sorted(reached)}")
