"""Where and how the app runs: everything that does not change a completion, read once at start.

Each field is set by the environment variable `SATURATE_<FIELD>`, nested ones as
`SATURATE_SIMULATED__SEED`. What is `None` and in `Preset` comes from the accelerator's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from apps.logs import LogFormat
from apps.schema import MAX_REQUEST_BYTES

EMBEDDED_MODEL = Path(__file__).resolve().parents[1] / "models" / "arithmetic"
"""The model that ships with the repository: small enough for a CPU, good only at its own problems."""

DEFAULT_MODEL = "Qwen/Qwen2.5-7B-Instruct"

Dtype = Literal["auto", "float16", "bfloat16", "float32"]
Quantization = Literal[
    "fp8", "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt", "modelopt_fp4"
]
"""vLLM's names, of which `fp8` quantizes a model's weights as they are loaded; the others say how a
model was quantized, which vLLM otherwise reads from its configuration."""
KVCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]
SpeculativeMethod = Literal["ngram", "draft_model", "eagle", "eagle3", "mtp"]

ROWS_IN_FLIGHT_PER_SEQ = 2
"""Rows handed to the engine for each row it can run, so that its own queue never runs dry."""


@dataclass(frozen=True)
class Preset:
    """Engine settings that suit one accelerator; docs/engine-settings.md names their sources."""

    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: Dtype = "auto"
    enforce_eager: bool = False


PRESETS = {
    "cpu": Preset(max_num_seqs=128, max_num_batched_tokens=8192, dtype="bfloat16", enforce_eager=True),
    "L4": Preset(max_num_seqs=256, max_num_batched_tokens=8192),
    "A100": Preset(max_num_seqs=256, max_num_batched_tokens=8192),
    "H100": Preset(max_num_seqs=1024, max_num_batched_tokens=16384),
    "H200": Preset(max_num_seqs=1024, max_num_batched_tokens=16384),
}
"""vLLM's async engine falls back to 128 rows and 2,048 batched tokens on every GPU; these are what
its offline class takes for them (`vllm/engine/arg_utils.py`). On a CPU, vLLM compiles nothing when
eager, and so starts in a third of the time."""

Accelerator = Literal["cpu", "L4", "A100", "H100", "H200"]


class SpeculativeSettings(BaseModel):
    """Speculative decoding: a few tokens are guessed and then checked in one step of the model."""

    method: SpeculativeMethod
    num_speculative_tokens: int | None = Field(None, ge=1)
    """Tokens guessed at a time; `None` leaves it to the draft's configuration, which `ngram` lacks."""
    model: str | None = None
    """Hub id or folder of the draft, for `eagle`, `eagle3` and `draft_model`."""


class SimulatedSettings(BaseModel):
    """The simulated engine: a roofline of one replica, and the failures to inject.

    The defaults describe a 7-billion-parameter model in bf16 on an L4.
    """

    seed: int = 0
    """Decides every completion and every injected failure."""
    mean_completion_tokens: float = Field(200.0, gt=0)
    """Completion lengths are lognormal with this mean and a sigma of 0.5."""
    weights_gb: float = Field(15.2, ge=0)
    """Read from memory once a step."""
    memory_gb_per_s: float = Field(240.0, gt=0)
    flops_per_token: float = Field(15.2e9, ge=0)
    """Two for each parameter."""
    tflops: float = Field(54.0, gt=0)
    step_overhead_s: float = Field(0.003, ge=0)
    kv_cache_tokens: int = Field(80_000, ge=1)
    time_scale: float = Field(1.0, ge=0)
    """Seconds slept for each simulated second; 0 answers at once."""
    failure_rate: float = Field(0.0, ge=0, le=1)
    """Share of prompts that fail with a retryable error, drawn anew each time one is sent."""
    die_after: int | None = Field(None, ge=0)
    """The engine is dead once it has started this many prompts."""


class AppSettings(BaseSettings):
    """One replica of the inference app."""

    model_config = SettingsConfigDict(
        env_prefix="SATURATE_", env_nested_delimiter="__", env_ignore_empty=True, frozen=True
    )

    engine: Literal["vllm", "simulated"] = "vllm"
    model: str = DEFAULT_MODEL
    """Hub id or folder of the model to serve."""
    model_revision: str | None = None
    """Branch, tag or commit on the Hub; `None` is the default branch."""
    accelerator: Accelerator = "L4"
    """Chooses the preset of engine limits below."""
    max_model_len: int = Field(4096, ge=2)
    """Prompt plus completion tokens at most; a model with a shorter context lowers it."""
    max_num_seqs: int | None = Field(None, ge=1)
    """Rows the engine runs at once."""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Tokens the engine computes in one step."""
    dtype: Dtype | None = None
    """Of weights and activations; `auto` is the model's own."""
    quantization: Quantization | None = None
    """Of the weights; `None` is what the model's configuration says."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """An 8-bit one doubles the tokens that fit; `auto` is the model's own."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that each layer is split over."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Groups of GPUs that the layers are dealt out to."""
    enable_prefix_caching: bool = True
    """Whether a beginning that prompts share is computed once."""
    enforce_eager: bool | None = None
    """Whether to do without CUDA graphs and compilation: a faster start, slower steps."""
    kv_offloading_size: float | None = Field(None, gt=0)
    """GiB of CPU memory for KV cache that leaves the GPU; `None` drops it."""
    speculative: SpeculativeSettings | None = None
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of the GPU's memory for weights and KV cache."""
    cpu_kv_cache_gb: float = Field(1.0, gt=0)
    """KV cache of the CPU build."""
    profiler_dir: Path | None = None
    """Where traces of PyTorch's profiler go; `None` leaves the profiler out."""

    batch_timeout_s: float = Field(0.005, ge=0)
    """Longest wait of the TokenBatcher for a fuller batch."""
    max_batch_size: int = Field(64, ge=1)
    """Rows admitted to the engine at once."""
    target_batch_tokens: int = Field(32_000, ge=1)
    """Estimated tokens admitted to the engine at once."""
    max_queue_size: int = Field(5_000, ge=1)
    """Rows waiting for the engine; a request that does not fit is answered 429."""
    interactive_share: float = Field(0.125, ge=0, le=0.5)
    """Share of the engine's budget of rows and tokens that batch jobs leave to interactive requests."""
    max_request_rows: int = Field(1_000, ge=1)
    """Rows of one request; more are answered 413."""
    max_request_bytes: int = Field(MAX_REQUEST_BYTES, ge=1)
    """A longer body is answered 413."""
    max_open_bytes: int = Field(256_000_000, ge=1)
    """Of the bodies of all requests that are not answered yet; more are answered 429."""
    drain_s: float = Field(30.0, ge=0)
    """After SIGTERM, for what is in the engine to finish; the platform's own grace period, or less."""
    api_token: SecretStr | None = None
    """Bearer token that every request must carry but those to `/health` and `/ready`."""
    api_token_secret: str = ""
    """Name of the Flyte secret that holds `api_token`, for app and clients; read at deploy."""

    log_format: LogFormat = "plain"
    """`json`: an object a line, for a collector of logs."""

    simulated: SimulatedSettings = SimulatedSettings()

    @property
    def preset(self) -> Preset:
        return PRESETS[self.accelerator]

    @property
    def num_seqs(self) -> int:
        """`max_num_seqs`, or the preset's."""
        return self.max_num_seqs or self.preset.max_num_seqs

    @property
    def num_batched_tokens(self) -> int:
        """`max_num_batched_tokens`, or the preset's; the engine needs at least one a row."""
        return self.max_num_batched_tokens or max(self.preset.max_num_batched_tokens, self.num_seqs)

    @property
    def num_gpus(self) -> int:
        return 0 if self.accelerator == "cpu" else self.tensor_parallel_size * self.pipeline_parallel_size


def concurrency_target(num_seqs: int, chunk_size: int) -> int:
    """Requests of `chunk_size` rows that keep one replica of `num_seqs` rows fed."""
    return -(-ROWS_IN_FLIGHT_PER_SEQ * num_seqs // chunk_size)
