"""Makes a virtual environment and installs Meshwright with the named extras into it: `make venv` calls this.

It says what it is about to download, and how much, before it does; it does nothing when all is there already.
Standard library only, since nothing is installed yet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import venv
from pathlib import Path
from urllib.parse import urlparse

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Wheel sizes in MB for Linux x86-64, Python 3.11, measured 2026-11-20 with the pins of constraints.txt.
TORCH_CPU_MB = 192
TORCH_CUDA_MB = 2700
EXTRAS_MB = {
    "train": 33,
    "hf": 28,
    "parquet": 55,
    "report": 10,
    "pandas": 12,
    "tensorboard": 22,
    "torchao": 8,
    "docs": 20,
    "dev": 31,
}

# What only a CUDA build of torch depends on; a CPU build can lack "+cpu" in its version (macOS, or built by hand).
CUDA_REQUIREMENT = re.compile(r"^(nvidia|cuda|triton)\b")


def main() -> None:
    """Install what is missing, and leave a stamp that says what is there."""
    arguments = parse_arguments()
    folder: Path = arguments.venv
    extras = set(arguments.extras.split(","))
    stamp = folder / "meshwright-installed.json"
    torch_pin = arguments.torch or pin_of("torch")
    inputs = digest(arguments.torch_index, torch_pin)
    done = read_stamp(stamp)
    if done["inputs"] == inputs and extras <= set(done["extras"]):
        return
    extras |= set(done["extras"])
    python = make_environment(folder)
    if "train" in extras and not is_installed(folder, f"torch-{torch_pin}"):
        install_torch(python, torch_pin, arguments)
    rest_mb = sum(EXTRAS_MB.get(extra, 0) for extra in extras - set(done["extras"]))
    say(f"installing meshwright[{','.join(sorted(extras))}] into {folder}: up to {rest_mb} MB besides torch")
    target = f"{ROOT}[{','.join(sorted(extras))}]"
    pip(python, "install", "--constraint", str(constraints_with(torch_pin, python)), "--editable", target)
    stamp.write_text(json.dumps({"inputs": inputs, "extras": sorted(extras)}))


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path, help="folder of the virtual environment")
    parser.add_argument("extras", help="extras of pyproject.toml, comma-separated")
    parser.add_argument("--torch-index", default="", help="package index to take torch from (TORCH_INDEX= of make)")
    parser.add_argument("--torch", default="", help="torch release in place of the one that constraints.txt pins")
    parser.add_argument("--any-build", action="store_true", help="take torch's CUDA build where there is no CPU build")
    return parser.parse_args()


def digest(torch_index: str, torch_pin: str) -> str:
    """Return a hash of all that decides what gets installed."""
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    inputs = [torch_index.encode(), torch_pin.encode(), *(file.read_bytes() for file in files)]
    return hashlib.sha256(b"\0".join(inputs)).hexdigest()


def read_stamp(stamp: Path) -> dict[str, object]:
    """Return what the last complete installation wrote; its Python must still be there (a moved folder breaks it)."""
    nothing: dict[str, object] = {"inputs": "", "extras": []}
    if not stamp.exists() or not (stamp.parent / "bin" / "python").exists():
        return nothing
    return json.loads(stamp.read_text())


def make_environment(folder: Path) -> Path:
    """Return the environment's Python; the environment is made when there is none, or only a broken one."""
    python = folder.absolute() / "bin" / "python"
    works = python.exists() and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
    if not works:
        say(f"making {folder} with Python {sys.version.split()[0]}")
        try:
            venv.create(folder, with_pip=True, clear=folder.exists())
        except subprocess.CalledProcessError:
            fail("Python came without its venv module. On Debian and Ubuntu: apt install python3-venv")
    return python


def pin_of(package: str) -> str:
    """Return the version that constraints.txt pins."""
    match = re.search(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert match is not None, f"constraints.txt does not pin {package}"
    return match[1]


def constraints_with(torch_pin: str, python: Path) -> Path:
    """Return a file with the pins of constraints.txt; for another torch its own pin, and none for what it needs."""
    constraints = ROOT / "constraints.txt"
    if torch_pin == pin_of("torch"):
        return constraints
    # Each release has its own bounds, such as setuptools<82 of 2.11.
    ask = "import re, importlib.metadata as m; print(*(re.match(r'[\\w.-]+', r)[0] for r in m.requires('torch')))"
    needed = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.lower().split()
    kept = [line for line in constraints.read_text().splitlines() if line.partition("==")[0].lower() not in needed]
    changed = python.parents[1] / "constraints.txt"
    changed.write_text("\n".join(line for line in kept if not line.startswith("torch==")) + f"\ntorch=={torch_pin}\n")
    return changed


def is_installed(folder: Path, name_and_version: str) -> bool:
    """Return whether a package of this version is there, whatever its build (2.13.0+cpu is 2.13.0)."""
    return any(
        found.name.removesuffix(".dist-info").split("+")[0] == name_and_version
        for found in folder.glob(f"lib/python*/site-packages/{name_and_version}*.dist-info")
    )


def install_torch(python: Path, pin: str, arguments: argparse.Namespace) -> None:
    """Install torch: from the index that is given, the CUDA build where a driver is, else a CPU build.

    Without a CPU build, the CUDA build with --any-build; otherwise this fails.
    """
    index = arguments.torch_index
    if index:
        say(f"installing torch {pin} from {index}: {TORCH_CPU_MB} MB for a CPU build, {TORCH_CUDA_MB} MB with CUDA")
        pip(python, "install", "--no-deps", "--index-url", index, f"torch=={pin}")
    elif has_nvidia_driver():
        say(f"an NVIDIA driver is here: installing torch {pin} with CUDA, about {TORCH_CUDA_MB} MB")
        pip(python, "install", f"torch=={pin}")
    elif not install_cpu_torch(python, pin):
        if not arguments.any_build:
            fail(no_cpu_build(pin))
        say(f"no CPU build of torch {pin} was found: installing the build with CUDA, about {TORCH_CUDA_MB} MB")
        pip(python, "install", f"torch=={pin}")


def install_cpu_torch(python: Path, pin: str) -> bool:
    """Install torch's CPU build, wherever pip finds it, and return whether there was one."""
    say(f"no NVIDIA driver is here: looking for the CPU build of torch {pin}, about {TORCH_CPU_MB} MB")
    # PyTorch's index may be out of reach; pip's own configuration may know the wheel anyway.
    source = ["--extra-index-url", CPU_INDEX, "--retries", "0", "--timeout", "15"]
    if not is_reachable(CPU_INDEX):
        say(f"{CPU_INDEX} cannot be reached; asking the indexes of pip's configuration alone")
        source = []
    for requirement in (f"torch=={pin}+cpu", f"torch=={pin}"):
        found = resolve(python, requirement, source)
        if found is None:
            continue
        version, url, requirements = found
        if any(CUDA_REQUIREMENT.match(needed) for needed in requirements):
            break
        say(f"installing torch {version} from {urlparse(url).hostname or 'this machine'}")
        pip(python, "install", "--no-deps", *source[:2], f"torch=={version}")
        return True
    return False


def no_cpu_build(pin: str) -> str:
    """Return the message for a torch release without a CPU build, with the ways to get one."""
    return (
        f"no CPU build of torch {pin} for Python {sys.version_info.major}.{sys.version_info.minor} was found, and the "
        f"build with CUDA ({TORCH_CUDA_MB} MB) is of no use without an NVIDIA driver.\n"
        f"Set TORCH_INDEX= to a package index that has it, {CPU_INDEX} or a mirror of it, "
        "or PIP_FIND_LINKS= to a folder with the wheel:\n"
        "  make venv TORCH_INDEX=https://..."
    )


def resolve(python: Path, requirement: str, source: list[str]) -> tuple[str, str, list[str]] | None:
    """Return version, address and requirements of the wheel that pip would take; None where pip finds none."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = ["-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
        command += ["--report", report.name, *source, requirement]
        if subprocess.run([python, *command], capture_output=True).returncode != 0:
            return None
        [wheel] = json.loads(report.read())["install"]
    metadata = wheel["metadata"]
    return metadata["version"], wheel["download_info"]["url"], metadata.get("requires_dist", [])


def is_reachable(url: str) -> bool:
    """Return whether the index answers at all."""
    try:
        urllib.request.urlopen(urllib.request.Request(url + "/torch/", method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def has_nvidia_driver() -> bool:
    """Return whether an NVIDIA driver is there and works."""
    program = shutil.which("nvidia-smi")
    return program is not None and subprocess.run([program], capture_output=True).returncode == 0


def pip(python: Path, *arguments: str) -> None:
    """Run pip; only its errors are shown (its warnings tell of indexes without a package, which is normal here)."""
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    code = subprocess.run([python, "-m", "pip", "-qq", *arguments], env=environment).returncode
    if code != 0:
        fail(f"pip failed; its words are above. The command was: {python} -m pip {' '.join(arguments)}")


def say(message: str) -> None:
    """Print a line that tells where it comes from."""
    print(f"venv: {message}", flush=True)


def fail(message: str) -> None:
    """End with a message and exit code 1."""
    sys.exit(f"venv: {message}")


if __name__ == "__main__":
    main()
