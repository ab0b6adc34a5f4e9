"""The app's image, resources and scaling. Variables are read when this module is imported: at deploy."""

from __future__ import annotations

import os

import flyte
import flyte.app

from apps.settings import AppSettings, concurrency_target

APP_NAME = "saturate-inference"
CHUNK_SIZE = 50
"""Rows of one request, from which the concurrency target of a replica is derived."""
REQUEST_TIMEOUT_S = 3600
"""Flyte's maximum. A request that wakes a replica waits for the image and the model, too."""

settings = AppSettings()

gpu = (
    None if settings.accelerator == "cpu" else flyte.GPU(settings.accelerator, settings.num_gpus)  # type: ignore[arg-type]  # its literal ends at 8
)

image = flyte.Image.from_debian_base(python_version=(3, 12), name="saturate-app").with_pip_packages(
    "vllm==0.32.0",
    "fastapi",
    "nvidia-ml-py",
    "openai",
    "prometheus_client",
    "pydantic-settings",
    "uvicorn[standard]",
)
resources = flyte.Resources(cpu=6, memory="24Gi", gpu=gpu, disk="64Gi")
scaling = flyte.app.Scaling(
    replicas=(0, 2),
    metric=flyte.app.Scaling.Concurrency(val=concurrency_target(settings.num_seqs, CHUNK_SIZE)),
    scaledown_after=300,
)
timeouts = flyte.app.Timeouts(request=REQUEST_TIMEOUT_S)
env_vars = {
    name: value
    for name, value in os.environ.items()
    if name.startswith("SATURATE_") and name != "SATURATE_API_TOKEN"
}
"""The app's own settings. The token travels as a secret."""
secrets: list[str | flyte.Secret] = (
    [flyte.Secret(key=settings.api_token_secret, as_env_var="SATURATE_API_TOKEN")]
    if settings.api_token_secret
    else []
)
