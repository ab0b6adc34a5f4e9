"""The settings of a replica as vLLM's arguments: all are passed, since defaults change between versions."""

from __future__ import annotations

from typing import Any

from apps.settings import AppSettings


def engine_args(settings: AppSettings) -> Any:
    """`vllm.AsyncEngineArgs`. Async scheduling is left out: vLLM turns it on wherever it can."""
    from vllm import AsyncEngineArgs
    from vllm.config import ProfilerConfig, StructuredOutputsConfig

    profiler: dict[str, Any] = (
        {
            "profiler": "torch",
            "torch_profiler_dir": str(settings.profiler_dir.resolve()),
            "torch_profiler_with_stack": False,  # Python's stacks make traces twelve times as large
            "ignore_frontend": True,  # without stacks its trace is empty
        }
        if settings.profiler_dir
        else {}
    )
    eager = settings.enforce_eager
    return AsyncEngineArgs(
        model=settings.model,
        revision=settings.model_revision,
        dtype=settings.dtype or settings.preset.dtype,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        max_model_len=min(settings.max_model_len, _context_length(settings)),
        max_num_seqs=settings.num_seqs,
        max_num_batched_tokens=settings.num_batched_tokens,
        enable_prefix_caching=settings.enable_prefix_caching,
        enforce_eager=settings.preset.enforce_eager if eager is None else eager,
        kv_offloading_size=settings.kv_offloading_size,
        speculative_config=settings.speculative and settings.speculative.model_dump(exclude_none=True),
        scheduling_policy="priority",
        structured_outputs_config=StructuredOutputsConfig(backend="guidance", disable_any_whitespace=True),
        profiler_config=ProfilerConfig(**profiler),
        **_memory(settings),
    )


def _memory(settings: AppSettings) -> dict[str, Any]:
    if settings.accelerator == "cpu":
        return {"kv_cache_memory_bytes": int(settings.cpu_kv_cache_gb * 2**30)}
    return {"gpu_memory_utilization": settings.gpu_memory_utilization}


def _context_length(settings: AppSettings) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.model, revision=settings.model_revision)
    return int(config.get_text_config().max_position_embeddings)
