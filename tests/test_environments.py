"""What is asked of Flyte: scaling, timeouts and retries are derived and set."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import flyte
import flyte.app
import pytest

from apps import environments as app_environments
from apps.inference_app import app_env
from apps.settings import PRESETS, AppSettings, concurrency_target
from tasks import infer_batch as infer_module
from tasks.client import PATIENCE_S, REQUEST_TIMEOUT_S
from tasks.infer_batch import infer_batch
from tests.conftest import ROOT
from workflows import batch_inference, gsm8k


def test_the_app_scales_from_zero_to_two() -> None:
    assert app_env.scaling.replicas == (0, 2)
    assert app_env.scaling.scaledown_after == timedelta(seconds=300)
    assert app_env.resources is not None
    assert app_env.resources.gpu is not None


@pytest.mark.parametrize(
    ("num_seqs", "chunk_size", "target"), [(256, 50, 11), (1024, 50, 41), (128, 256, 1), (1, 1, 2)]
)
def test_the_concurrency_target_feeds_a_replica_twice(num_seqs: int, chunk_size: int, target: int) -> None:
    assert concurrency_target(num_seqs, chunk_size) == target
    assert target * chunk_size >= 2 * num_seqs


def test_the_queue_holds_two_rounds_of_a_healthy_job() -> None:
    for accelerator in PRESETS:
        settings = AppSettings.model_validate({"accelerator": accelerator})
        target = concurrency_target(settings.num_seqs, app_environments.CHUNK_SIZE)
        assert settings.max_queue_size >= 2 * target * app_environments.CHUNK_SIZE


def test_timeouts_nest_from_deadline_to_platform() -> None:
    request = app_env.timeouts.request
    assert isinstance(request, timedelta)
    assert infer_module.DEADLINE_S < REQUEST_TIMEOUT_S <= request.total_seconds()
    task = infer_batch.timeout
    assert isinstance(task, flyte.Timeout)
    assert isinstance(task.max_runtime, timedelta)
    longest = PATIENCE_S + infer_module.MAX_PASSES * REQUEST_TIMEOUT_S
    assert longest < task.max_runtime.total_seconds()


def test_a_chunk_is_retried_with_growing_pauses() -> None:
    retries = infer_batch.retries
    assert isinstance(retries, flyte.RetryStrategy)
    assert retries.count >= 1
    assert retries.backoff is not None
    assert retries.backoff.factor > 1


@pytest.mark.parametrize("driver", [gsm8k, batch_inference])
def test_a_driver_deploys_the_app_with_it(driver: object) -> None:
    env = driver.env  # type: ignore[attr-defined]  # both modules have one
    assert app_env in env.depends_on
    assert env.image is not app_env.image


def test_a_deployed_app_gets_its_settings_and_the_token_as_a_secret() -> None:
    script = (
        "from apps.environments import env_vars, secrets;"
        "from tasks.environments import client_env;"
        "print(env_vars, [(s.key, s.as_env_var) for s in secrets], client_env.secrets == secrets)"
    )
    settings = {
        "SATURATE_SPECULATIVE__METHOD": "ngram",
        "SATURATE_MAX_NUM_SEQS": "7",
        "SATURATE_API_TOKEN": "hush",
        "SATURATE_API_TOKEN_SECRET": "inference-token",
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **settings},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "hush" not in done.stdout
    assert "'SATURATE_SPECULATIVE__METHOD': 'ngram', " in done.stdout.replace("}", ", ")
    assert "[('inference-token', 'SATURATE_API_TOKEN')] True" in done.stdout, done.stderr
