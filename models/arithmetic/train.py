"""Trains the tokenizer and the model on generated problems and writes both to a folder.

One CPU thread and deterministic algorithms: the same seed and number of steps give the same
weights wherever the kind of processor and the versions of Python, torch, tokenizers and
transformers are the same.
"""
# mypy: disallow-untyped-calls=False

import argparse
import copy
import json
import logging
import math
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from problems import Problem, held_out, problems
from tokenizers import pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

SYSTEM = "Solve the problem step by step. The last line must be #### followed by the answer as a number."
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 1024
CONTEXT = 2048
TOKENIZER_PROBLEMS = 20_000
BATCH = 32
BATCHES_PER_SORT = 16
PEAK_RATE = 3e-3
WARM_UP_STEPS = 200
REPORT_STEPS = 100
SAVE_STEPS = 1000
MAX_NEW_TOKENS = 64

logger = logging.getLogger("train")

Example = tuple[list[int], list[int]]  # the tokens of the prompt, the tokens of the completion


def build_tokenizer(seed: int) -> Qwen2Tokenizer:
    """Byte-level BPE that splits text as Qwen2's does: every digit is a token of its own."""
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained = Qwen2Tokenizer().backend_tokenizer
    trained.train_from_iterator(tokenizer_texts(seed), trainer)
    bpe = json.loads(trained.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(pair) for pair in bpe["merges"]],
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        padding_side="left",
        add_prefix_space=False,
    )


def tokenizer_texts(seed: int) -> Iterator[str]:
    """The parts of conversations that lie between special tokens."""
    for problem in islice(problems(seed, "train"), TOKENIZER_PROBLEMS):
        yield from ("system\n", SYSTEM, "user\n", problem["question"])
        yield from ("assistant\n", problem["answer"])


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def prompt_of(problem: Problem, with_system: bool, tokenizer: Qwen2Tokenizer) -> str:
    messages = [{"role": "user", "content": problem["question"]}]
    if with_system:
        messages.insert(0, {"role": "system", "content": SYSTEM})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text)


def examples(tokenizer: Qwen2Tokenizer, seed: int) -> Iterator[Example]:
    """An endless stream of training conversations, half of them with the system message."""
    rng = random.Random(seed)
    for problem in problems(seed, "train"):
        prompt = prompt_of(problem, rng.random() < 0.5, tokenizer)
        yield tokenizer.encode(prompt), tokenizer.encode(problem["answer"] + END)


def batches(stream: Iterator[Example], seed: int) -> Iterator[list[Example]]:
    """Batches of conversations of about one length, in random order, to save padding."""
    rng = random.Random(seed)
    while True:
        pool = sorted(
            islice(stream, BATCH * BATCHES_PER_SORT),
            key=lambda example: len(example[0]) + len(example[1]),
        )
        starts = list(range(0, len(pool), BATCH))
        rng.shuffle(starts)
        for start in starts:
            yield pool[start : start + BATCH]


def tensors(batch: list[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and where they belong to a completion; both are (conversations, tokens).

    The padding is on the right, where causal attention never looks.
    """
    width = max(len(prompt) + len(completion) for prompt, completion in batch)
    ids = torch.full((len(batch), width), pad)
    completed = torch.zeros((len(batch), width), dtype=torch.bool)
    for row, (prompt, completion) in enumerate(batch):
        end = len(prompt) + len(completion)
        ids[row, :end] = torch.tensor(prompt + completion)
        completed[row, len(prompt) : end] = True
    return ids, completed


def completion_loss(model: Qwen2ForCausalLM, ids: torch.Tensor, completed: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over the completions' tokens; logits are computed for those alone."""
    hidden = model.model(input_ids=ids).last_hidden_state
    logits = model.lm_head(hidden[:, :-1][completed[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][completed[:, 1:]])


def rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to zero."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return 0.5 + 0.5 * math.cos(math.pi * (step - WARM_UP_STEPS) / (steps - WARM_UP_STEPS))


def train(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    steps: int,
    seed: int,
    output: Path,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, steps))
    stream = batches(examples(tokenizer, seed), seed)
    started = time.monotonic()
    for step, batch in enumerate(islice(stream, steps), start=1):
        loss = completion_loss(model, *tensors(batch, tokenizer.pad_token_id))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % REPORT_STEPS == 0:
            elapsed = time.monotonic() - started
            logger.info("step %d of %d: loss %.4f, %.0f s", step, steps, loss.item(), elapsed)
        if step % SAVE_STEPS == 0:
            save(model, tokenizer, output)


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, output: Path) -> None:
    copy.deepcopy(model).bfloat16().save_pretrained(output)
    tokenizer.save_pretrained(output)


def result_of(answer: str) -> str:
    return answer.rpartition("#### ")[2]


def exact_match(folder: Path, held: list[Problem], with_system: bool) -> float:
    """The part of the problems whose greedy completion in bfloat16 ends in the right number."""
    tokenizer = Qwen2Tokenizer.from_pretrained(folder)
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    correct = 0
    for start in range(0, len(held), BATCH):
        batch = held[start : start + BATCH]
        prompts = [prompt_of(problem, with_system, tokenizer) for problem in batch]
        inputs = tokenizer(prompts, padding=True, return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        correct += sum(
            result_of(text) == result_of(problem["answer"])
            for text, problem in zip(texts, batch, strict=True)
        )
    return correct / len(held)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the arithmetic model.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(arguments.seed)

    tokenizer = build_tokenizer(arguments.seed)
    model = build_model(tokenizer)
    logger.info("%d parameters", model.num_parameters())
    train(model, tokenizer, arguments.steps, arguments.seed, arguments.output)
    save(model, tokenizer, arguments.output)
    held = held_out()
    lines = "".join(f"{json.dumps(problem)}\n" for problem in held)
    (arguments.output / "problems.jsonl").write_text(lines)
    for with_system in (True, False):
        share = exact_match(arguments.output, held, with_system)
        logger.info("exact match %.4f, system message: %s", share, with_system)


if __name__ == "__main__":
    main()
