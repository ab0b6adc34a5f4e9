"""A stand-in for `pynvml` that raises the real binding's errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml


class Nvml:
    """Two GPUs of the same model, seen through the part of `pynvml` that we use."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *, without: str = "") -> None:
        self.num_calls = 0
        self._without = without

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            self.num_calls += 1
            if name == self._without:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return super().__getattribute__(name)

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return "NVIDIA L4"

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=50 + gpu, memory=7)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(used=20 * 2**30, total=24 * 2**30, free=4 * 2**30)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return 71_500
