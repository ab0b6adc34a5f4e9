"""A replica without a model: deterministic completions, roofline step times, a KV limit, failures on demand.

One loop plays continuous batching. While the set of running prompts does not change every step
takes the same time, so the loop sleeps from one event (an arrival, a completion) to the next
instead of from token to token. A step costs

    overhead + max(weights / bandwidth, FLOPs / peak) + KV cache read / bandwidth

the roofline of a decoder (Williams et al., "Roofline", CACM 2009); a prompt joins with one step that
computes all its tokens. Completions depend on the seed and the prompt alone, timing on the load.
Of the sampling parameters it obeys `seed`, `max_tokens`, `min_tokens` and `ignore_eos`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import heapq
import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist

from apps.engines.base import Completion, EngineLimits, RenderedPrompt
from apps.errors import EngineError, EngineUnavailable, PromptError
from apps.schema import CHARS_PER_TOKEN, Row, SamplingParams
from apps.settings import AppSettings, SimulatedSettings

KV_BYTES_PER_TOKEN = 57_344
"""2 (key and value) x 28 layers x 4 KV heads x 128 x 2 bytes: the 7-billion-parameter Qwen2.5."""
LENGTH_SIGMA = 0.5
FIRST_PIECE = "Simulated completion "
"""What `on_text` is given once the prompt is computed."""
NORMAL = NormalDist()


@dataclass(eq=False)
class _Sequence:
    """A prompt in the engine; `num_steps` is one step for each completion token."""

    prompt_tokens: int
    num_steps: int
    arrived: float
    done: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Resolves to the seconds from arrival to the first token."""
    on_first_token: Callable[[], None] | None = None
    ttft_s: float = 0.0

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + self.num_steps


class SimulatedEngine:
    """Obeys `apps.engines.base.Engine`."""

    def __init__(self, settings: AppSettings) -> None:
        self._config: SimulatedSettings = settings.simulated
        self._limits = EngineLimits(
            model=settings.model,
            model_revision=f"seed-{settings.simulated.seed}",
            engine="simulated 1",
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.num_seqs,
            kv_cache_tokens=settings.simulated.kv_cache_tokens,
        )
        self._waiting: list[tuple[int, int, _Sequence]] = []
        """A heap of (priority, order of arrival, sequence)."""
        self._running: list[tuple[int, int, _Sequence]] = []
        """A heap of (step at which it finishes, tie-break, sequence)."""
        self._step = 0
        self._kv_tokens = 0
        """Reserved by the running set: prompt and completion to its end."""
        self._has_cancelled = False
        self._order = itertools.count()
        self._num_started = 0
        self._arrival = asyncio.Event()
        self._failures = random.Random(settings.simulated.seed)
        self._dead = False
        self._loop_task = asyncio.get_running_loop().create_task(self._run(), name="simulated-engine")

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    async def render(self, row: Row) -> RenderedPrompt:
        is_tokens = isinstance(row.prompt, list)
        num_tokens = len(row.prompt or ()) if is_tokens else row.num_chars // CHARS_PER_TOKEN + 1
        if num_tokens >= self._limits.max_model_len:
            raise PromptError(
                "too_long",
                f"the prompt has about {num_tokens} tokens, the model takes fewer than "
                f"{self._limits.max_model_len}",
            )
        return RenderedPrompt(num_tokens=num_tokens, payload=row.model_dump_json(exclude={"id", "sampling"}))

    async def generate(
        self,
        prompt: RenderedPrompt,
        sampling: SamplingParams,
        *,
        priority: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        self._start_one()
        digest = hashlib.sha256(f"{self._config.seed}\0{sampling.seed}\0{prompt.payload}".encode()).digest()
        room = min(sampling.max_tokens, self._limits.max_model_len - prompt.num_tokens)
        wanted = max(sampling.min_tokens, self._completion_tokens(digest))
        is_cut = sampling.ignore_eos or wanted > room
        num_steps = room if is_cut else wanted
        sequence = _Sequence(prompt.num_tokens, num_steps, time.monotonic())
        first, rest = FIRST_PIECE, f"{digest.hex()[:12]}.\n#### {int.from_bytes(digest[:2])}"
        if on_text is not None:
            sequence.on_first_token = partial(on_text, first)
        heapq.heappush(self._waiting, (priority, next(self._order), sequence))
        self._arrival.set()
        try:
            ttft_s = await sequence.done
        except asyncio.CancelledError:
            self._has_cancelled = True
            raise
        if on_text is not None:
            on_text(rest)
        return Completion(
            text=first + rest,
            finish_reason="length" if is_cut else "stop",
            completion_tokens=num_steps,
            ttft_s=ttft_s,
        )

    async def check_health(self) -> None:
        if self._dead:
            raise EngineUnavailable("the simulated engine is dead")

    async def close(self) -> None:
        self._dead = True
        self._loop_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._loop_task
        self._fail_all()

    def _start_one(self) -> None:
        """Counts one prompt and raises the failure that is due, if any."""
        limit = self._config.die_after
        if limit is not None and self._num_started >= limit and not self._dead:
            self._dead = True
            self._fail_all()
        if self._dead:
            raise EngineUnavailable("the simulated engine is dead")
        self._num_started += 1
        if self._failures.random() < self._config.failure_rate:
            raise EngineError("injected failure")

    def _fail_all(self) -> None:
        for _, _, sequence in [*self._waiting, *self._running]:
            if not sequence.done.done():
                sequence.done.set_exception(EngineUnavailable("the simulated engine died"))
        self._waiting.clear()
        self._running.clear()

    def _completion_tokens(self, digest: bytes) -> int:
        """Lognormal with the configured mean: mu = ln(mean) - sigma^2 / 2, by inverse transform."""
        mu = math.log(self._config.mean_completion_tokens) - LENGTH_SIGMA**2 / 2
        quantile = (int.from_bytes(digest[-6:]) + 0.5) / 2**48
        return max(1, round(math.exp(mu + LENGTH_SIGMA * NORMAL.inv_cdf(quantile))))

    async def _run(self) -> None:
        while True:
            self._drop_cancelled()
            admitted = self._admit()
            if not self._running:
                self._arrival.clear()
                await self._arrival.wait()
                continue
            if admitted:
                await self._sleep(self._step_s(sum(s.prompt_tokens for s in admitted)))
                self._step += 1
                for sequence in admitted:
                    sequence.ttft_s = time.monotonic() - sequence.arrived
                    if sequence.on_first_token is not None:
                        sequence.on_first_token()
            else:
                self._step += await self._decode(self._running[0][0] - self._step)
            self._finish()

    def _drop_cancelled(self) -> None:
        if self._has_cancelled:
            self._has_cancelled = False
            self._running = [entry for entry in self._running if not entry[2].done.cancelled()]
            heapq.heapify(self._running)
            self._kv_tokens = sum(entry[2].kv_tokens for entry in self._running)

    def _admit(self) -> list[_Sequence]:
        """Moves waiting prompts into the running set while they fit, and returns them."""
        admitted = []
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            head = self._waiting[0][2]
            fits = self._kv_tokens + head.kv_tokens <= self._config.kv_cache_tokens
            if self._running and not fits:
                break
            heapq.heappop(self._waiting)
            if not head.done.cancelled():
                self._kv_tokens += head.kv_tokens
                admitted.append(head)
                entry = (self._step + head.num_steps, next(self._order), head)
                heapq.heappush(self._running, entry)
        return admitted

    def _finish(self) -> None:
        while self._running and self._running[0][0] <= self._step:
            sequence = heapq.heappop(self._running)[2]
            self._kv_tokens -= sequence.kv_tokens
            if not sequence.done.done():
                sequence.done.set_result(sequence.ttft_s)

    async def _decode(self, steps: int) -> int:
        """Lets up to `steps` steps pass; an arrival that could join ends the wait. Returns how many did."""
        step_s = self._step_s(0)
        real_step_s = step_s * self._config.time_scale
        if not real_step_s or len(self._running) >= self._limits.max_num_seqs:
            await self._sleep(steps * step_s)
            return steps
        self._arrival.clear()
        started = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(steps * real_step_s):
                await self._arrival.wait()
        return min(steps, max(1, int((time.monotonic() - started) / real_step_s)))

    async def _sleep(self, simulated_s: float) -> None:
        await asyncio.sleep(simulated_s * self._config.time_scale)

    def _step_s(self, prefill_tokens: int) -> float:
        """Simulated seconds of one step over the running set."""
        config = self._config
        bandwidth = config.memory_gb_per_s * 1e9
        tokens = len(self._running) + prefill_tokens
        compute_s = config.flops_per_token * tokens / (config.tflops * 1e12)
        weights_s = config.weights_gb * 1e9 / bandwidth
        kv_read_s = self._kv_tokens * KV_BYTES_PER_TOKEN / bandwidth
        return config.step_overhead_s + max(weights_s, compute_s) + kv_read_s
