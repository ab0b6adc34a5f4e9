"""GPU gauges, read from a stand-in for NVML and from whatever this machine has."""

from __future__ import annotations

import pynvml
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from apps.gpu import GAUGES, GpuCollector
from tests.nvml import Nvml


def read(collector: GpuCollector) -> dict[str, dict[str, float]]:
    """Value by GPU, by name."""
    families = text_string_to_metric_families(generate_latest(collector).decode())
    return {
        family.name: {sample.labels["gpu"]: sample.value for sample in family.samples} for family in families
    }


def test_every_gpu_is_read_in_base_units() -> None:
    assert read(GpuCollector(Nvml())) == {
        "saturate_gpu_utilization_ratio": {"0": 0.5, "1": 0.51},
        "saturate_gpu_memory_used_bytes": {"0": 20 * 2**30, "1": 20 * 2**30},
        "saturate_gpu_memory_total_bytes": {"0": 24 * 2**30, "1": 24 * 2**30},
        "saturate_gpu_power_watts": {"0": 71.5, "1": 71.5},
    }


def test_what_a_gpu_does_not_tell_is_absent() -> None:
    gauges = read(GpuCollector(Nvml(without="nvmlDeviceGetPowerUsage")))
    assert set(GAUGES) - set(gauges) == {"saturate_gpu_power_watts"}


@pytest.mark.parametrize("missing", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_without_nvml_a_scrape_asks_nothing(missing: str) -> None:
    nvml = Nvml(without=missing)
    collector = GpuCollector(nvml)
    calls_at_start = nvml.num_calls
    assert read(collector) == {}
    assert nvml.num_calls == calls_at_start


def test_the_stand_in_has_only_what_the_binding_has() -> None:
    used = {name for name in vars(Nvml) if name.startswith("nvml")}
    assert used <= set(dir(pynvml))


def test_the_real_binding_is_quiet_on_any_machine(caplog: pytest.LogCaptureFixture) -> None:
    assert set(read(GpuCollector())) <= set(GAUGES)
    assert not caplog.records
