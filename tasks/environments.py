"""Image, resources, retries and timeouts of the tasks that run without a GPU."""

from __future__ import annotations

from datetime import timedelta

import flyte

from apps import environments

image = flyte.Image.from_debian_base(python_version=(3, 12), name="saturate-client").with_pip_packages(
    "datasets",
    "fastapi",
    "httpx",
    "jinja2",
    "pandas",
    "prometheus_client",
    "pyarrow",
    "pydantic-settings",
    "rich",
    "tenacity",
)
driver_resources = flyte.Resources(cpu=2, memory="2Gi")

client_env = flyte.TaskEnvironment(
    name="saturate-client",
    image=image,
    resources=flyte.Resources(cpu=1, memory="1Gi"),
    secrets=environments.secrets,
)
infer_retries = flyte.RetryStrategy(
    count=3,
    backoff=flyte.Backoff(base=timedelta(seconds=5), factor=2, cap=timedelta(minutes=5)),
)
infer_timeout = flyte.Timeout(max_runtime=timedelta(hours=4))
"""Longer than the patience of `infer_batch` and its passes, at one request timeout each."""
driver_timeout = flyte.Timeout(max_runtime=timedelta(days=2))
