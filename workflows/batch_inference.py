"""Any data set through the model: one prompt a row, one completion a row.

flyte run --local workflows/batch_inference.py main --dataset rows.jsonl --prompt_column text
"""

from __future__ import annotations

import flyte
from flyte.io import Dir

from apps.inference_app import app_env
from apps.schema import SamplingParams
from tasks import environments
from tasks.load import Source
from tasks.manifest import Manifest
from tasks.pipeline import Job, run_job
from tasks.render import PromptSpec

GREEDY = SamplingParams()

env = flyte.TaskEnvironment(
    name="saturate-batch-inference",
    image=environments.image,
    resources=environments.driver_resources,
    secrets=app_env.secrets,
    depends_on=[environments.client_env, app_env],
)


@env.task(timeout=environments.driver_timeout)
async def main(
    dataset: str,
    prompt_column: str = "prompt",
    prompt_template: str = "",
    messages_column: str = "",
    id_column: str = "",
    system_prompt: str = "",
    chat: bool = True,
    sampling: SamplingParams = GREEDY,
    limit: int = 0,
    chunk_size: int = 50,
    max_concurrency: int = 10,
    config: str = "",
    split: str = "train",
    revision: str = "",
    model: str = "",
    endpoint: str = "",
    output: str = "",
) -> tuple[Manifest, Dir]:
    """The manifest and the folder of the run; `dataset` is a Hub id or a JSONL, CSV or Parquet file."""
    job = Job(
        source=Source(dataset, config, split, revision),
        spec=PromptSpec(prompt_column, prompt_template, messages_column, id_column),
        sampling=sampling.model_dump(),
        system_prompt=system_prompt,
        chat=chat,
        limit=limit,
        chunk_size=chunk_size,
        max_concurrency=max_concurrency,
        model=model,
        endpoint=endpoint,
        output=output,
    )
    return await run_job(job)
