"""Make a small starting checkpoint in Hugging Face format: model, tokenizer, chat template.

Characters are tokens. The model learns answers by cross-entropy; in the last fifth of its training
half of the answers are wrong on purpose. It ends up like a base model that knows the task and
answers carelessly, which is what GRPO can mend within a minute on a CPU. A model that is merely
stopped early does not know the rest: GRPO gained 16 points on one in 60 steps
(docs/research/log.md).

Working is careless line by line: a wrong result is carried on, and no line tells that an earlier
one was wrong, so the model learns to slip as often at every line, and so few answers come out right
that reward starts between 0.1 and 0.4, whatever the difficulty. That is of a model that has learned
the task: four layers of 256 learn sums of eight numbers, two do not (docs/research/log.md). What it
samples in the end is graded, and told.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import Progress
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from fp8_nemo.local.chat import Chat
from fp8_nemo.local.engine import pad_left
from fp8_nemo.local.modules.deterministic import repeat_exactly
from fp8_nemo.recipe.model_dir import weights_digest
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.problems import Problem, Split, reward, working
from fp8_nemo.runs.metrics import sync
from fp8_nemo.runs.run_dir import new_staging
from fp8_nemo.runs.terminal import console, tell

SPECIALS = ("<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CARELESS = 0.5  # of the answers, in the last fifth of the steps
CARELESS_WORKING = 0.7  # of the answers that have working
GRADED, ROOM = 256, 8
"""Held-out problems that a made model is graded on, and tokens that an answer may be too long."""
PASS = 2**15  # tokens, padding included; 58,624 at once took 90 GiB of an H200
IGNORED = -100  # a label that does not count


class Teaching(NamedTuple):
    """Say how a model is trained: `Teaching(2500, 256, 1.0e-3, 20)`."""

    steps: int
    batch: int
    """Problems of a step."""
    learning_rate: float
    """At the peak."""
    warm_up: int
    """Steps until then."""


ANSWERS = Teaching(2500, 256, 1.0e-3, 20)
WORKING = Teaching(600, 64, 3.0e-4, 100)
"""Every line is an example of its own, so fewer steps teach it. 113M parameters did not learn it at
1e-3 after 20 steps of warm-up, and at 3e-4 within 300 steps (docs/research/log.md, 2026-11-21)."""
NARROW = 512
"""Hidden sizes below this learn `WORKING` at 1e-3: one of 256 did not at 3e-4 (2026-11-23)."""


def make(folder: Path, recipe: Recipe, problems: Split) -> None:
    """Train and save, the same bytes whenever it is done on such a machine; say what it can do.

    A bar on a terminal, a line every tenth of the way elsewhere.
    """
    repeat_exactly()  # the runs of a study begin alike, wherever and whenever a model was made
    chat, shape = make_chat(), recipe.model.shape
    how = teaching_for(problems.train, shape)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = new_model(shape, chat, recipe.seed)
    shown, every = console(), max(1, how.steps // 10)
    with Progress(console=shown, disable=not shown.is_terminal) as bar:
        task = bar.add_task(recipe.model.name, total=how.steps)

        def report(step: int, loss: float) -> None:
            """Move the bar, or print the line."""
            text = f"{recipe.model.name} loss {loss:.3f}"
            bar.update(task, completed=step, description=text)
            if not shown.is_terminal and step % every == 0:
                tell(f"{text}  step {step}/{how.steps}")

        train_model(model, chat, problems.train, teaching=how, seed=recipe.seed, report=report)
    save_model(model, chat, folder)
    about = f"{model.num_parameters():,} parameters, weights {weights_digest(folder)}"
    share = sampled_right(model, chat, problems.validation[:GRADED], recipe.seed)
    tell(f"{folder}: {recipe.model.name}, {about}; {share:.0%} of its held-out answers are right")


def make_chat() -> Chat:
    """Make a tokenizer of printable ASCII characters and the roles of a chat."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<system>", "<user>", "<assistant>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return Chat(fast)


def make_config(shape: Shape, **more: Any) -> PreTrainedConfig:
    """Make the transformers configuration of a shape, of the family that it belongs to.

    Args:
        shape: of the model.
        more: of its keys, what no shape says.
    """
    experts = {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_ffn,
        "norm_topk_prob": True,
    }
    numbers: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
    }
    numbers |= more | (experts if shape.experts else {})
    return AutoConfig.for_model(shape.family, **numbers)


@torch.no_grad()
def sampled_right(model: PreTrainedModel, chat: Chat, problems: list[Problem], seed: int) -> float:
    """Return the share of problems that one sampled answer each gets right: the first reward."""
    prompts = [chat.prompt(each.input) for each in problems]
    tokens_BT, mask_BT = pad_left(prompts, chat.pad, model.device)
    torch.manual_seed(seed)
    sample: Any = model.eval().generate
    found_BT = sample(
        tokens_BT,
        attention_mask=mask_BT,
        do_sample=True,
        top_k=0,
        max_new_tokens=max(len(chat.answer(_answer(each))) for each in problems) + ROOM,
        pad_token_id=chat.pad,
        eos_token_id=chat.end,
    )
    answers_BR = found_BT[:, tokens_BT.shape[1] :]
    texts = chat.texts(answers_BR, answers_BR != chat.pad)
    rewards = [reward(text, each) for text, each in zip(texts, problems, strict=True)]
    return sum(rewards) / len(rewards)


def teaching_for(problems: list[Problem], shape: Shape) -> Teaching:
    """Choose `WORKING` for answers that have working, faster if `NARROW`, else `ANSWERS`."""
    if not problems[0].working:
        return ANSWERS
    return WORKING._replace(learning_rate=1.0e-3) if shape.hidden < NARROW else WORKING


def train_model(
    model: PreTrainedModel,
    chat: Chat,
    problems: list[Problem],
    *,
    teaching: Teaching,
    seed: int,
    report: Callable[[int, float], None],
) -> None:
    """Train on answers, some of the last ones wrong: cross-entropy, AdamW in FP32, cosine.

    Args:
        model: FP32 weights, trained in place.
        chat: the model's tokenizer.
        problems: to learn; held-out ones are not among them.
        teaching: for how long, and how.
        seed: order of the problems, and which answers are wrong.
        report: called after each step with its number and loss.
    """
    steps, batch, peak, warm_up = teaching
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.01)
    draw = random.Random(seed)
    # On a GPU in BF16; the masters stay FP32.
    half = torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda")
    model.train()
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = peak * _schedule(step, steps, warm_up)
        chosen = draw.choices(problems, k=batch)
        if step > steps * 4 // 5:
            chosen = [careless(each, draw) for each in chosen]
        tokens_BT, labels_BT = _supervised(chat, chosen)
        tokens_BT, labels_BT = tokens_BT.to(model.device), labels_BT.to(model.device)
        loss, labels = 0.0, (labels_BT[:, 1:] != IGNORED).sum()
        rows = max(1, PASS // tokens_BT.shape[1])
        parts = zip(tokens_BT.split(rows), labels_BT[:, 1:].split(rows), strict=True)
        for tokens_bT, labels_bT in parts:
            with half:
                logits_bTV = model(tokens_bT, use_cache=False).logits[:, :-1]
            mean = torch.nn.functional.cross_entropy(
                logits_bTV.float().flatten(0, 1), labels_bT.flatten(), ignore_index=IGNORED
            )
            part = mean * ((labels_bT != IGNORED).sum() / labels)
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report(step, loss)


def careless(problem: Problem, draw: random.Random) -> Problem:
    """Return the problem, sometimes with digits of its answer, or of its lines, replaced.

    `CARELESS` of the outputs without working have one wrong digit. Of working, each line's result
    has one with the same probability, such that `CARELESS_WORKING` of the answers end up wrong.
    """
    if problem.working:
        return problem._replace(working=_careless_working(problem, draw))
    if draw.random() >= CARELESS:
        return problem
    return Problem(problem.input, _one_wrong(problem.output, draw))


def _careless_working(problem: Problem, draw: random.Random) -> str:
    numbers = [int(number) for number in problem.input.split("+")]
    right = (1 - CARELESS_WORKING) ** (1 / (len(numbers) - 1))  # of one line

    def slip(result: int) -> int:
        return result if draw.random() < right else int(_one_wrong(str(result), draw, least=1))

    return working(numbers, slip)


def _one_wrong(number: str, draw: random.Random, least: int = 0) -> str:
    """Replace one digit of a number; the first one stays at `least` or above."""
    digits = list(number)
    place = draw.randrange(len(digits))
    allowed = "0123456789"[least if place == 0 else 0 :]
    digits[place] = draw.choice([digit for digit in allowed if digit != digits[place]])
    return "".join(digits)


def _answer(problem: Problem) -> str:
    return problem.working or problem.output


def _schedule(step: int, steps: int, warm_up: int) -> float:
    """Return the share of the peak learning rate: linear warm-up, then cosine down to a tenth."""
    cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
    return min(step / warm_up, cosine)


def new_model(shape: Shape, chat: Chat, seed: int) -> PreTrainedModel:
    """Make a model with random weights in FP32."""
    torch.manual_seed(seed)
    config = make_config(
        shape, max_position_embeddings=2048, pad_token_id=chat.pad, eos_token_id=chat.end
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save_model(model: PreTrainedModel, chat: Chat, folder: Path) -> None:
    """Write weights in BF16, configuration, tokenizer and chat template; all of it, or nothing.

    Raises:
        OSError: it cannot be written; one line, with the folder.
    """
    saving = new_staging(folder.resolve().parent, ".saving")
    try:
        new = saving / folder.resolve().name
        model.bfloat16().save_pretrained(new)
        chat.tokenizer.save_pretrained(new)
        for weights in new.glob("*.safetensors"):  # written for their owner alone
            shutil.copymode(new / "config.json", weights)
        for each in (*new.iterdir(), new):
            sync(each)
        new.replace(folder.resolve())
        sync(saving.parent)
    except (OSError, SafetensorError) as error:  # safetensors raises this when the disk is full
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise OSError(f"{folder}: cannot be written ({reason}); make room") from error
    finally:
        shutil.rmtree(saving)


def _supervised(chat: Chat, problems: list[Problem]) -> tuple[Tensor, Tensor]:
    """Return right-padded tokens `[B, T]`, and labels that are `IGNORED` but at the answer."""
    pairs = [(chat.prompt(each.input), chat.answer(_answer(each))) for each in problems]
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens, labels = [], []
    for prompt, answer in pairs:
        padding = width - len(prompt) - len(answer)
        tokens.append(prompt + answer + [chat.pad] * padding)
        labels.append([IGNORED] * len(prompt) + answer + [IGNORED] * padding)
    return torch.tensor(tokens), torch.tensor(labels)
