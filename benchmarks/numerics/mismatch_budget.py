"""Which operation owns how much of the mismatch between trainer and engine.

python -m benchmarks.numerics.mismatch_budget run MODEL --out FILE.json [--precision fp8-e2e]
    [--engine eager] [--align] [--attention flash] [--sequences 8] [--tokens 352] [--prompt 32]
    [--device cuda] [--stacks both]
python -m benchmarks.numerics.mismatch_budget draw FILE.json... --out FILE.svg

MODEL is a Hugging Face folder of a Llama, Qwen3 or Qwen3-MoE. One forward, whose operations come
from a table, runs on the same tokens with the trainer's operations, with the engine's, and with
mixtures (`table_forward`, `dialects`; on a GPU with the two stacks' own kernels, `gpu_dialects`):

    alone       the trainer with one operation of the engine's: KL to the trainer
    cumulative  the trainer with the first operations of the engine's: KL to the whole engine
    without     the engine with one operation of the trainer's: KL to the whole engine

and `local` gives both operations the same arguments, from the trainer's forward. With `--stacks`
the real vLLM samples the tokens and scores them (`stacks`, a process of its own), the real Megatron
scores them, and `real` says how far either is from its table, in bits and in KL: a budget holds as
far as those agree. `--align` gives the engine the trainer's RoPE, SiLU and quantizer, the real one
by `fp8_nemo.nemo.aligned` and its table by the trainer's kernels; `--attention flash` gives the
trainer the engine's attention (`flash_for_te`).

A part that fails is an `error` in the file, and its place is taken by torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import record
from benchmarks.numerics import dialects, flash_for_te, stacks
from benchmarks.numerics.dialects import difference, no_quantize
from benchmarks.numerics.table_forward import Model, Ops, Pass, Shape, forward, load
from benchmarks.speed.decode_profile import without_folders

ROWS = 1024  # of logits at once in FP64


class Score:
    """Logprobs of the answers' tokens and, a block of rows at a time, of the whole vocabulary."""

    def __init__(self, ops: Ops, done: Pass, tokens_NS: Tensor, prompt: int) -> None:
        S = tokens_NS.shape[1]
        at = torch.arange(tokens_NS.numel(), device=tokens_NS.device).view(tokens_NS.shape)
        rows = at[:, prompt - 1 : S - 1].flatten()
        self.logprobs_RV = ops["logprob"](done.logits_TV[rows])
        self.sampled_R = self.logprobs_RV.gather(1, tokens_NS[:, prompt:].reshape(-1, 1))[:, 0]


def distance(rollout: Score, train: Score) -> dict[str, float]:
    """Return the exact KL(rollout || train) in nats a token, and what sampled tokens say of it."""
    kl = 0.0
    for p, q in zip(rollout.logprobs_RV.split(ROWS), train.logprobs_RV.split(ROWS), strict=True):
        p, q = p.double(), q.double()
        kl += float((p.exp() * (p - q)).sum())
    return {"kl": max(kl / len(rollout.sampled_R), 0.0)} | sampled(
        rollout.sampled_R, train.sampled_R
    )


def sampled(rollout_R: Tensor, train_R: Tensor) -> dict[str, float]:
    """Return k3, half a square, mean and largest of two logprobs `[R]` of the sampled tokens."""
    x = train_R.double() - rollout_R.double()
    return {
        "k3": float((torch.expm1(x) - x).mean()), "half_square": float(x.square().mean() / 2),
        "mean_abs": float(x.abs().mean()), "max_abs": float(x.abs().max()),
        "equal": float((x == 0).double().mean()),
    }  # fmt: skip


def streams(done: Pass, other: Pass) -> list[dict[str, float]]:
    """Return per norm how two forwards' residual streams differ."""
    pairs = zip(done.residual_LTH, other.residual_LTH, strict=True)
    return [difference(a, b) for a, b in pairs]


def local_rows(model: Model, trainer: Ops, engine: Ops, tokens_NS: Tensor) -> list[dict[str, Any]]:
    """Give both sides' operation the same arguments wherever the trainer's forward calls it."""
    rows: list[dict[str, Any]] = []

    def watch(op: str, place: str, layer: int, arguments: tuple, found: Any) -> None:
        row = {"op": op, "place": place, "layer": layer}
        rows.append(row | difference(engine[op](*arguments), found))

    forward(model, trainer, tokens_NS, watch)
    return rows


class Budget:
    """The parts of a results file, kept after each."""

    def __init__(self, out: Path, commit: str, about: dict[str, Any]) -> None:
        self.out, self.commit, self.content = out, commit, about
        self.begun = time.perf_counter()

    def add(self, part: str, name: str, measure: Callable[[], Any]) -> Any:
        """Keep what a measurement gives, or its error; say so in a line."""
        try:
            found = measure()
        except Exception as error:
            print(traceback.format_exc()[-3000:], flush=True)  # with folders, so not in the file
            text = without_folders(str(error))
            found = {"error": f"{type(error).__name__}: {text[-600:]}"}
        self.content.setdefault(part, {})[name] = found
        seconds = self.content["seconds"] = time.perf_counter() - self.begun
        record.keep(self.out, self.commit, **self.content)
        print(f"{seconds:6.1f} s  {part} {name}: {_said(found)}", flush=True)
        return found


def _said(found: Any) -> str:
    if not isinstance(found, dict):
        return f"{len(found)} rows"
    names = ("error", "kl", "k3", "mean_abs", "equal", "equal_logprobs", "relative")
    shown = {name: found[name] for name in names if name in found}
    return ", ".join(f"{n} {v:.3g}" if isinstance(v, float) else f"{n} {v}"
                     for n, v in shown.items()) or "kept"  # fmt: skip


def measure(budget: Budget, model: Model, trainer: Ops, engine: Ops, extras: dict[str, Ops],
            tokens_NS: Tensor, prompt: int, real: dict[str, Tensor]) -> None:  # fmt: skip
    """Fill the budget's parts.

    Args:
        budget: where they are kept.
        model: the checkpoint.
        trainer: its table.
        engine: its table, of the same operations.
        extras: tables that change the engine alone, by name.
        tokens_NS: what all read.
        prompt: how many of a sequence's tokens are not scored.
        real: logprobs `[N, S - prompt]` of real stacks, by name: `decode`, `prefill`, `megatron`.
    """

    def run(ops: Ops) -> tuple[Pass, Score]:
        done = forward(model, ops, tokens_NS)
        return done, Score(ops, done, tokens_NS, prompt)

    def against(part: str, name: str, ops: Ops, base: tuple[Pass, Score]) -> None:
        def work() -> dict[str, Any]:
            done, score = run(ops)
            to = {side: sampled(each.flatten(), score.sampled_R) for side, each in real.items()}
            return {**distance(score, base[1]), "to": to, "streams": streams(done, base[0])}

        budget.add(part, name, work)

    def beside(name: str, a_R: Tensor, b_R: Tensor) -> None:
        budget.add("real", name, lambda: sampled(a_R.flatten(), b_R.flatten()))

    names = [name for name in trainer if engine[name] is not no_quantize]
    base, whole = run(trainer), run(engine)
    against("controls", "the trainer again", trainer, base)
    against("controls", "the engine again", engine, whole)
    against("controls", "nothing replaced", trainer, whole)
    budget.add("local", "rows", lambda: local_rows(model, trainer, engine, tokens_NS))
    for n, name in enumerate(names):
        against("alone", name, {**trainer, name: engine[name]}, base)
        first = {each: engine[each] for each in names[: n + 1]}
        against("cumulative", name, {**trainer, **first}, whole)
        against("without", name, {**engine, name: trainer[name]}, whole)
    for name, extra in extras.items():
        against("engine alone", name, {**engine, **extra}, whole)
    for name, logprobs in real.items():
        beside(f"{name}, trainer's table", logprobs, base[1].sampled_R)
        beside(f"{name}, engine's table", logprobs, whole[1].sampled_R)
    for a, b in combinations(real, 2):
        beside(f"{a}, {b}", real[a], real[b])


def sample_tokens(model: Model, ops: Ops, N: int, S: int, prompt: int, seed: int) -> Tensor:
    """Return random prompts and answers `[N, S]`, drawn from the model, a forward a token.

    For a CPU, and where the real engine is not asked or has failed.
    """
    generator = torch.Generator().manual_seed(seed)
    device = model.embedding.device
    tokens = torch.randint(3, model.shape.vocab, (N, prompt), generator=generator).to(device)
    if N * S * S > 2**18:  # the rest at random: S forwards would take minutes
        rest = torch.randint(3, model.shape.vocab, (N, S - prompt), generator=generator)
        return torch.cat([tokens, rest.to(device)], 1)
    while (length := tokens.shape[1]) < S:
        last = forward(model, ops, tokens).logits_TV[length - 1 :: length].cpu()
        new = torch.multinomial(last.softmax(-1), 1, generator=generator).to(device)
        tokens = torch.cat([tokens, new], 1)
    return tokens


def run(options: argparse.Namespace) -> None:
    """Measure one model in one precision and write the file."""
    asked = ("precision", "engine", "align", "attention", "sequences", "tokens", "prompt",
             "device", "seed", "stacks", "in_torch", "env")  # fmt: skip
    about = {"model": options.model.name} | {name: getattr(options, name) for name in asked}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    budget = Budget(options.out, options.commit, {"asked": about})
    with tempfile.TemporaryDirectory() as folder:
        measure_all(budget, options, Path(folder))
    show(budget.content)


@torch.no_grad()
def measure_all(budget: Budget, options: argparse.Namespace, folder: Path) -> None:
    """Ask the stacks, find which kernels run, and fill the budget."""
    asked = {"none": (), "both": ("vllm", "megatron")}.get(options.stacks, (options.stacks,))
    seen: dict[str, dict[str, Tensor]] = {}

    def ask(side: str) -> None:
        if side in asked:
            budget.add("stacks", side, lambda: stacks.ask(side, options, folder))
            seen[side] = stacks.read(side, folder, options.device)

    shape = Shape.read(options.model)
    flash = options.attention == "flash"
    trainer, engine = dialects.tables(
        shape, options.precision, options.engine, options.align, flash
    )
    ask("vllm")
    model = load(options.model, options.device, options.precision != "bf16")
    budget.content["shape"] = vars(shape)
    extras: dict[str, Ops] = dict(dialects.EXTRAS)
    tokens = seen.get("vllm", {}).get("tokens")
    if tokens is None:
        arguments = (options.sequences, options.tokens, options.prompt, options.seed)
        tokens = sample_tokens(model, engine, *arguments)
    save_file({"tokens": tokens.cpu()}, folder / "tokens.safetensors")
    ask("megatron")
    if options.device == "cuda":
        os.environ |= stacks.environment(options)  # before vLLM and TransformerEngine are imported
        if flash:
            flash_for_te.lend(folder)
        from benchmarks.numerics import gpu_dialects

        trainer, engine, extras = gpu_dialects.working(
            budget.add, model, tokens, (trainer, engine, extras),
            gpu_dialects.kernels(shape, options), options.in_torch.split(","),
        )  # fmt: skip
    real = {name.removeprefix("logprobs."): each for side in seen.values()
            for name, each in side.items() if name.startswith("logprobs.")}  # fmt: skip
    measure(budget, model, trainer, engine, extras, tokens, options.prompt, real)
    for side, ops in (("vllm", engine), ("megatron", trainer)):
        if seen.get(side):
            budget.add("modules", side, lambda: by_module(model, ops, tokens, seen[side]))  # noqa: B023


def by_module(model: Model, ops: Ops, tokens_NS: Tensor, seen: dict[str, Tensor]) -> list[dict]:
    """Compare what a real stack's modules gave with the results of the table's operations."""
    rows: list[dict[str, Any]] = []

    def watch(op: str, place: str, layer: int, arguments: tuple, found: Any) -> None:
        real = seen.get(f"seen.{op}.{place}.{layer}")
        if real is not None:
            first = found[0] if isinstance(found, tuple) else found
            row = {"op": op, "place": place, "layer": layer}
            rows.append(row | difference(first.flatten(1), real))

    forward(model, ops, tokens_NS, watch)
    return rows


def show(content: dict[str, Any]) -> None:
    """Print a line an operation."""
    rows = [
        {"op": name} | {part: content.get(part, {}).get(name, {}).get("kl")
                        for part in ("alone", "cumulative", "without")}
        for name in content.get("alone", {})
    ]  # fmt: skip
    asked = content["asked"]
    record.show(f"{asked['model']} {asked['precision']} {asked['engine']}: KL", rows)


def draw(files: Iterable[Path], out: Path) -> None:
    """Draw, for each file, what each operation alone owns and what is left as they are replaced."""
    import json

    from matplotlib import pyplot as plt

    found = [json.loads(file.read_text()) for file in files]
    figure, axes = plt.subplots(len(found), 2, figsize=(9, 3.2 * len(found)), squeeze=False)
    for row, content in zip(axes, found, strict=True):
        nothing = content["controls"]["nothing replaced"]["kl"]
        for axis, part, title in (
            (row[0], "alone", "one operation of the engine's in the trainer"),
            (row[1], "cumulative", "left as they are replaced, from the top"),
        ):
            kept = {n: each["kl"] for n, each in content[part].items() if "kl" in each}
            names = list(kept)[::-1]
            axis.barh(names, [kept[name] for name in names], color="#4c72b0")
            axis.axvline(nothing, color="black", linewidth=0.8, linestyle=":")
            axis.set_xscale("symlog", linthresh=max(nothing, 1e-12) * 1e-4)
            axis.set_xlim(left=0)
            asked = content["asked"]
            axis.set_title(f"{asked['model']}, {asked['engine']}: {title}", fontsize=8)
            axis.set_xlabel("KL(engine || trainer) a token; dotted: nothing replaced", fontsize=7)
            axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(out)


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("run")
    record.add_options(one)
    one.add_argument("model", type=Path, help="a Hugging Face folder")
    one.add_argument("--precision", default="fp8-e2e", choices=("bf16", "fp8-linear", "fp8-e2e"))
    one.add_argument("--engine", default="eager", choices=dialects.ENGINES)
    text = "give the engine the trainer's RoPE, SiLU and quantizer"
    one.add_argument("--align", action="store_true", help=text)
    text = "of the trainer; auto is cuDNN on Hopper, flash FlashAttention 3"
    one.add_argument("--attention", default="auto", choices=("auto", "flash"), help=text)
    one.add_argument("--sequences", type=int, default=8)
    one.add_argument(
        "--tokens", type=int, default=352, help="a sequence; of all, a multiple of 128"
    )
    one.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    one.add_argument("--stacks", default="none", choices=("none", "vllm", "megatron", "both"))
    one.add_argument("--seed", type=int, default=0)
    text = "operations that torch does on a GPU too, where a kernel ends the process"
    one.add_argument("--in-torch", default="", help=text)
    one.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="of vLLM")
    other = verbs.add_parser("draw")
    other.add_argument("files", type=Path, nargs="+")
    other.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    if options.verb == "run":
        total = options.sequences * options.tokens
        if total % 128 or options.tokens % 16:
            parser.error(f"--sequences x --tokens: got {total}; a multiple of 128, and --tokens of "
                         "16 (pages of the KV cache)")  # fmt: skip
    return options


def main() -> None:
    """Measure, or draw what was measured."""
    options = parse(sys.argv[1:])
    if options.verb == "draw":
        draw(options.files, options.out)
    else:
        run(options)


if __name__ == "__main__":
    main()
