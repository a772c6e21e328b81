"""CUDA's driver, by ctypes: managed memory and what a device can do.

torch allocates managed memory only through a compiled allocator (CUDAPluggableAllocator), and every user would need a
compiler for it. The driver that each NVIDIA GPU has takes a few calls from Python instead.

Source: the CUDA driver API, sections Memory Management, Unified Addressing and Device Management (CUDA 13.0).
"""

import ctypes
from functools import cache

from meshwright.errors import MeshwrightError, UnsupportedError
from meshwright.units import format_bytes

LIBRARY = "libcuda.so.1"
_ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL
_SET_PREFERRED_LOCATION, _SET_ACCESSED_BY = 3, 5  # CUmem_advise
_CPU = -1  # CU_DEVICE_CPU
CONCURRENT_MANAGED_ACCESS = 89
"""CUdevice_attribute: whether the device may use managed memory while the host does."""
COHERENT_HOST_MEMORY = 100
"""CUdevice_attribute: whether the device uses the host's page tables, as in a superchip (GH200, GB200)."""
MULTICAST = 132
"""CUdevice_attribute: whether the device supports multicast objects, which NVLink SHARP needs."""


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise UnsupportedError(
            f"{LIBRARY}, NVIDIA's driver, cannot be loaded ({error}): install the driver, or leave [memory] out"
        ) from error
    library.cuMemAllocManaged.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t, ctypes.c_uint]
    library.cuMemFree_v2.argtypes = [ctypes.c_uint64]
    library.cuMemAdvise.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    library.cuDeviceGetAttribute.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int]
    library.cuDeviceGet.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int]
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    # No harm where torch has done so before.
    library.cuInit(0)
    return library


class DriverError(MeshwrightError):
    """A call of the driver failed."""


def _require(status: int, what: str) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    _library().cuGetErrorString(status, ctypes.byref(text))
    reason = (text.value or b"unknown error").decode()
    raise DriverError(f"{what} failed: {reason} (CUDA driver error {status}): leave the keys of [memory] out")


def device_attribute(index: int, attribute: int) -> int:
    """Return an attribute of CUDA device `index`; 0 where the driver does not know it."""
    device, value = ctypes.c_int(), ctypes.c_int()
    _require(_library().cuDeviceGet(ctypes.byref(device), index), f"finding CUDA device {index}")
    status = _library().cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return value.value if status == 0 else 0


class ManagedBlock:
    """Managed memory that stays in the host's memory and that one device reads and writes in place; freed with it."""

    def __init__(self, num_bytes: int, device_index: int) -> None:
        self.num_bytes, self._address = num_bytes, 0
        pointer, library = ctypes.c_uint64(), _library()
        asked = f"allocating {format_bytes(num_bytes)} of managed memory"
        _require(library.cuMemAllocManaged(ctypes.byref(pointer), num_bytes, _ATTACH_GLOBAL), asked)
        self._address = pointer.value
        # Without both pages would move to the device when it first uses them.
        for advice, place in ((_SET_PREFERRED_LOCATION, _CPU), (_SET_ACCESSED_BY, device_index)):
            _require(library.cuMemAdvise(self._address, num_bytes, advice, place), "placing managed memory on the host")

    @property
    def address(self) -> int:
        """Return where it is, the same on the host and on the device."""
        return self._address

    def __del__(self) -> None:
        if self._address:
            _library().cuMemFree_v2(self._address)
            self._address = 0
