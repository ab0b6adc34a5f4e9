"""Grade-school word problems: asks the model, scores the answers as lm-evaluation-harness does.

flyte run --local workflows/gsm8k.py main --num_questions 500
"""

from __future__ import annotations

import flyte
import flyte.errors
from flyte.io import Dir

from apps.inference_app import app_env
from tasks import environments
from tasks.load import Source
from tasks.manifest import Manifest
from tasks.pipeline import Job, run_job
from tasks.render import PromptSpec

SYSTEM_PROMPT = (
    "Solve the problem step by step. The last line must be #### followed by the answer as a number."
)

env = flyte.TaskEnvironment(
    name="saturate-gsm8k",
    image=environments.image,
    resources=environments.driver_resources,
    secrets=app_env.secrets,
    depends_on=[environments.client_env, app_env],
)


@env.task(timeout=environments.driver_timeout)
async def main(
    num_questions: int = 500,
    chunk_size: int = 50,
    max_concurrency: int = 10,
    dataset: str = "openai/gsm8k",
    config: str = "main",
    split: str = "test",
    revision: str = "",
    system_prompt: str = SYSTEM_PROMPT,
    temperature: float = 0.0,
    max_tokens: int = 512,
    model: str = "",
    endpoint: str = "",
    output: str = "",
) -> tuple[Manifest, Dir]:
    """The manifest and the folder of the run; `dataset` is a Hub id or a file with the same columns."""
    if num_questions < 1:
        raise flyte.errors.NonRecoverableError(f"num_questions={num_questions}: must be at least 1")
    job = Job(
        source=Source(dataset, config, split, revision),
        spec=PromptSpec(prompt_column="question", reference_column="answer"),
        sampling={"temperature": temperature, "max_tokens": max_tokens},
        system_prompt=system_prompt,
        limit=num_questions,
        chunk_size=chunk_size,
        max_concurrency=max_concurrency,
        model=model,
        endpoint=endpoint,
        output=output,
    )
    return await run_job(job)
