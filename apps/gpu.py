"""Use, memory and power of the GPUs, asked of NVML when somebody asks us.

Every GPU that NVML shows is reported; a container is shown its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

Reading = Callable[[Any, Any], float]
"""From the binding and a device handle; raises `NVMLError` where the device does not tell."""

GAUGES: dict[str, tuple[Reading, str]] = {
    "saturate_gpu_utilization_ratio": (
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
        "Share of the last moment (up to a second) in which a kernel ran.",
    ),
    "saturate_gpu_memory_used_bytes": (
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
        "Memory in use, by whichever process.",
    ),
    "saturate_gpu_memory_total_bytes": (
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
        "Memory of the GPU.",
    ),
    "saturate_gpu_power_watts": (
        lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "Power drawn.",
    ),
}
"""Name to its reading and its meaning."""


class GpuCollector:
    """A Prometheus collector, empty where there is no NVIDIA driver or no GPU."""

    def __init__(self, nvml: Any = None) -> None:
        """`nvml` is the module `pynvml` or one like it."""
        self._nvml = nvml or _load_binding()
        self._gpus = self._find_gpus()

    def collect(self) -> Iterator[Metric]:
        for name, (read, meaning) in GAUGES.items() if self._gpus else ():
            family = GaugeMetricFamily(name, meaning, labels=["gpu", "name"])
            for index, (gpu, model) in enumerate(self._gpus):
                try:
                    family.add_metric([str(index), model], read(self._nvml, gpu))
                except self._nvml.NVMLError:
                    continue
            if family.samples:
                yield family

    def _find_gpus(self) -> list[tuple[Any, str]]:
        """Handle and model of each."""
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            return [(handle, nvml.nvmlDeviceGetName(handle)) for handle in handles]
        except nvml.NVMLError:
            return []


def _load_binding() -> Any:
    """Here, because drivers import the app's module, and their image has no NVML."""
    import pynvml

    return pynvml
