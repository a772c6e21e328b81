"""What this machine has, asked of the operating system: cores, memory, shared memory, disk, compiler, driver."""

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from meshwright.units import KiB

_CGROUP_MEMORY = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_PROCESSORS = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")
_OS_RELEASE = Path("/etc/os-release")
_COMPILERS = ("c++", "g++", "clang++")
_COMPILER_PACKAGES = {
    "debian": "sudo apt-get install g++",
    "fedora": "sudo dnf install gcc-c++",
    "rhel": "sudo dnf install gcc-c++",
    "suse": "sudo zypper install gcc-c++",
    "arch": "sudo pacman -S gcc",
    "alpine": "apk add g++",
}
_COMMAND_TIMEOUT_S = 5.0


def num_usable_cores() -> int:
    """Return the processor cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """Return the processor's name, such as "AMD EPYC", or its architecture where the system reports no name."""
    return _processor_field("model name") or platform.machine() or "unknown processor"


def is_amd_processor() -> bool:
    """Return whether the processor says that AMD made it; False where the system does not say."""
    return _processor_field("vendor_id") == "AuthenticAMD"


def _processor_field(name: str) -> str:
    try:
        match = re.search(rf"^{name}\s*:\s*(.+)$", _PROCESSORS.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else ""


def usable_memory_bytes() -> int:
    """Return the memory of this machine in bytes, or the container's limit where that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _CGROUP_MEMORY:
        try:
            limit = file.read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            return min(physical, int(limit))
    return physical


def resident_bytes() -> int:
    """Return the memory that this process has written to and not freed, bytes; its highest so far outside of Linux."""
    statistics = Path("/proc/self/statm")
    if statistics.exists():
        return int(statistics.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the most memory that this process has had resident so far, bytes."""
    # Linux counts in KiB, macOS in bytes.
    unit_bytes = 1 if sys.platform == "darwin" else KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def shared_memory_bytes() -> tuple[int, int] | None:
    """Return the size and the free bytes of /dev/shm; None on a system without it."""
    if not Path("/dev/shm").is_dir():
        return None
    usage = shutil.disk_usage("/dev/shm")
    return usage.total, usage.free


def free_disk_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that holds `folder`."""
    return shutil.disk_usage(folder).free


def file_system_of(folder: Path) -> str | None:
    """Return the type of the file system that holds `folder`, such as tmpfs or ext4; None outside of Linux."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return None
    found: tuple[int, str] | None = None
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, point, kind, *_ = line.split()
        # Of two at one point the later one hides the other.
        if folder.resolve().is_relative_to(point) and (found is None or len(point) >= found[0]):
            found = len(point), kind
    return None if found is None else found[1]


def nearest_existing(folder: Path) -> Path:
    """Return `folder`, or the innermost folder above it that exists."""
    path = folder.absolute()
    while not path.exists():
        path = path.parent
    return path


def max_open_files() -> int | None:
    """Return how many files a process may hold open (ulimit -n); None on a system without such a limit."""
    try:
        import resource  # noqa: PLC0415 - there is no such module on Windows
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def operating_system() -> str:
    """Return the system's name and version, as in "Debian GNU/Linux 12, Linux 6.1 x86_64"."""
    kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
    name = _os_release().get("PRETTY_NAME")
    return f"{name}, {kernel}" if name else kernel


def cpp_compiler() -> str | None:
    """Return the C++ compiler that torch.compile would use, its name and version; None where there is none."""
    for name in (os.environ.get("CXX"), *_COMPILERS):
        path = shutil.which(name) if name else None
        if path is not None:
            lines = _output(path, "--version").splitlines()
            return f"{name}: {lines[0]}" if lines else str(name)
    return None


def compiler_install_command() -> str:
    """Return the command that installs a C++ compiler on this system."""
    if platform.system() == "Darwin":
        return "xcode-select --install"
    release = _os_release()
    for family in (release.get("ID", ""), *release.get("ID_LIKE", "").split()):
        if family in _COMPILER_PACKAGES:
            return _COMPILER_PACKAGES[family]
    return _COMPILER_PACKAGES["debian"]


def nvidia_driver() -> str | None:
    """Return the version of the NVIDIA kernel driver; None where there is none."""
    try:
        text = _DRIVER.read_text()
    except OSError:
        path = shutil.which("nvidia-smi")
        text = _output(path, "--query-gpu=driver_version", "--format=csv,noheader") if path else ""
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return match[0] if match else None


def _os_release() -> dict[str, str]:
    try:
        lines = _OS_RELEASE.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split("=", 1) for line in lines if "=" in line)
    return {key: value.strip('"') for key, value in pairs}


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
