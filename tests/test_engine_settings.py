"""Every engine setting reaches vLLM's own configuration, as it is written there; no engine is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from apps.engines.vllm_args import engine_args
from apps.settings import (
    EMBEDDED_MODEL,
    PRESETS,
    AppSettings,
    KVCacheDtype,
    Quantization,
    SpeculativeMethod,
    SpeculativeSettings,
)

pytestmark = [
    pytest.mark.vllm,
    # torch's own, when vllm is imported
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def make_args(**overrides: Any) -> Any:
    fields = {"model": str(EMBEDDED_MODEL), "accelerator": "cpu", **overrides}
    return engine_args(AppSettings.model_validate(fields))


def config_of(**overrides: Any) -> Any:
    return make_args(**overrides).create_engine_config()


@pytest.mark.parametrize(
    ("settings", "section", "field", "value"),
    [
        pytest.param({"dtype": "float32"}, "model", "dtype", "torch.float32", id="dtype"),
        pytest.param({}, "model", "dtype", "torch.bfloat16", id="dtype of the preset"),
        pytest.param({"max_model_len": 512}, "model", "max_model_len", 512, id="max_model_len"),
        pytest.param({"max_model_len": 9999}, "model", "max_model_len", 2048, id="the model's own length"),
        pytest.param({"enforce_eager": False}, "model", "enforce_eager", False, id="enforce_eager"),
        pytest.param({}, "model", "enforce_eager", True, id="enforce_eager of the preset"),
        pytest.param({"max_num_seqs": 7}, "scheduler", "max_num_seqs", 7, id="max_num_seqs"),
        pytest.param(
            {"max_num_batched_tokens": 4096}, "scheduler", "max_num_batched_tokens", 4096, id="batched tokens"
        ),
        pytest.param({}, "scheduler", "policy", "priority", id="priority"),
        pytest.param(
            {"enable_prefix_caching": False}, "cache", "enable_prefix_caching", False, id="prefix off"
        ),
        pytest.param({}, "cache", "enable_prefix_caching", True, id="prefix on"),
        pytest.param({"kv_cache_dtype": "fp8_e5m2"}, "cache", "cache_dtype", "fp8_e5m2", id="kv_cache_dtype"),
        pytest.param({"cpu_kv_cache_gb": 0.5}, "cache", "kv_cache_memory_bytes", 2**29, id="cpu_kv_cache_gb"),
        pytest.param(
            {"kv_offloading_size": 2.0}, "cache", "kv_offloading_size", 2.0, id="kv_offloading_size"
        ),
        pytest.param(
            {"tensor_parallel_size": 2}, "parallel", "tensor_parallel_size", 2, id="tensor parallel"
        ),
        pytest.param(
            {"pipeline_parallel_size": 2}, "parallel", "pipeline_parallel_size", 2, id="pipeline parallel"
        ),
        pytest.param({}, "structured_outputs", "backend", "guidance", id="grammar compiler"),
        pytest.param({}, "structured_outputs", "disable_any_whitespace", True, id="whitespace"),
        pytest.param(
            {"profiler_dir": "/traces"}, "profiler", "torch_profiler_dir", "/traces", id="profiler_dir"
        ),
        pytest.param({"profiler_dir": "/traces"}, "profiler", "profiler", "torch", id="profiler on"),
        pytest.param({}, "profiler", "profiler", None, id="profiler off"),
        pytest.param(
            {"profiler_dir": "/traces"}, "profiler", "torch_profiler_with_stack", False, id="no stacks"
        ),
        pytest.param({"profiler_dir": "/traces"}, "profiler", "should_profile_frontend", False, id="workers"),
    ],
)
def test_a_setting_reaches_the_engine(
    settings: dict[str, Any], section: str, field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    found = getattr(getattr(config_of(**settings), f"{section}_config"), field)
    assert (str(found) if field == "dtype" else found) == value


def test_speculative_decoding_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SATURATE_SPECULATIVE__METHOD", "ngram")
    monkeypatch.setenv("SATURATE_SPECULATIVE__NUM_SPECULATIVE_TOKENS", "3")
    speculative = config_of().speculative_config
    assert (speculative.method, speculative.num_speculative_tokens) == ("ngram", 3)


def test_a_draft_model_reaches_the_engine() -> None:
    draft = SpeculativeSettings(method="draft_model", num_speculative_tokens=2, model=str(EMBEDDED_MODEL))
    speculative = config_of(speculative=draft).speculative_config
    assert (speculative.method, speculative.model) == ("draft_model", str(EMBEDDED_MODEL))


def test_gpu_settings_are_passed_on() -> None:
    args = make_args(accelerator="H200", quantization="fp8", gpu_memory_utilization=0.8)
    assert (args.quantization, args.gpu_memory_utilization) == ("fp8", 0.8)
    assert (args.max_num_seqs, args.max_num_batched_tokens) == (1024, 16384)
    assert (args.dtype, args.enforce_eager) == ("auto", False)
    assert make_args(accelerator="L4").gpu_memory_utilization == 0.85


def flat(literal: Any) -> set[Any]:
    """The values of a Literal that holds further ones."""
    return {value for part in get_args(literal) for value in (flat(part) if get_args(part) else {part})}


def test_the_engine_knows_every_name() -> None:
    from vllm.config.cache import CacheDType
    from vllm.config.speculative import SpeculativeMethod as VLLMMethod
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    assert set(get_args(Quantization)) <= set(QUANTIZATION_METHODS)
    assert set(get_args(KVCacheDtype)) <= set(get_args(CacheDType))
    assert set(get_args(SpeculativeMethod)) <= flat(VLLMMethod)


@pytest.mark.parametrize("accelerator", PRESETS)
def test_the_presets_are_documented(accelerator: str) -> None:
    from tests.conftest import ROOT

    preset = PRESETS[accelerator]
    document = (ROOT / "docs" / "engine-settings.md").read_text()
    numbers = f"{preset.max_num_seqs:,} | {preset.max_num_batched_tokens:,}"
    assert (
        f"| {accelerator} | {numbers} | `{preset.dtype}` | {'no' if preset.enforce_eager else 'yes'} |"
        in (document)
    )


def test_gpus_are_counted() -> None:
    counts = {"accelerator": "H100", "tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    assert AppSettings.model_validate(counts).num_gpus == 6
    assert AppSettings.model_validate({**counts, "accelerator": "cpu"}).num_gpus == 0


def test_profiler_dir_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_args(profiler_dir="traces").profiler_config.torch_profiler_dir == str(tmp_path / "traces")
