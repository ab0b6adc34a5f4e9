"""What `/metrics` answers, read back by Prometheus's own parser."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from typing import get_args

from flyte.extras import BatchStats
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from apps import exposition
from apps.errors import ErrorKind
from apps.exposition import StatsCollector
from apps.gpu import GpuCollector
from apps.metrics import Latencies
from tests.conftest import ROOT
from tests.nvml import Nvml
from tests.stats import make_stats


def parse(text: bytes) -> list[Metric]:
    return list(text_string_to_metric_families(text.decode()))


def read(collector: StatsCollector) -> dict[str, float]:
    """Value by sample, without labels."""
    families = parse(generate_latest(collector))
    return {sample.name: sample.value for family in families for sample in family.samples}


def documented() -> list[tuple[str, str, str, str]]:
    """Name, type, unit and meaning of each."""
    document = (ROOT / "docs" / "metrics.md").read_text()
    return re.findall(r"^\| `(saturate_\w+).*?` \| (\w+) \| (\w+) \| (.*) \|$", document, re.MULTILINE)


async def everything(engine: CollectorRegistry = REGISTRY) -> bytes:
    ours = (Latencies(), StatsCollector(make_stats))
    return await exposition.exposition(*ours, gpus=GpuCollector(Nvml()), engine=engine)


def test_every_number_is_read_from_its_own_key() -> None:
    numbers = {**exposition.GAUGES, **exposition.COUNTERS}
    stats = make_stats(**{key: 1000 + at for at, (key, _) in enumerate(numbers.values())})
    values = read(StatsCollector(lambda: stats))
    assert [values[name] for name in numbers] == list(range(1000, 1000 + len(numbers)))


def test_numbers_are_read_when_asked() -> None:
    stats = make_stats(completed=1)
    collector = StatsCollector(lambda: stats)
    stats["completed"] = 7
    assert read(collector)["saturate_rows_completed_total"] == 7


def test_failures_are_told_apart_by_kind_from_the_start() -> None:
    families = parse(generate_latest(StatsCollector(lambda: make_stats(failed={"too_long": 3}))))
    (failed,) = (family for family in families if family.name == "saturate_rows_failed")
    by_kind = {sample.labels["kind"]: sample.value for sample in failed.samples}
    assert set(by_kind) == set(get_args(ErrorKind))
    assert {kind: count for kind, count in by_kind.items() if count} == {"too_long": 3}


async def test_the_engine_keeps_its_own_names() -> None:
    engine = CollectorRegistry()
    PrometheusCounter("vllm:generation_tokens", "Tokens.", ["model_name"], registry=engine).labels("m").inc(5)
    families = {family.name: family for family in parse(await everything(engine))}
    generated = next(s for s in families["vllm:generation_tokens"].samples if s.name.endswith("_total"))
    assert (generated.labels, generated.value) == ({"model_name": "m"}, 5)
    assert "saturate_in_flight_rows" in families


async def test_no_name_comes_twice() -> None:
    text = await everything()
    names = re.findall(rb"^# TYPE (\S+)", text, re.MULTILINE)
    assert b"process_cpu_seconds_total" in names
    assert [name for name, count in Counter(names).items() if count > 1] == []


async def test_the_document_lists_every_metric() -> None:
    families = parse(await everything(CollectorRegistry()))
    meant = {
        family.name + "_total" * (family.type == "counter"): (family.type, family.documentation)
        for family in families
    }
    assert {name: (kind, meaning) for name, kind, _, meaning in documented()} == meant
    assert len(documented()) == len(meant)


def test_every_name_holds_its_unit() -> None:
    assert [name for name, _, unit, _ in documented() if unit not in name.split("_")] == []


def test_the_factory_has_what_the_batcher_counts() -> None:
    assert {field.name for field in fields(BatchStats)} <= make_stats().keys()
