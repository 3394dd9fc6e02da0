"""The pages that people read: links, lengths, numbers, and commands that print what is shown."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections import defaultdict
from datetime import datetime
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean, median

import pytest

from benchmarks.speed import draw_decode, draw_steps
from fp8_nemo.correction.health import GROWTH, SIGNALS
from fp8_nemo.nemo.decode.attention import SPREAD
from fp8_nemo.nemo_config.host import MAIN
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.layout import choose
from fp8_nemo.plan.memory import HEADROOM, checkpoint_gib, host_gib, memory_per_gpu, node_gib
from fp8_nemo.plan.model import count
from fp8_nemo.plan.own.other_ways import EXACT, WORTH, precisions
from fp8_nemo.plan.speed import decode_of_engine
from fp8_nemo.plan.step_time import (
    LAUNCH_RING,
    Lengths,
    mean_context,
    step_seconds,
    usual_lengths,
)
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.options.precision import Precision
from recipes.plan import main as plan_line
from tests.forked import typed
from tests.plan.test_layout import CELLS, SHARED, SINGLE, counted_by_vllm, single, timed
from tests.plan.test_memory import gains_by_xqa

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CLUSTER = "docs/cluster.md"


def slug(heading):
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page):
    return {slug(line.lstrip("#")) for line in page.read_text().splitlines() if line[:1] == "#"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere_and_no_page_is_long(page):
    text, broken = page.read_text(), []
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []
    assert len(text.splitlines()) <= (150 if page.name == "README.md" else 250)


def test_the_pages_of_keys_is_the_codes_rendering():
    script = "import json, render_keys; print(json.dumps(render_keys.pages()))"
    command = [sys.executable, "-c", script]
    made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT / "docs")
    for name, text in json.loads(made.stdout).items():
        assert (ROOT / "docs" / name).read_text() == text


def of(file, pick):
    return pick(json.loads((RESULTS / f"{file}.json").read_text()))


def times(file, precision):
    return draw_steps.rows_of(f"{file}.json")[precision]["times_bf16"]


def speed(row):
    return row["tokens_per_second"]["median"]


def decode(file, precision, regime="resident"):
    """The ratios of a precision's decode to BF16's at the same batch and prompt, as a page says."""
    rows = [row for row in of(file, lambda it: it["rows"]) if row["regime"] == regime]
    bf16 = {(r["batch"], r["prompt"]): speed(r) for r in rows if r["precision"] == "bf16"}
    mine = {(r["batch"], r["prompt"]): speed(r) for r in rows if r["precision"] == precision}
    ratios = sorted(mine[point] / bf16[point] for point in mine.keys() & bf16.keys())
    texts = dict.fromkeys(f"{ratio:.2f}" for ratio in (ratios[0], ratios[-1]))
    return " to ".join(texts)


def again(study, cell, model="tiny-llama"):
    """Late accuracy of an earlier study, judged again: its row's estimate."""
    rows = of("judged-again", lambda it: it["rows"])
    key = (study, cell, model)
    row = next(r for r in rows if (r["study"], r["cell"], r["model"]) == key)
    return row["late accuracy"]


def told(study, cell, model="tiny-llama"):
    """As a page tells it: `-3.1 (-7.9 to +1.6), open`, without the word where it is decided."""
    found = again(study, cell, model)
    text = "{difference:+.1f} ({low:+.1f} to {high:+.1f})".format_map(found)
    return text + (", open" if found["verdict"] == "open" else "")


def decided_row(study, cell, model="tiny-llama"):
    """A cell's learning and serving in a study with a rule, as its page's table begins a row."""
    rows = of(f"study-{study}", lambda it: it["rows"][model])
    row = next(row for row in rows if row["cell"] == cell)
    text = "{difference:+.1f} ({low:+.1f} to {high:+.1f})".format_map
    precision, _, correction = cell.rpartition("-")
    return f"| `{precision}` `{correction}` | {text(row['learning'])} | {text(row['serving'])} |"


def aligned_row(gpu, precision, align):
    """A row of mismatch.md's table of runs inside NeMo RL."""
    runs = of(f"nemo-align-{gpu.lower()}", lambda it: it["runs"])
    wanted = {"precision.name": precision, "precision.align": align}
    (run,) = (run for run in runs if wanted.items() <= run["settings"].items())
    kl, answer = (
        fmean(row[key] for row in run["rows"] if row["step"])
        for key in ("mismatch/kl", "mismatch/answer_kl")
    )
    kl = f"{kl:.1e}".replace("e-0", "e-")
    cells = gpu, f"`{precision}`", f"`{align}`", len(run["rows"]), kl, f"{answer:.3f}"
    cells = cells[1:] if gpu.startswith("8b8") else cells  # the only machine of its table
    return f"| {' | '.join(map(str, cells))} |"


def exact_row(file, precision, align, seed=42):
    """A row of mismatch.md's tables of exact runs inside NeMo RL."""
    (run,) = exact_runs(file, precision, align, seed)
    means = (
        fmean(row[key] for row in run["rows"] if row["step"])
        for key in ("mismatch/kl", "mismatch/answer_kl")
    )
    cells = f"`{precision}`", f"`{align}`", seed, len(run["rows"]), *(f"{x:.1e}" for x in means)
    return f"| {' | '.join(map(str, cells))} |"


def exact_runs(file, precision, align, *seeds):
    """The runs of a precision in one of these files, of some seeds or of all."""
    wanted = {"precision.name": precision, "precision.align": align}
    return [
        run
        for run in of(file, lambda it: it["runs"])
        if wanted.items() <= run["settings"].items() and run["seed"] in (seeds or (run["seed"],))
    ]


def exact_summary(precision, align):
    """A row of precision.md's table: the mean KL over seeds, the largest log ratio."""
    runs = exact_runs("nemo-exact-h100", precision, align)
    rows = [[row for row in run["rows"] if row["step"]] for run in runs]
    kl = fmean(fmean(row["mismatch/kl"] for row in each) for each in rows)
    most = max(row["mismatch/abs_log_ratio_max"] for each in rows for row in each)
    return f"| `{precision}` | `{align}` | {kl:.1e} | {most:.1e} |"


def exact_step(precision, align, step):
    """A row of mismatch.md's table of all of 8B."""
    row = exact_step_row(precision, align, step)
    numbers = (f"{row[f'mismatch/{key}']:.1e}" for key in ("kl", "abs_log_ratio_max"))
    return f"| `{precision}` | `{align}` | {step} | {' | '.join(numbers)} |"


def exact_step_row(precision, align, step):
    """The metrics of a step of all of 8B, by its number from 1 on."""
    (run,) = exact_runs("nemo-exact-8b-2-h200", precision, align)
    (row,) = [row for row in run["rows"] if row["step"] == step]
    return row


def exact_steps_of_2k():
    """The largest KL of five steps of all of 8B in which no answer differed, and BF16's."""
    cells = (E2E, "exact"), ("bf16", "none")
    ours, plain = (
        [row for (run,) in [exact_runs("nemo-exact-8b-2k-2-h200", *cell)] for row in run["rows"]]
        for cell in cells
    )
    assert len(ours) == len(plain) == 5
    assert {row["mismatch/differing_answers"] for row in ours} == {0}
    return [
        f"{max(row['mismatch/kl'] for row in rows):.1e}".replace("e-0", "e-")
        for rows in (ours, plain)
    ]


def exact_phases(name):
    """speed.md's gains of `exact` on two H200s by phase, and seconds measured and planned."""
    plain, ours = real(name).values()
    gains = (f"{ours['times_bf16'][phase]:.2f}" for phase in ("rollout", "logprob", "train"))
    by_phase = "rollout {}, logprobs {}, training {} times".format(*gains)
    planned = [f"{row['plan']['step']:.1f}" for row in (ours, plain)]
    took = f"took {ours['step']:.1f} s a step, BF16 {plain['step']:.1f}"
    return took, by_phase, f"The plan says {' and '.join(planned)}."


def heads_of_64(precision):
    """mismatch.md's mean KL of small-llama by seed."""
    runs = exact_runs("nemo-align-heads-of-64-h200", precision, "cheap")
    means = (
        f"{fmean(row['mismatch/kl'] for row in run['rows'] if row['step']):.1e} ({run['seed']})"
        for run in sorted(runs, key=lambda run: run["seed"])
    )
    return f"`{precision}` {', '.join(means)}"


def short_answers(name, micro_batches):
    """A row of mismatch.md's table of lone short answers."""
    runs = of("nemo-short-answers-h200", lambda it: {r["name"]: r["rows"] for r in it["runs"]})
    (share,) = {row["mismatch/differing_answers"] for row in runs[f"short-{name}"]}
    kl = max(row["mismatch/kl"] for row in runs[f"short-{name}"])
    differ = f"{57 * share:.0f} of 57"
    return f"| {micro_batches} | {len(runs[f'short-{name}'])} | {differ} | {kl:.1e} |"


def unequal_rows():
    """At which numbers of rows products of a linear differ, of the trainer and in BF16."""
    bench = of("product-rows-h200", lambda it: it)
    found = {
        side: {name: rows for name, each in bench["linears"].items() if (rows := each[side])}
        for side in ("trainer", "engine", "bf16")
    }
    assert not found["engine"] and len(bench["linears"]) == 7 and len(found["bf16"]) == 2
    ((name, rows),) = found["trainer"].items()
    assert name == "llama31-8b, 4096 x 14336"
    *few, most = rows
    assert few == [n for n in bench["rows"] if 2 <= n <= 256]
    attention, last = (
        found["bf16"][f"llama31-8b, {size}"] for size in ("4096 x 4096", "4096 x 14336")
    )
    return (
        f"has other bits than the engine's with 2 to {few[-1]} rows, and with {most}.",
        f"Of {len(bench['rows'])} numbers up to {max(bench['rows']):,} no other differs.",
        f"attention's output differs at {len(attention)}, the largest {attention[-1]}, and the "
        f"MLP's last at {len(last)}, the largest {last[-1]};",
    )


def exact_learns():
    """Rewards of steps 15 to 24 in `exact` and BF16, of their first, the largest KL of `exact`."""
    runs = of("nemo-exact-learns-h200", lambda it: {r["name"]: r["rows"] for r in it["runs"]})
    exact, plain = runs["learn-exact"], runs["learn-bf16"]
    assert len(exact) == 30 and not any(row["mismatch/differing_answers"] for row in exact)
    parts = (rows[part] for part in (slice(14, 24), slice(1)) for rows in (exact, plain))
    rewards = (f"{fmean(row['reward/mean'] for row in rows):.2f}" for rows in parts)
    return *rewards, f"{max(row['mismatch/kl'] for row in exact):.1e}"


def exact_decode_in(text):
    """Fill in how long a decode step takes with `exact`, over without, BF16, and BF16's over it."""
    took = defaultdict(list)
    for start in of("decode-exact-h200", lambda it: it["starts"]):
        engine = start["asked"]["align"] or start["asked"]["precision"]
        for row in start["rows"]:
            took[engine, row["batch"]].append(row["wall_ms"])
    mean = {key: fmean(each) for key, each in took.items()}
    assert {len(each) for each in took.values()} == {2}
    without = [mean["exact", n] / mean["fp8-linear-deepgemm", n] for n in (256, 8, 1)]
    plain = [mean["bf16", n] / mean["exact", n] for n in (256, 8, 1)]
    return text.format(*(f"{times:.2f}" for times in (*without, 1 / plain[-1], *plain)))


def exact_attention():
    """How much longer the kernels of attention take in a layer's training."""
    rows = of("bench-train-8b-exact-h100", lambda it: it["rows"])
    took = {
        (row["variant"], row["tokens"], row["recompute"]): row["kernels"]["attention"]
        for row in rows
        if row["part"] == "stack" and row["microbatch"] == "cached"
    }
    longer = [took["fp8-exact", *case] / took["fp8", *case] for case in
              ((tokens, again) for tokens in (8192, 4096) for again in (False, True))]  # fmt: skip
    return f"{min(longer):.2f} to {max(longer):.2f} times as long"


def exact_decode():
    """What a decode step takes with and without `exact`."""
    runs = of("decode-exact-h100", lambda it: it["runs"])
    took = {run["align"]: run["rows"][0]["step_ms"]["median"] for run in runs}
    return f"{took['exact']:.2f}", f"{took[None]:.2f}"


def experts_lost():
    """What README says that a mixture of experts learned less, and served worse."""
    linear, cache = of("study-113m-moe", lambda it: it["rows"][MOE])
    lost = [f"{-row['learning']['difference']:.1f}" for row in (linear, cache)]
    assert all(row["verdict"] == "equivalent" for row in (linear, cache))
    return (
        f"| `fp8-linear`, no correction; `fp8-kv-attn`, `tis` | [{lost[0]} and {lost[1]} points "
        "less](docs/research/experiment.md"
        "#experts-of-80m-parameters-answers-of-340-tokens-2026-11-26), both equivalent within 3 |"
    )


def experts_served():
    """What README says that an FP8 cache costs in serving, of the larger models."""
    _, experts = of("study-113m-moe", lambda it: it["rows"][MOE])
    *_, plain, tis = of("study-113m", lambda it: it["rows"][LLAMA])
    experts, *dense = (f"{-each['serving']['difference']:.1f}" for each in (experts, plain, tis))
    assert len({*dense}) == 1
    return f"points worse at 2.4M, {experts} at 80M, {dense[0]} at 113M."


def widest(study, model):
    """The whole points within which every interval of a study's learning lies."""
    rows = of(f"study-{study}", lambda it: it["rows"][model])
    return math.ceil(max(abs(row["learning"][end]) for row in rows for end in ("low", "high")))


def told_row(study, cells):
    """A row of precision.md's stress tests: its last three columns."""
    model = MOE if study == "moe" else "tiny-llama"
    return f"| {' | '.join(told(study, cell, model) for cell in cells)} |"


def losses():
    """The smallest and the largest loss of an FP8 cache that a stress test shows for certain."""
    found = [again(study, f"{KV}-{cell}") for study in (TINY, WORKING) for cell in ("none", "tis")]
    certain = [-each["difference"] for each in found if each["verdict"] == "loses"]
    return f"{min(certain):.0f} to {max(certain):.0f} points"


def disk(option):
    """Gigabytes of three checkpoints, up to the next 50: weights, FP32 masters, two moments."""
    shape = compose([f"model={option}"])[0].model.shape
    return 50 * math.ceil(3 * (2 + 3 * 4) * count(shape, Precision()).parameters / 50e9)


def late_kl(cell):
    rows = of(STUDY, lambda it: it["rows"])
    return next(row["kl"]["mean"] for row in rows if row["cell"] == f"small-llama/{cell}")


def ranges():
    """Share of the logprob pass that watching and reading the ranges of Q, K and V takes."""
    found = of("glue-8b-ranges-h200", lambda it: it["ranges"])
    return found["overhead"] / found["median"]["plain"]


def served(precision):
    pairs = of("served-checkpoint-h200", lambda it: it["pairs"])
    return pairs[precision]["vLLM, local of the same precision"]["mismatch/kl"]


@cache
def planned(gpu, tokens, gpus=8, model="llama31-8b"):
    """Times as fast as BF16 that the plan estimates a step, by precision."""
    [plan] = compose_plans([
        f"model={model}", f"cluster.gpu={gpu}", f"grpo.max_new_tokens={tokens}",
        f"cluster.gpus_per_node={gpus}",
    ])  # fmt: skip
    said = dict(precisions(plan, MAIN))["precisions"]
    return dict(re.findall(r"(fp\S+(?: \S+=\S+)?) ([\d.]+)x", said))


def short_on_h100():
    """README's row of 8 H100 and short answers, where FP8 is not worth its risk."""
    gains = planned("h100", 2048)
    assert max(float(gains[name]) for name in (LINEAR, KV, E2E)) < WORTH
    return f"| `bf16` | `{KV}` {gains[KV]}x, `{E2E}` {gains[E2E]}x |"


def on_h100(precision, *limits):
    """README's gains on 8 H100: `4k 1.16x, 8k 1.25x`."""
    gains = [(tokens, planned("h100", tokens)[precision]) for tokens in limits or LONGER]
    return ", ".join(f"{tokens // 1024}k {gain}x" for tokens, gain in gains)


def long_on_h100():
    """README's row of 8 H100 and longer answers, where FP8 in vLLM alone is worth its risk."""
    gains = [planned("h100", tokens) for tokens in LONGER]
    assert all(float(each[KV]) >= WORTH for each in gains)
    assert all(float(each[name]) < WORTH for each in gains for name in (LINEAR, E2E))
    return f"| 8B, 8 H100, longer: 4k is at the edge | `{KV}` | {on_h100(KV)} |"


def beside(name, phase):
    """A row of docs/speed.md: BF16 and FP8 on four H100s, planned too, and NeMo RL's own recipe."""
    theirs = draw_steps.rows_of("real-steps-8b-4-h100.json")[draw_steps.STOCK]
    return f"{real_row(name, phase, 2 if phase == 'refit' else 1, H100S)} {theirs[phase]:.1f} s |"


def beside_rest(name, seconds):
    """The same without a plan, which does not count it."""
    plain, ours, theirs = (f"{each:.1f} s" for each in seconds)
    return f"| {name} | {plain} | | {ours} | | {theirs} |"


def between_phases():
    """Seconds of each step between its phases: ours in BF16 and FP8, and NeMo RL's."""
    return [row["rest"] for row in draw_steps.rows_of("real-steps-8b-4-h100.json").values()]


def before_training():
    """Seconds of each training phase before the GPUs began, medians from the second step on."""
    found = []
    for name in ("bf16", KV, "NeMo RL's"):
        ends = {"driver": {}, "megatron_policy": {}}  # both end in the same second
        for run, process, timer, seconds, ended in of("device-8b-4-h100", lambda it: it["timers"]):
            if run == name and timer in ("policy_training", "train"):
                ends[process][ended[:8]] = seconds
        trained = ends["megatron_policy"]
        waits = [phase - trained[at] for at, phase in ends["driver"].items() if at in trained]
        assert len(waits) == (3 if name == "bf16" else 2)
        found.append(median(waits[1:]))
    return found


def after_four_threads():
    """speed.md's seconds of a training phase before the GPUs began, since the driver has four."""
    timers = of("nemo-exact-8b-2-h200", lambda it: it["timers"])
    ends = [
        {(run, ended): seconds for run, process, timer, seconds, ended in timers if timer == each}
        for each in ("policy_training", "train")
    ]
    phases, trained = ends
    waits = [f"{phases[at] - trained[at]:.1f}" for at in phases]
    assert len(waits) == 6 and len({*waits}) == 1
    return f"had {waits[0]} s of each training phase"


def cut_step(name):
    """Seconds of a run's last step, which was cut off in training, with the training before it.

    Its phases alone, without the moments between them and, in ours, our metrics.
    """
    rows = of("device-8b-4-h100", lambda it: it["timers"])
    last = {(process, timer): seconds for run, process, timer, seconds, _ in rows if run == name}
    phases = (
        "prepare_for_generation/total",
        "generation",
        "logprob_inference_prep",
        "policy_and_reference_logprobs",
        "training_prep",
        "policy_training/sharding_data",
    )
    return sum(last["driver", each] for each in phases) + last["megatron_policy", "train"]


def moved():
    """Seconds that two steps of NeMo RL's recipe took longer than ours to bring weights to vLLM and
    to get ready for training: the optimizer's way to the host and back."""
    rows = of("device-8b-4-h100", lambda it: it["timers"])
    found = []
    for step in (1, 2):
        seconds = {
            run: sum(
                [each[3] for each in rows if each[0] == run and each[2] == timer][step]
                for timer in ("prepare_for_generation/total", "training_prep")
            )
            for run in (KV, "NeMo RL's")
        }
        found.append(seconds["NeMo RL's"] - seconds[KV])
    return found


def stock_on_eight():
    """What plans say of 8 H100: seconds of stock's optimizer, and how much ours gains over it."""
    gains, optimizer = [], 0.0
    for tokens in (2048, 4096):
        line = ("model=llama31-8b", "backend=nemo", f"grpo.max_new_tokens={tokens}")
        stock = ("precision=fp8-linear", "glue=stock", "model.memory.optimizer=move")
        [theirs], [ours] = (compose_plans([*line, *words], lambda _: MAIN)
                            for words in (stock, (f"precision={KV}",)))  # fmt: skip
        optimizer = step_seconds(theirs.settled).optimizer
        gains.append(step_seconds(theirs.settled).total / step_seconds(ours.settled).total)
    return (
        f"one pace for a node, {optimizer:.0f} s here. By them ours would be {gains[0]:.2f} times "
        f"as fast at 2k, {gains[1]:.2f} at 4k,"
    )


def beside_theirs():
    """README's step of ours on four H100s, and of NeMo RL's own recipe."""
    plain, ours, theirs = (
        f"{row['step']:.0f} s" for row in draw_steps.rows_of("real-steps-8b-4-h100.json").values()
    )
    return f"took {ours} with our `{KV}`, {plain} with our `bf16`, and [{theirs} with theirs]"


def beside_eight():
    """The same of 8 layers of 8B on one H100, with FP8 training: docs/speed.md."""
    ours, theirs = draw_steps.rows_of("real-steps-8b8-stock-h100.json").values()
    return f"{ours['step']:.1f} s with `{BOTH}`, {theirs['step']:.1f} s with NeMo RL's own"


def eight_layers():
    """How many times as fast as BF16 8 of 8B's layers were in FP8, and are to be by the plan."""
    took, said = [], []
    for name in ("8b8-bf16", "8b8-stock"):
        row, settled = single(name)
        took.append(row["step"])
        said.append(step_seconds(settled, Lengths(17, row["answer"])).total)
    return took[0] / took[1], said[0] / said[1]


def on_h200(precision):
    """Times as fast as BF16 that the plan estimates 8B on two to eight H200, from case to case."""
    cases = [(tokens, gpus) for tokens in (2048, 4096, 8192) for gpus in (2, 4, 8)]
    if precision == EXACT:  # which on fewer gains too little at 8k
        cases = [case for case in cases if case not in ((8192, 2), (8192, 4))]
    gains = [float(planned("h200", *case)[precision]) for case in cases]
    return f"{min(gains):.2f}x to {max(gains):.2f}x"


@cache
def sweep_hours(*words):
    """Hours of a node of 8 H100 that the plan's seconds a step make of a sweep."""
    plans = compose_plans(["-m", "cluster.gpu=h100", *words])
    steps = [plan.settled.recipe.grpo.steps for plan in plans]
    assert {*steps} == {500}
    seconds = (step_seconds(plan.settled).total for plan in plans)
    hours = sum(each * count for each, count in zip(seconds, steps, strict=True)) / 3600
    return f"{hours:.0f} hours"


def swept():
    """docs/cluster.md's sweep, and what it takes."""
    [line] = re.findall(r"recipes.grpo -m (.+) cluster=mysite", (ROOT / CLUSTER).read_text())
    return f"500 steps take {sweep_hours(*line.split())} of a"


def node_hours():
    """What README's first line takes by the plan, and BF16, both in tensor parallel 2."""
    page = (ROOT / "README.md").read_text()
    [line] = re.findall(r"recipes.plan (.*correction=tis.*max_new_tokens=8192)$", page, re.M)
    lines = [line.split(), line.replace(KV, "bf16").split()]
    assert {compose_plans(each)[0].settled.layout.tensor for each in lines} == {2}
    hours, plain = (sweep_hours(*each).split()[0] for each in lines)
    longer = [
        row["step"] / step_seconds(settled, Lengths(17, row["answer"])).total - 1
        for row, settled in timed(H100S)
    ]
    return (
        f"500 steps take by estimate {hours} hours in `{KV}`, {plain} in `bf16`; on four H100s "
        f"steps took {100 * longer[0]:.0f} to {longer[1]:.0%} longer than planned."
    )


def erring_as_on_four_h100s():
    """What README makes of the plan's error in the one gain of all of 8B on H100."""
    off = real(H100S)[KV]["times_bf16"]["step"] / planned_gain(H100S)
    gains = [off * float(planned("h100", longest)[KV]) for longest in (8192, 4096)]
    return "If eight fall as short, 8k gains {:.2f} and 4k {:.2f}.".format(*gains)


def half_the_layers():
    """How near the plan's gains of half of 8B's layers are, on which nothing was fitted."""
    off = [
        row["times_bf16"]["step"] * row["plan"]["step"] / plain["plan"]["step"] - 1
        for name in (HALF_8K, HALF_E2E)
        for plain, *others in [real(name).values()]
        for row in others
    ]
    assert len(off) == 3
    return f"Three later gains, of half the layers, came out within {max(map(abs, off)):.0%}."


def pays_from():
    """How many FP8 runs save the time of a BF16 run, as README says it."""
    gain = float(planned("h100", 8192)[KV])
    assert round(gain / (gain - 1), 1) == 5.2
    return "a BF16 run after about five FP8 runs, at 8k on 8 H100, by estimate."


def estimated_on_h100():
    """What README says first of 8 H100."""
    short, long = (planned("h100", tokens)[KV] for tokens in (4096, 8192))
    return f"to gain {long} times at 8k, {short} at 4k. Timed only"


def planned_gain(pair):
    """Times as fast as BF16 that the plan says of a pair's own lengths."""
    plain, *_, quantized = (row["plan"]["step"] for row in real(pair).values())
    return plain / quantized


def fp16_on_h100():
    """The smallest and the largest that the plan says of 8B in FP16 on 8 H100, up to 8k."""
    gains = [planned("h100", tokens)["fp16"] for tokens in (2048, 4096, 8192)]
    return min(gains), max(gains)


def kv_on_four():
    """Times as fast as BF16 that `fp8-kv-attn` was on four H200, by its rollout, and all in all."""
    plain, kv, _ = real(FOUR).values()
    by_rollout = plain["step"] / (plain["step"] - plain["rollout"] + kv["rollout"])
    return f"{by_rollout:.2f} to {plain['step'] / kv['step']:.2f}"


def step_gain(name, precision=-1):
    """How many times as fast as BF16 a step of a pair was, as a table has it: 1.30x."""
    return real_gain("step", name, precision).replace(" times", "x")


def whole_steps():
    """README's measurements of 8B on H200, with an FP8 cache."""
    return (
        f"[whole steps](docs/speed.md#what-a-step-gained) of 3,900 tokens: {step_gain(FOUR)} on "
        f"four, {step_gain(TWO)} on two; of 7,500, half the layers on one: "
        f"{step_gain(HALF_E2E, 1)}; in an old layout {step_gain(XQA_8K)} |"
    )


def whole_exact_steps():
    """README's measurements of 8B with `exact` on H200."""
    return (
        f"[whole steps](docs/speed.md#what-a-step-gained) on two: {step_gain(ALIKE)} with 3,900 "
        f"tokens, {step_gain(ALIKE_2K)} with 2,000; half the layers on one: "
        f"{step_gain(HALF_E2E)} with 7,500 |"
    )


def planned_lora():
    """Times as fast as BF16 that README's line of one H100 is to be, by the plan."""
    [line] = re.findall(r"recipes.grpo (.*lora=.*)", (ROOT / "README.md").read_text())
    [plan] = compose_plans(line.split())
    said = dict(precisions(plan, MAIN))["precisions"]
    return dict(re.findall(r"(\S+) ([\d.]+)x", said))[KV]


def planned_row(precision):
    """A row of docs/speed.md: 8B on two kinds of GPU, at two lengths."""
    cells = [(gpu, tokens) for gpu in ("h100", "h200") for tokens in (2048, 8192)]
    return f"| `{precision}` | {' | '.join(planned(*cell)[precision] for cell in cells)} |"


def long_row(model, said, tokens, gpu):
    """A row of docs/recipes.md: long answers on 8 GPUs, and how BF16's step compares."""

    def cell(precision):
        words = f"model={model}", f"precision={precision}", f"cluster.gpu={gpu}"
        [plan] = compose_plans([*words, f"grpo.max_new_tokens={tokens}"])
        memory = memory_per_gpu(plan.settled)
        fits = memory.headroom(memory.worst) >= HEADROOM
        return plan.settled.layout, step_seconds(plan.settled).total if fits else math.inf

    (layout, kv), (_, both) = (cell(each) for each in (KV, BOTH))
    [bf16] = compose_plans([f"model={model}", "precision=bf16", f"cluster.gpu={gpu}",
                            f"grpo.max_new_tokens={tokens}"])  # fmt: skip
    plain = min(each.seconds.total for each in choose(bf16.settled, MAIN))
    keeps = "recompute" if layout.recompute else "no recompute"
    gains = (f"{plain / each:.2f}x" if each < math.inf else "does not fit" for each in (kv, both))
    return (
        f"| {said}, {tokens // 1024}k | {gpu.upper()} | TP {layout.tensor}, CP {layout.context}, "
        f"{keeps} | {plain:.0f} s | {' | '.join(gains)} |"
    )


LONG_ROWS = [
    (model, said, tokens, gpu)
    for model, said, lengths in (
        ("llama31-8b", "8B", (16384, 32768)),
        ("qwen3-30b-a3b", "30B-A3B", (16384,)),
    )
    for tokens in lengths
    for gpu in ("h100", "h200")
]


def lora_of_8b():
    """GiB of a checkpoint and of frozen weights beside the engine, where one H100 is enough."""
    words = "model=llama31-8b", "precision=fp8-linear", "lora=all-linear", "cluster.gpus_per_node=1"
    [plan] = compose_plans(words)
    memory = memory_per_gpu(plan.settled)
    assert memory.headroom(memory.worst) >= HEADROOM
    stays = memory.phases["rollout"]["frozen weights"] / 2**30
    return (
        f"a checkpoint weighs\n  {checkpoint_gib(plan.settled):.0f} GiB. NeMo RL moves no frozen "
        f"weight to the host: {stays:.0f} GiB of 8B"
    )


def minutes(target):
    rows = of("times-cpu", lambda it: it["rows"])
    return round(next(row["seconds"] for row in rows if row["target"] == target) / 60)


def rollout_share(pair):
    """How much of BF16's whole step in a pair inside NeMo RL was its rollout."""
    row = real(pair)["bf16"]
    return f"{row['rollout'] / row['step']:.0%}"


def layers_at_tensor_2(row):
    return (row["variant"], row["part"], row["microbatch"], row["recompute"]) == (
        "fp8", "stack", "cached", False)  # fmt: skip


def slower_at_tensor_2():
    rows = of("bench-train-8b-tp2-h200", lambda it: it["rows"])
    return f"{1 / next(row['speedup'] for row in rows if layers_at_tensor_2(row)):.2f}"


def studied(precision, correction):
    """A row of the corrections' study: accuracy at both learning rates."""
    cell = f"tiny-llama/{precision}-{correction}"
    found = [row["accuracy"] for row in of("correction-study-cpu", lambda it: it["rows"])
             if row["cell"] == cell]  # fmt: skip
    texts = [f"{100 * each['mean']:.1f} +- {100 * each['half']:.1f}" for each in found]
    return f"| `{precision}` `{correction}` | {' | '.join(texts)} |"


def predicted(mask):
    """A row of the corrections' predictions beside what was rejected later."""
    rows = [
        row for row in of("predicted-rejects-cpu", lambda it: it["rows"]) if row["mask"] == mask
    ]
    texts = [
        f"{100 * row['predicted']:.1f}% | {100 * row['real']:.1f} +- {100 * row['interval']:.1f}%"
        for row in rows
    ]
    return f"| `{mask}` | {' | '.join(texts)} |"


def bounds(signal):
    """A row of correction.md's health."""
    word = "above" if signal.unstable > signal.watch else "below"
    last = f"{word} {signal.unstable:g} " if 0 <= signal.unstable <= 1 or signal.watch > 1 else ""
    return f"| `{signal.key}` | {word} {signal.watch:g} | {last}|"


FOUR, TWO, ADAPTERS, H100S = "8b-4-h200", "8b-2-h200", "8b-lora-h100", "8b-4-h100"
ALIKE, ALIKE_2K, XQA_2K = "8b-exact-2-h200", "8b-exact-2k-2-h200", "8b-xqa-2k-2-h200"
STOCK_2K, XQA_8K = "8b-stock-2k-2-h200", "8b-8k-2-h200"
HALF_8K, HALF_E2E, ADAPTED = "8b16-8k-h200", "8b16-8k-e2e-h200", "30b16-8k-h200"
PAIRS = (FOUR, TWO, ALIKE, ALIKE_2K, XQA_2K, XQA_8K, ADAPTERS, H100S)


@cache
def real(name):
    """The rows of a pair inside NeMo RL by precision, with what a plan says of each now."""
    found = {}
    for row, settled in timed(name):
        said = step_seconds(settled, Lengths(17, row["answer"]))
        found[row["precision"]] = row | {"plan": said._asdict() | {"step": said.total}}
    return found


def real_row(name, phase, digits, pair):
    """A phase of a pair inside NeMo RL, measured and planned, BF16 and FP8."""
    numbers = [row[part] if part else row for row in real(pair).values() for part in (None, "plan")]
    texts = [f"{each[phase]:.{digits}f} s" for each in numbers]
    return f"| {name} | {' | '.join(texts)} |"


GPUS_OF = {
    FOUR: "four H200s", TWO: "two H200s", ALIKE: "two H200s", ALIKE_2K: "two H200s",
    XQA_2K: "two H200s", XQA_8K: "two H200s", ADAPTERS: "one H100, LoRA", H100S: "four H100s",
    HALF_8K: "one H200, 16 of 32 layers", HALF_E2E: "one H200, 16 of 32 layers",
    ADAPTED: "one H200, Qwen3-30B-A3B, 16 of 48 layers, LoRA of attention",
}  # fmt: skip


def pair_rows():
    """The rows of docs/speed.md's first table: steps in BF16 and FP8 on one machine."""
    rows = []
    for name, gpus in GPUS_OF.items():
        plain, *quantized = real(name).values()
        for row in quantized:
            words = f"`{EXACT if row['precision'] == E2E else row['precision']}`"
            words += f", context parallel {row['layout']['context']}" * (
                row["layout"]["context"] > 1
            )
            link = f"[{row['step']:.1f} s](../benchmarks/results/real-steps-{name}.json)"
            planned_step = plain["plan"]["step"] / row["plan"]["step"]
            rows.append(
                f"| {gpus} | {round(row['answer'], -1):,.0f} | {words} | {plain['step']:.1f} s "
                f"| {link} | {row['times_bf16']['step']:.2f}x | {planned_step:.2f}x |"
            )
    return rows


def real_gain(phase, pair=FOUR, precision=-1):
    """How many times as fast as BF16 a phase of a pair was."""
    row = [*real(pair).values()][precision]
    return f"{row['times_bf16'][phase]:.2f} times"


def trust_row(file, row, settled):
    """A row of docs/speed.md: what a plan says of a run's phases over what they took."""
    said = step_seconds(settled, Lengths(17, row["answer"]))
    phases = said._asdict() | {"step": said.total}
    ratios = (f"{phases[each] / row[each]:.2f}" for each in ("rollout", "logprob", "train", "step"))
    seconds = f"[{row['step']:.1f} s](../../benchmarks/results/real-steps-{file}.json)"
    return f"| `{row['precision']}` | {' | '.join(ratios)} | {seconds} |"


@cache
def trust_rows():
    """All of them, but for their first column: runs inside NeMo RL that passed their first step."""
    several = [(name, *pair) for name in CELLS for pair in timed(name)]
    alone = [(f"{name}-h100", *single(name)) for name in SINGLE | SHARED]
    return [trust_row(*each) for each in several + alone]


def step_errors():
    """speed.md's error of the plan's seconds, of the same runs."""
    off = {
        (name, row["precision"]):
            1 - step_seconds(settled, Lengths(17, row["answer"])).total / row["step"]
        for name in (*PAIRS, STOCK_2K)
        for row, settled in timed(name)
    }  # fmt: skip
    assert max(off, key=off.__getitem__) == (H100S, KV)
    return f"a step {max(off.values()):.0%} too short to {-min(off.values()):.0%} too long"


def spread_of(numbers):
    """The least and the largest: `1.05 to 1.26`."""
    held = list(numbers)
    return f"{min(held):.2f} to {max(held):.2f}"


@cache
def gain_errors():
    """How far the plan's gains of whole models over BF16 are off, of all pairs of runs."""
    off = []
    for name in PAIRS:
        plain, *others = [
            (row["step"], step_seconds(settled, Lengths(17, row["answer"])).total)
            for row, settled in timed(name)
        ]
        off += [plain[1] / said / (plain[0] / took) - 1 for took, said in others]
    assert len(off) == 9
    return f"{-min(off):.0%} too small to {max(off):.0%} too large"


def missing_rows(rows, page):
    """Nothing, which every page says, if it has all of the rows; else what it should have."""
    text = (ROOT / page).read_text()
    return "\n".join(row for row in rows if row not in text)


def kl_cells(shares, *kls):
    """A page's last cells of a row on replay: ` 57% | 1.85e-2 | 2.82e-3 |`."""
    shown = (f"{kl:.2e}".replace("e-0", "e-") for kl in kls)
    return f" {shares} | {' | '.join(shown)} |"


def replayed(experts):
    """What replay did to a taught model of so many experts, its tokens scored twice."""
    rows = of("replayed-routes-cpu", lambda it: it["rows"])
    [row] = (
        each
        for each in rows
        if each["experts"] == experts and each["taught_steps"] and each["precision"] == LINEAR
    )
    return kl_cells(f"{row['rerouted']:.1%}", row["kl"], row["replayed_kl"])


def replayed_30b():
    """The same of three layers of Qwen3-30B-A3B inside NeMo RL, from step to step."""
    none, r3 = (
        [row for run in of("replay-30b3-h100", lambda it: it["runs"]) for row in run["rows"]
         if run["cell"].startswith("qwen3") and run["settings"]["replay.name"] == name]
        for name in ("none", "r3")
    )  # fmt: skip
    rerouted = fmean(row["replay/rerouted_fraction"] for row in r3)
    kls = (fmean(row["mismatch/kl"] for row in rows) for rows in (none, r3))
    return kl_cells(f"{rerouted:.0%}", *kls)


REAL_ROWS = (("rollout", "rollout", 1), ("logprobs", "logprob", 1), ("training", "train", 1),
             ("refit", "refit", 2), ("**step**", "step", 1))  # fmt: skip
SHORT, AGAIN, LONG = "step-8b-h200", "step-8b-again-h200", "step-8b-long-h200"
LINEAR, E2E, KV, BOTH = "fp8-linear", "fp8-e2e", "fp8-kv-attn", "fp8-e2e-kv-attn"


def at_1k(name):
    """A decode profile's rows at 64 and 256 sequences of 1k tokens."""
    rows = of(name, lambda it: it["rows"])
    return [row for row in rows if row["prompt"] == 1024 and row["batch"] in (64, 256)]


def predicted_sampling():
    """The row of rollout-backends.md on logprobs that the device makes."""
    bare, asked = (
        [row["profile"]["classes_ms"]["sampling"] for row in at_1k(f"decode-kv-{name}h100")]
        for name in ("", "nemo-apart-")
    )
    more = (there - here for here, there in zip(bare, asked, strict=True))
    return "{:.2f} and {:.2f} ms more: sampling {:.2f} and {:.2f} ms, without them {:.2f}".format(
        *more, *asked, bare[0]
    )


def predicted_apart():
    """The row on an engine in a process of its own."""
    inside, apart = (
        [row["wall_ms"] for row in at_1k(f"decode-kv-{name}h100")] for name in ("", "nemo-apart-")
    )
    return "| {:.2f} and {:.1f} ms with logprobs; {:.2f} and {:.1f} inside without |".format(
        *apart, *inside
    )


def predicted_loop():
    """The row on logprobs that the host writes one by one."""
    theirs, ours = (row["median"] for row in of("rollout-logprobs-cpu", lambda it: it["rows"]))
    return f"{theirs:.1f} s; ours {ours:.2f} |"


def predicted_fusion():
    """The row on norms and activations that are fused with quantization."""
    first = at_1k("decode-kv-h100")[0]["profile"]["classes_ms"]
    return f"| {first['norm or activation, quantized']:.2f} ms at 64; BF16 has 0 |"


def predicted_tiles():
    """The row on tiles for FP8 experts: how many times as fast as vLLM's default's."""
    rows = of("experts-h100", lambda it: it["rows"])
    seconds = [
        row["milliseconds"] for row in rows
        if row["format"] != "bf16" and 128 <= row["rows"] <= 512
    ]  # fmt: skip
    gains = [each["default"]["median"] / each["tuned"]["median"] for each in seconds]
    return f"at 128 to 512 rows {min(gains):.2f} to {max(gains):.2f} times as fast |"


COUNTED = {5: "five", 6: "six"}
FP8S = (LINEAR, KV, E2E, BOTH)


def decode_rows(name, cell):
    """A decode figure's rows of a precision by sequences and tokens."""
    return draw_decode.rows_of(draw_decode.DRAWINGS[name], cell)


def profiled_gains(cell=KV, name="decode-8b"):
    """How many times as fast as BF16 vLLM decodes in a figure's profiles, from point to point."""
    plain = decode_rows(name, "bf16")
    gains = [plain[at]["wall_ms"] / row["wall_ms"] for at, row in decode_rows(name, cell).items()]
    return f"{min(gains):.2f} to {max(gains):.2f}"


def decode_ways(way, kv_heads=8):
    """One layer's attention of a decode step by a kernel: rows by sequences and tokens."""
    return {
        (row["batch"], row["tokens"]): row
        for row in of("decode-attention-h200", lambda it: it["rows"])
        if (row["way"], row["kv_heads"]) == (way, kv_heads)
    }


FA3, XQA = "FA3-fp8-16-32", f"ours-fp8-16-{SPREAD}"
XQA_MODELS = {"8b": "8B", "30b": "30B-A3B"}


def xqa_times(at, kv_heads=8):
    """How many times as fast as by FlashAttention 3 XQA attends alone."""
    by_flash, ours = (decode_ways(way, kv_heads)[at]["us"]["median"] for way in (FA3, XQA))
    return by_flash / ours


@cache
def xqa_steps(model="8b"):
    """Milliseconds of a decode step on an H200 by either kernel, by point."""
    found = {}
    for decode in ("xqa", "fa3"):
        for row in of(f"decode-{model}-{decode}-h200", lambda it: it["rows"]):
            found.setdefault((row["batch"], row["prompt"]), []).append(row["wall_ms"])
    return found


def xqa_rows():
    """The rows of both on docs/speed.md, with attention alone where that was measured."""
    for name, heads in (("8b", 8), ("30b", 4)):
        alone = decode_ways(XQA, heads)
        for at, (ours, by_flash) in xqa_steps(name).items():
            text = f"{xqa_times(at, heads):.2f}x " if at in alone else ""
            yield (
                f"| {XQA_MODELS[name]} | {at[0]} x {at[1] // 1024}k | {ours:.2f} "
                f"| {by_flash:.2f} | {by_flash / ours:.2f}x | {text}|"
            )


def xqa_of_steps(model="8b"):
    """How many times as fast a step is by XQA."""
    return spread_of(by_flash / ours for ours, by_flash in xqa_steps(model).values())


def xqa_alone():
    """What docs/speed.md says of attention alone, of 30B-A3B's heads and of 64k tokens."""
    of_four = spread_of(xqa_times(at, 4) for at in decode_ways(XQA, 4))
    long = spread_of(xqa_times((4, 65536), heads) for heads in (4, 8))
    return f"four KV heads it is {of_four} times as fast, and with 64k tokens {long}."


def xqa_of_bf16():
    """Times as fast as BF16 that 8B decodes by XQA, the least and the largest of four points."""
    return spread_of(gains_by_xqa()[0])


def beside_xqa():
    """Each of them, what the plan says, and how far that is off."""
    took, said = gains_by_xqa()
    off = [ours / theirs - 1 for theirs, ours in zip(took, said, strict=True)]
    return (
        "{:.2f} at 64 x 1k, {:.2f} at 256 x 1k, {:.2f} at 64 x 4k and {:.2f} at 32 x 8k".format(
            *took
        ),
        "The plan says {:.2f}, {:.2f}, {:.2f} and {:.2f}: ".format(*said)
        + f"{-min(off):.0%} too small to {max(off):.0%} too large.",
    )


WORKERS = {"30b6": (128, "first"), "30b32": (32, "first"), "30b32-again": (32, "second"),
           "30b16e": (16, "third")}  # fmt: skip
ROUTES = {"replayed": "replayed, new in each step", "own": "the router's own",
          "repeated": "given, the same again"}  # fmt: skip


def in_the_worker(name, tokens=8192):
    """Rows of six layers of experts in NeMo RL's worker: by routes, then by library."""
    rows = of(f"train-worker-{name}-h200", lambda it: it["rows"])
    found = {(r["routes"], r["products"]): r for r in rows if r["tokens"] == tokens}
    return {
        routes: (found[routes, "cublas"], found[routes, "cutlass"])
        for routes in ROUTES
        if {(routes, "cublas"), (routes, "cutlass")} <= found.keys()
    }


def by_cutlass(pair):
    """Times as fast as by cuBLAS: training and logprobs."""
    slow, fast = pair
    return [slow[part]["median"] / fast[part]["median"] for part in ("train", "logprobs")]


def experts_rows():
    """experts.md's table of the libraries that multiply experts."""
    for name, (experts, machine) in WORKERS.items():
        file = f"[{machine}](../../benchmarks/results/train-worker-{name}-h200.json)"
        for routes, pair in in_the_worker(name).items():
            took = " | ".join(f"{each['train']['median']:.2f} s" for each in pair)
            gains = ", ".join(f"{gain:.2f}x" for gain in by_cutlass(pair))
            shares = ", ".join(f"{each['busy']:.0%}" for each in pair)
            yield f"| {experts}, {file} | {ROUTES[routes]} | {took} | {gains} | {shares} |"


def experts_busy():
    """The GPU's least and largest share of a profiled pass, in percent."""
    held = [each["busy"] for name in WORKERS
            for pair in in_the_worker(name).values() for each in pair]  # fmt: skip
    return f"It was at work for {100 * min(held):.0f} to {max(held):.0%} of a profiled pass;"


def larger_micro_batches():
    """What 16,384 tokens instead of 8,192 gained, and CUTLASS there, with replayed routes."""
    small, large = (in_the_worker("30b32-again", n)["replayed"] for n in (8192, 16384))
    gain = small[1]["train"]["median"] / large[1]["train"]["median"]
    train, logprobs = by_cutlass(large)
    return (
        f"trained {gain:.2f} times as fast as these of 8,192; there CUTLASS trained {train:.2f} "
        f"times as fast as cuBLAS, its logprobs {logprobs:.2f} times."
    )


def experts_numbers(name):
    """How far gradients by CUTLASS, and by cuBLAS again, are from cuBLAS's: `0.26%`, `0.27%`."""
    again, ours = of(f"train-worker-{name}-h200", lambda it: it["numbers"])
    assert again["logprob_largest"] == ours["logprob_largest"] == 0
    return f"{ours['gradient_share']:.2%}", f"{again['gradient_share']:.2%}"


def sixteen_experts():
    """measured.md's cell: speed with replayed routes, and how gradients differ."""
    train, logprobs = by_cutlass(in_the_worker("30b16e")["replayed"])
    ours, again = experts_numbers("30b16e")
    return (
        f"CUTLASS {train:.2f} times as fast, logprobs {logprobs:.2f}; the same logprobs to the "
        f"bit; gradients {ours} apart, cuBLAS's own {again}"
    )


def all_of_30b():
    """The one step of all of 30B-A3B, and phases of the next as its notes time them."""
    [run] = of("nemo-30b-lora-2-h200", lambda it: it["runs"])
    [row] = run["rows"]
    notes = " ".join(of("nemo-30b-lora-2-h200", lambda it: it["notes"]))
    clock = [
        int(h) * 3600 + int(m) * 60 + int(s)
        for h, m, s in re.findall(r"(\d\d):(\d\d):(\d\d)", notes[notes.index("refit and KV") :])
    ]
    began, refitted, sampled, scoring, scored = clock[:5]
    seconds = of("nemo-30b-lora-2-h200", lambda it: it["seconds"])
    return (
        f"128 answers of {row['rollout/mean_length']:,.0f} tokens. The refit proved all "
        f"{row['refit/verified_weights']:,} FP8 weights. The step compiled kernels and took "
        f"{seconds['step 1']['step']:.0f} s,",
        f"refit and KV scales took {refitted - began} s, the rollout {sampled - refitted} and "
        f"logprobs at least {scored - scoring}, by",
        f"set-up took {seconds['setup']:.0f} s, conversion",
        f"KL {row['mismatch/kl']:.1e}".replace("e-0", "e-")
        + f", no route missing, {row['replay/rerouted_fraction']:.0%} of routes replaced",
    )


def all_of_30b_pair():
    """experts.md's table of all of 30B-A3B with LoRA, and what it says of the pair."""
    plain, fp8 = (real("30b-lora-2-h200")[name] for name in ("bf16", KV))
    phases = ("rollout", "rollout"), ("logprobs", "logprob"), ("training", "train")
    rows = [
        f"| {name} | {plain[phase]:.1f} s | {plain['plan'][phase]:.1f} s | {fp8[phase]:.1f} s | "
        f"{fp8['plan'][phase]:.1f} s |"
        for name, phase in (*phases, ("refit", "refit"), ("**step**", "step"))
    ]
    runs = of("nemo-30b-lora-pair-2-h200", lambda it: it["runs"])
    counted = [[row for row in run["rows"] if row["step"] > 1] for run in runs]
    rerouted = [fmean(row["replay/rerouted_fraction"] for row in rows) for rows in counted]
    of_plain, of_fp8 = sorted(rerouted)
    seconds = of("nemo-30b-lora-pair-2-h200", lambda it: it["seconds"])
    return [
        *rows,
        f"| between phases | {plain['rest']:.1f} s | | {fp8['rest']:.1f} s | |",
        f"took {fp8['step']:.1f} s with `fp8-kv-attn` and {plain['step']:.1f} s in BF16, "
        f"{plain['step'] / fp8['step']:.2f} times as fast",
        f"Of the replayed routes {of_fp8:.0%} differ from the trainer's own choice in FP8, "
        f"{of_plain:.1%} in BF16;",
        f"took {seconds[KV]['setup']:.0f} s in FP8 and {seconds['bf16']['setup']:.0f} in BF16,",
        f"in the pair in {seconds['conversion']['written']} s, and BF16 found it converted.",
        f"**FP8's rollout saved {plain['rollout'] - fp8['rollout']:.1f} s in the pair,** where its "
        "engines were laid out otherwise than BF16's. "
        f"Its refit lost {fp8['refit'] - plain['refit']:.1f}.",
        f"in the pair FP8's training took {fp8['train'] - plain['train']:.1f} s longer and its "
        f"logprobs {fp8['logprob'] - plain['logprob']:.1f}.",
        "in [93](../../benchmarks/results/nemo-30b-lora-2-h200.json) and "
        f"[{all_of_30b_again()[0]:.1f} s](",
    ]


def staged():
    """GiB that stay page-locked after a save by NeMo RL's worker and by ours."""
    _, trained, stock, ours = of("staging-h200", lambda it: it["rows"])
    left = [each["left"] - trained["left"] for each in (stock, ours)]
    return of("staging-h200", lambda it: it["state"]), *left


def with_reference():
    """Seconds of a step that a reference policy adds."""
    words = ["model=llama31-8b", "precision=fp8-kv-attn", "grpo.max_new_tokens=8192"]
    both, alone = (
        step_seconds(
            compose_plans(["backend=nemo", *words, *more], lambda _: MAIN)[0].settled
        ).total
        for more in ([], ["grpo.kl_penalty=0"])
    )
    return f"at 8k on 8 H100 that is {both - alone:.0f} of {both:.0f} s, by estimate"


def converted():
    """GiB page-locked by a conversion of 30B-A3B, and GiB of it that stayed."""
    held = of("nemo-30b-lora-again-2-h200", lambda it: it["host"]["page-locked"])
    return held["converting"] - held["asleep"], held["after"] - held["asleep"]


def all_of_30b_again():
    """Seconds of its first step, and of the set-up, on another machine."""
    seconds = of("nemo-30b-lora-again-2-h200", lambda it: it["seconds"])
    return seconds["step 1"]["step"], seconds["setup"]


def fusion_wait():
    """Minutes and seconds between two lines of BF16's engine."""
    lines = of("nemo-30b-lora-again-2-h200", lambda it: it["seconds"]["bf16 engine"])
    began, ended = (datetime.strptime(clock, "%H:%M:%S") for clock, _ in lines)
    return divmod((ended - began).seconds, 60)


def host_gb(gpu, gpus):
    """GB of host memory of 8B in BF16, in steps of 50."""
    words = ("model=llama31-8b", "precision=bf16", f"cluster.gpu={gpu}")
    [found] = compose_plans([*words, "backend=nemo", f"cluster.gpus_per_node={gpus}"],
                            lambda _: MAIN)  # fmt: skip
    return 50 * math.ceil(node_gib(found.settled) * 1.074 / 50)


def host_memory_before_and_now(*words):
    """GiB that plans count: without a checkpoint's copy, as they had, and with it."""
    [found] = compose_plans(["backend=nemo", *words], lambda _: MAIN)
    now = host_gib(found.settled)
    return f"{now - checkpoint_gib(found.settled):,.0f} to {now:,.0f}"


def grouped_step():
    """Seconds of training in a step of six layers, by CUTLASS and by cuBLAS."""
    row, before = (real(name)["bf16"] for name in ("30b6-grouped-h200", "30b6-h200"))
    file = "../../benchmarks/results/real-steps-30b6-grouped-h200.json"
    return (
        f"training took [{row['train']:.1f} s]({file}) by CUTLASS, the median of three; "
        f"one took {max(row['raw']['train']):.1f} s, while another run set up beside it. "
        f"It had taken {before['train']:.1f} s"
    )


def beside_their_training():
    """steps.md's table of ours and NeMo RL's recipe of FP8 training on two H200s."""
    ours, theirs = draw_steps.rows_of(f"real-steps-{STOCK_2K}.json").values()
    said = real(STOCK_2K)[BOTH]["plan"]
    rows = [
        f"| {name} | {ours[phase]:.{n}f} s | {said[phase]:.{n}f} s | {theirs[phase]:.1f} s |"
        for name, phase, n in (
            ("rollout", "rollout", 1), ("logprobs", "logprob", 1), ("training", "train", 1),
            ("refit", "refit", 2), ("**step**", "step", 1),
        )
    ]  # fmt: skip
    printed = of("nemo-stock-8b-2k-2-h200", lambda it: it["notes"])[3]
    back = fmean(map(float, re.findall(r"training_prep ([\d.]+) and ([\d.]+) s", printed)[0]))
    there = theirs["refit"] - ours["refit"]
    without = (theirs["step"] - back - there) / ours["step"]
    return [
        *rows,
        f"**{there + back:.0f} s of theirs moved the optimizer** to the host and back, {there:.0f} "
        f"in the refit and {back:.0f} before training.",
        f"Without that ours was {without:.2f} times as fast, by subtraction.",
        f"**Training, {theirs['train'] / ours['train']:.2f} times:**",
        f"The rollout, {theirs['rollout'] / ours['rollout']:.2f} times:",
        f"took {ours['step']:.1f} s with our `{BOTH}`, and {theirs['step']:.1f} s with NeMo RL's",
    ]  # fmt: skip


def at_work(begin, end):
    """Percent of two GPUs' seconds between two times in which a kernel ran."""
    rows = of("nemo-stock-8b-2k-2-h200", lambda it: it["gpus"])
    return f"{fmean(row[3] for row in rows if begin <= row[0] <= end):.0f}%"


def experts_by_xqa():
    """The same of 30B-A3B."""
    plain, by_flash = (decode_rows("decode-30b", cell) for cell in ("bf16", KV))
    return spread_of(
        plain[at]["wall_ms"] / by_flash[at]["wall_ms"] * beside / ours
        for at, (ours, beside) in xqa_steps("30b").items()
    )


def decode_summary():
    """The rows of docs/speed.md on decode: what FP8 gains over BF16 at the same batch."""
    eight, experts = "Llama 3.1 8B", "Qwen3-30B-A3B"
    two_runs = "x with XQA, from two runs' ratios"
    cells = [
        (eight, "H100", profiled_gains(LINEAR), profiled_gains() + "x"),
        (
            eight,
            "H200",
            decode("rollout-8b-h200", f"{LINEAR}-deepgemm"),
            xqa_of_bf16() + "x with XQA",
        ),
        (experts, "H100", MOE_DECODE[LINEAR, "h100"](), MOE_DECODE[KV, "h100"]() + "x"),
        (experts, "H200", MOE_DECODE[LINEAR, "h200"](), experts_by_xqa() + two_runs),
    ]
    return [
        f"| {model} | {gpu} | {linear.replace(' to', 'x to')}x | {kv.replace(' to', 'x to')} |"
        for model, gpu, linear, kv in cells
    ]


def decode_kls():
    """decode.md's KL of answers that either kernel decoded, and of a BF16 cache's."""
    rows = {row["way"]: row for row in of("decode-mismatch-h200", lambda it: it["rows"])}
    assert len({row["tokens"] for row in rows.values()}) == 1
    held = (f"{rows[way][key]:.4f}" for way in ("xqa", "fa3") for key in ("kl", "standard_error"))
    return "was {} nats a token with XQA (standard error {}) and {} ({}) with".format(*held)


def six_layers():
    """speed.md's seconds of a step of six of 30B-A3B's layers, and the share of the GPU's peak."""
    rows = real("30b6-h200")
    steps = (f"`{each}` {rows[each]['step']:.1f} s" for each in ("bf16", KV, E2E))
    most = max(row["mfu_train"] for row in rows.values())
    return f"{', '.join(steps)}. Training reached {most:.0%} of the GPU's peak at most"


def six_layers_planned():
    """What the plan says they gain over BF16, and what they gained."""
    rows = real("30b6-h200")

    def gains(of_row):
        plain = of_row(rows["bf16"])
        return [plain / of_row(rows[each]) for each in (KV, E2E)]

    said, took = gains(lambda row: row["plan"]["step"]), gains(lambda row: row["step"])
    return (
        "the plan says {:.2f} times BF16 with `fp8-kv-attn` and {:.2f} with `fp8-e2e`; "
        "they took {:.2f} and {:.2f}.".format(*said, *took)
    )


def six_layers_token():
    """Milliseconds that a token of their rollouts took."""
    rows = real("30b6-h200").values()
    each = [1e3 * seconds / row["answer"] for row in rows for seconds in row["raw"]["rollout"]]
    return f"A rollout took {min(each):.1f} to {max(each):.1f} ms a token for six layers"


def six_layers_copied():
    """experts.md's refits of six layers, copied and by vLLM's loader, and a step in FP8."""
    plain, linear = (real("30b6-linear-h200")[each] for each in ("bf16", LINEAR))
    loaded = real("30b6-h200")
    sent = of("nemo-30b6-linear-h200", lambda it: it["seconds"]["transfer"][LINEAR])[1:]
    rows = of("nemo-30b6-linear-h200", lambda it: it["runs"][1]["rows"])
    assert (plain["steps"], linear["steps"]) == (1, 4) and min(r["train/grad_norm"] for r in rows)
    assert {row["refit/verified_weights"] for row in rows} == {2328}
    most = max(row["mfu_train"] for row in loaded.values())
    before = real("30b6-grouped-h200")["bf16"]["mfu_train"]
    return [
        f"copied both: {linear['refit']:.2f} s with `fp8-linear`, the median of four, "
        f"and {plain['refit']:.2f} with BF16, one.",
        f"it was {loaded[KV]['refit']:.2f} s with `fp8-kv-attn`, {loaded[E2E]['refit']:.2f} with "
        f"`fp8-e2e` and {loaded['bf16']['refit']:.2f} with BF16.",
        f"Of FP8's {linear['refit']:.2f} s the transfer is {min(sent):.1f} to {max(sent):.1f};",
        f"took {linear['step']:.1f} s in `fp8-linear`,** the median of four, "
        f"and {plain['step']:.1f} in BF16,",
        f"FP8's rollout took {linear['rollout']:.1f} s, its logprobs {linear['logprob']:.1f}, "
        f"its training {linear['train']:.1f}.",
        f"at {100 * plain['mfu_train']:.0f} to {linear['mfu_train']:.0%} of the GPU's peak; "
        f"with 8,192 tokens it was {before:.0%}, by cuBLAS at most {100 * most:.0f},",
    ]


SHORT_REFITS = "30b-lora-short-2-h200"


def short_refits():
    """experts.md's run of all of 30B-A3B whose refits send the adapted weights alone."""
    [(row, settled)], recorded = timed(SHORT_REFITS), of(f"nemo-{SHORT_REFITS}", lambda it: it)
    said = step_seconds(settled, Lengths(17, row["answer"]))
    recipe = settled.recipe
    few = count(recipe.model.shape, recipe.precision, recipe.resent)
    whole = count(recipe.model.shape, recipe.precision)
    plain, fp8 = (recorded["seconds"][each] for each in ("bf16", KV))
    first, *later = plain["refit"]
    assert later[0] == max(later) and fp8["refit"] == 14.31
    woken = median(plain["waking the weights"]) / median(later)
    assert 0.45 < woken < 0.55
    (own, rate), (seconds, rates), around = counted_by_vllm()
    busy = fmean(gpu[3] for gpu in recorded["gpus"] if "13:58:10" <= gpu[0] <= "13:58:27")
    [counted] = [run["rows"][1:] for run in recorded["runs"] if run["cell"].endswith("bf16-tis")]
    changed = {f"{each['refit/changed_bytes']:.1%}" for each in counted}
    rerouted = [each["replay/rerouted_fraction"] for each in counted]
    assert changed == {"0.3%"} and min(each["train/grad_norm"] for each in counted)
    held = max(gpu[2] for gpu in recorded["gpus"]) / 1024
    glue, plans = dataclasses.replace(recipe.glue, verify="bytes"), []
    for each, ran in timed("30b-lora-2-h200"):
        now = dataclasses.replace(ran, recipe=dataclasses.replace(ran.recipe, glue=glue))
        plans.append(step_seconds(now, Lengths(17, each["answer"])).total)
    phases = said._asdict() | {"step": said.total}
    shown = ("rollout", "logprob", "train", "refit", "step")
    return [
        *(f" | {row[phase]:.1f} s | {phases[phase]:.1f} s |" for phase in shown),
        f" | {row['rest']:.1f} s | |",
        f"in a later run a step in BF16 took {row['step']:.1f} s.",
        f"a plan says {plans[0] / plans[1]:.2f} times: {plans[0]:.1f} s over {plans[1]:.1f}.",
        f"sends {few.weights} of {whole.weights:,} tensors,** "
        f"{counted[0]['refit/bytes'] / 1e9:.1f} of {whole.refit_bytes / 1e9:.1f} GB,",
        f"four took {min(later):.1f} to {max(later):.1f} s, the first of them longest.",
        f"BF16's first refit, which sends everything by vLLM's loader, took {first:.1f} s.",
        f"where its first, which sends everything, took {fp8['refit']:.1f}. The engine",
        f"{own + around:.1f} s by a sum, where two engines of one GPU had taken "
        f"{real('30b-lora-2-h200')[KV]['rollout']:.1f} in the pair.",
        f"vLLM counted {own:.1f} s, and BF16's rollouts took {around:.1f} s more than vLLM "
        f"counted. That count was {seconds:.1f} s in BF16, so FP8 sampled {rate / rates:.2f} "
        f"times as many tokens a second. A kernel ran for {math.floor(busy)}% of it,",
        f"{fp8['init engine']:.0f} s, {fp8['compilation']:.0f} of them compiling, "
        f"{fp8['graphs']:.0f} capturing graphs. BF16's took {plain['init engine']:.0f} s.",
        f"trained in {min(row['raw']['train']):.1f} to {max(row['raw']['train']):.1f} s and "
        f"scored in {min(row['raw']['logprob']):.1f} to {max(row['raw']['logprob']):.1f}.",
        f"{100 * min(rerouted):.0f} to {max(rerouted):.0%} in BF16's later run, whose",
        f"in the later run {fp8['Total setup']:.0f} and {plain['Total setup']:.0f}.",
        f"`nvidia-smi` saw {held:.0f} of 140 GiB in training, in FP8 and in BF16, where the plan "
        f"says {memory_per_gpu(settled).needed_gib('train'):.0f}.",
    ]


def short_refits_planned():
    """How far a plan is off that run's step and refit."""
    row = real(SHORT_REFITS)["bf16"]
    return (
        f"BF16's step was planned {row['plan']['step'] / row['step'] - 1:.0%} too long, its refit "
        f"{1 - row['plan']['refit'] / row['refit']:.0%} too short;"
    )


def xqa_errors():
    """How far off attention in FP32 either kernel is, all points of both models."""
    rows = [
        row for way in (FA3, XQA) for heads in (8, 4) for row in decode_ways(way, heads).values()
    ]
    errors = [row["error"] for row in rows]
    assert len(rows) == 28
    return f"{100 * min(errors):.1f} to {max(errors):.1%}"


def experts_rates():
    """speed.md's TB/s of experts and caches, and how long attention over an FP8 cache takes."""
    rows = {cell: decode_rows("decode-30b", cell) for cell in draw_decode.CELLS}
    parts = {cell: {at: draw_decode.parts_of(rows[cell][at]) for at in rows[cell]} for cell in rows}
    weights, token = 48 * 128 * 3 * 2048 * 768, 48 * 2 * 4 * 128  # elements: experts, cache

    def expert_rate(cell, size, batch):
        used = weights * (1 - (1 - 8 / 128) ** batch)
        return size * used / parts[cell][batch, 1024]["experts"] / 1e9

    def cache_rate(cell, size):
        held = 64 * rows[cell][64, 4096]["context"] * token
        return size * held / parts[cell][64, 4096]["attention"] / 1e9

    takes = [each["attention"] / parts["bf16"][at]["attention"] for at, each in parts[KV].items()]
    wide = [parts[cell][256, 1024]["experts"] for cell in (LINEAR, "bf16")]
    return (
        f"{expert_rate('bf16', 2, 64):.1f} TB/s in BF16 and {expert_rate(LINEAR, 1, 64):.1f} in",
        f"reads at {expert_rate(LINEAR, 1, 256):.1f} TB/s, and takes {wide[0] / wide[1]:.2f} of",
        f"cache at {cache_rate('bf16', 2):.1f} TB/s, an FP8 one at {cache_rate(KV, 1):.1f}. "
        "In this kernel, FlashAttention 3, half the bytes take "
        f"{min(takes):.2f} to {max(takes):.2f} of the time.",
    )


def experts_table(batch, prompt):
    """A row of speed.md's profiled steps of 30B-A3B: milliseconds of experts and attention."""
    cells = []
    for cell in draw_decode.CELLS:
        row = decode_rows("decode-30b", cell)[batch, prompt]
        parts = draw_decode.parts_of(row)
        cells.append("{:.1f}, {experts:.1f}, {attention:.1f}".format(row["wall_ms"], **parts))
    return f"| {batch} x {prompt // 1024}k | {' | '.join(cells)} |"


def two_h200s():
    return real_gain("step", TWO).removesuffix(" times")


def real_refits():
    """The shortest and the longest refit of the steps of 8B on four and two H200s, seconds."""
    rows = [row for name in (FOUR, TWO) for row in real(name).values()]
    seconds = [each for row in rows for each in row["raw"]["refit"]]
    return min(seconds), max(seconds)


def refit(glue, file="glue-8b-h100"):
    """Seconds of a refit, of all of 8B on one H100: the median of its rounds."""
    rounds = of(file, lambda it: it["refit"][glue]["rounds"])
    return median(each["refit"] for each in rounds)


def proof(file="glue-8b-h100"):
    """What the proof of every byte costs a refit: milliseconds, and the share of it."""
    plain = refit("fp8", file)
    return 1000 * (refit("bytes", file) - plain), refit("bytes", file) / plain - 1


def stopped(glue):
    """How many of the injected faults a proof of that time stopped, and of how many."""
    faults = of("glue-small-llama-kv-attn-h200", lambda it: it["faults"])
    errors = [each["error"] for each in faults if each.get("glue") == glue]
    return sum(map(bool, errors)), len(errors)


def less(ratios):
    """Of ratios to BF16, the time that the smallest and the largest save: `15-23%`."""
    return "-".join(f"{100 - 100 / each:.0f}" for each in (min(ratios), max(ratios))) + "%"


def saved():
    """What docs/peers.md says that FP8 saves of a step of 8B, and of its decode."""
    rows = [row for name in PAIRS for row in real(name).values()]
    steps = [row["times_bf16"]["step"] for row in rows if row["precision"] != "bf16"]
    texts = (
        f"{decode('rollout-8b-h200', f'{LINEAR}-deepgemm')} to {profiled_gains(LINEAR)}",
        f"{profiled_gains()} to {xqa_of_bf16()}",
    )
    linear, caches = (less([float(each) for each in text.split(" to ")]) for text in texts)
    return f"{less(steps)} less time a step of 8B; decode {linear} less (linear), {caches} (KV too)"


def whole_copy():
    """README's cost of a refit of 8B, and of the proof in it."""
    seconds, more = refit("bytes", QUIET), proof(QUIET)[0]
    return f"the check takes [{more:.0f} ms of a refit of {seconds:.2f} s]"


def proof_by_rounds():
    """The proof's share of a refit without it, in the middle one of the quiet rounds."""
    rounds = of(QUIET, lambda it: it["refit"])
    pairs = zip(rounds["bytes"]["rounds"], rounds["fp8"]["rounds"], strict=True)
    return median(proven["refit"] / plain["refit"] for proven, plain in pairs) - 1


def sixty_rows(name):
    """Return the rows of one run of tiny models inside NeMo RL."""
    file = SIXTY if name.endswith("42") and name != "n-aqn-42" else SEEDS
    [rows] = of(file, lambda it: [run["rows"] for run in it["runs"] if run["name"] == name])
    assert rows[-1]["step"] == 60
    return rows


def sixty_steps(name):
    """Return its validations in percent, and its median KL."""
    rows = sixty_rows(name)
    accuracies = [100 * row["val/accuracy"] for row in rows if "val/accuracy" in row]
    return accuracies, median(row["mismatch/kl"] for row in rows[1:])


def three_seeds(cell):
    """Return the median KL of each seed, the areas, and the means of KL."""
    names = [f"{cell}-{seed}" for seed in (42, 43, 44)]
    runs = [sixty_steps(name) for name in names]
    means = [fmean(row["mismatch/kl"] for row in sixty_rows(name)[1:]) for name in names]
    return [kl for _, kl in runs], [fmean(each) for each, _ in runs], means


def from_to(values):
    """Write the least and the greatest KL."""
    return f"{short_kl(min(values))} to {short_kl(max(values))}"


def short_kl(value):
    """A KL as pages write it: `7.6e-7`."""
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}e{int(power)}"


def sixty_steps_row(model, letter):
    """FP16 beside BF16 on docs/precision.md."""
    both = [three_seeds(f"{letter}-{precision}") for precision in ("fp16", "bf16")]
    areas = [", ".join(f"{area:.1f}" for area in each) for _, each, _ in both]
    return f"| {' | '.join([model, *(from_to(kl) for kl, *_ in both), *areas])} |"


def fp16_kl():
    """README's KL of FP16 and BF16."""
    fp16, bf16 = (short_kl(median(three_seeds(f"d-{each}")[0])) for each in ("fp16", "bf16"))
    return f"[a KL of {fp16}](docs/precision.md#fp16) where BF16's is {bf16}, and learns alike"


def formats_measured():
    """Return the same on docs/research/measured.md."""
    (dense, plain), (experts, routed) = (
        [three_seeds(f"{letter}-{each}") for each in ("fp16", "bf16")] for letter in "dm"
    )
    areas = [fmean(each[1]) for each in (dense, plain, experts, routed)]
    kls = [from_to(each[0]) for each in (dense, plain, experts, routed)]
    return (
        "{:.1f} and {:.1f} (BF16) in the mean, with experts {:.1f} and {:.1f}; median KL "
        "{} and {}, with experts {} and {}"
    ).format(*areas, *kls)


def noise_area():
    """Return the areas of four bits with noise and without on docs/precision.md."""
    noisy, plain = (fmean(sixty_steps(f"n-{each}-42")[0]) for each in ("aqn", "four"))
    return f"area {noisy:.1f} where it is {plain:.1f} without noise"


def experts_means():
    """The same of experts by the mean, where a few steps stand out, on docs/precision.md."""
    fp16, bf16 = (from_to(three_seeds(f"m-{each}")[2]) for each in ("fp16", "bf16"))
    return f"their KL is {fp16} in FP16 and {bf16} in BF16."


def four_bits_learn(number):
    """Four bits, and NeMo RL's training in them, on docs/precision.md: one of five lines."""
    ours, kl = sixty_steps("n-four-42")
    control = of(SIXTY, lambda it: it["control"])
    theirs = short_kl(median(value for _, value in control["train/gen_kl_error"]))
    [at_40] = [100 * value for step, value in control["validation/accuracy"] if step == 40]
    bf16, _ = sixty_steps("d-bf16-42")
    first = 100 * control["validation/accuracy"][0][1]
    return (
        f"{ours[0]:.0f}% to {ours[2]:.0f}% in 20 steps and to {ours[-1]:.0f}% in 60, each refit",
        f"at a KL of {short_kl(kl)} (",
        f"Its KL was {theirs} there.",
        f"At step 40 BF16 had {bf16[4]:.1f}%, ours {ours[4]:.1f}%, `real_quant` {at_40:.1f}%;",
        f"they began at\n{bf16[0]:.1f}, {ours[0]:.1f} and {first:.1f}%, with one seed",
    )[number]


def experts_cell():
    """README's decode of 30B-A3B, on both GPUs."""
    both = (MOE_DECODE[KV, "h100"](), experts_by_xqa())
    h100, h200 = (each.replace(" to", "x to") + "x" for each in both)
    return (
        f"decode alone: [H100 {h100}](docs/research/decode.md#a-mixture-of-experts), "
        f"[H200 {h200}](docs/research/decode.md#an-fp8-cache-on-an-h200) |"
    )


def experts_gains(longest=16384):
    """What the plan says that an FP8 cache gains 30B-A3B, on both GPUs."""
    return [planned(gpu, longest, model="qwen3-30b-a3b")[KV] for gpu in ("h100", "h200")]


def experts_step():
    """README's estimates of its step, on both GPUs."""
    (h100, h200), (h100_at_8k, h200_at_8k) = experts_gains(), experts_gains(8192)
    return (
        f"| `{KV}`, roughly: on H100 {h100}x at 16k, {h100_at_8k}x at 8k; on H200 {h200}x and "
        f"{h200_at_8k}x |"
    )


def experts_decode():
    """The same on docs/speed.md, of an H100."""
    return (
        f"`fp8-linear` {MOE_DECODE[LINEAR, 'h100']()} times as fast as in BF16 at the same batch, "
        f"and with `fp8-kv-attn` {MOE_DECODE[KV, 'h100']()} times"
    )


def experts_row(gpu, batch, prompt):
    """A row of docs/speed.md: tokens/s of BF16, and what FP8 gains over a BF16 of its file."""

    def rates(file):
        return {
            row["precision"]: speed(row)
            for row in of(file, lambda it: it["rows"])
            if (row["batch"], row["prompt"]) == (batch, 1024 * prompt)
        }

    def cell(rates, name):
        if name not in rates:
            return "no room"
        return (
            f"{rates[name] / rates['bf16']:.2f}x"
            if "bf16" in rates
            else f"{rates[name]:,.0f} tokens/s"
        )

    one, kv = rates(f"rollout-30b-{gpu}"), rates(KV_FILES[gpu])
    plain = f"{one['bf16']:,.0f}" if "bf16" in one else "no room"
    cells = plain, cell(one, f"{LINEAR}-deepgemm"), cell(kv, KV)
    return f"| {batch} x {prompt}k | {gpu.upper()} | {' | '.join(cells)} |"


def decode_errors():
    """How far the estimates of decode and of gains are off at most, and of how many points."""
    rows = of("estimate-h200", lambda it: it["decode"])
    worst = max(max(abs(row["error"]), abs(row["gain error"] or 0)) for row in rows)
    fitted = sum(row["half"] == "fitted" for row in rows)
    text = f"within {math.ceil(100 * worst)}% ([{len(rows)} points]"
    return f"{text}(../../benchmarks/results/estimate-h200.json), {fitted} fitted)"


def by_ring():
    """steps.md's table of FP8 with context parallel beside BF16 without, and what it says of it."""
    plain, fp8 = real(XQA_8K).values()
    names = {"rollout": "rollout", "logprobs": "logprob", "training": "train", "refit": "refit",
             "**step**": "step"}  # fmt: skip
    gpus = of("nemo-8b-8k-2-h200", lambda it: it["gpus"])
    worked = [
        fmean(busy for time, _, _, busy, _ in gpus if begins <= time <= ends)
        for begins, ends in (("10:51:32", "10:52:00"), ("11:00:32", "11:00:52"))
    ]
    return [
        *(real_row(name, phase, 1, XQA_8K) for name, phase in names.items()),
        f"trained all of 8B {fp8['train'] / plain['train']:.2f} times as long as BF16",
        f"was {plain['step'] / fp8['step']:.2f} times as fast as BF16's.**",
        f"FP8's rollout gained {plain['rollout'] / fp8['rollout']:.2f} times, where plans say "
        f"{plain['plan']['rollout'] / fp8['plan']['rollout']:.2f}",
        f"a kernel ran for {worked[0]:.0f}% of the time, in BF16's for {worked[1]:.0f}%",
        f"adds {1e3 * LAUNCH_RING[0]:.1f} ms forward and {1e3 * LAUNCH_RING[1]:.1f} ms backward",
    ]


def at_8k_on_h100(precision):
    """What a plan says of a step of 8B on 8 H100 at a limit of 8k."""
    words = ("model=llama31-8b", f"precision={precision}", "grpo.max_new_tokens=8192")
    [found] = compose_plans(words)
    return step_seconds(found.settled)


def drawn(name, precision, begins="", ends="~"):
    """The watts of each second of a run's log, and how many GiB the GPU held at most then."""
    logged = [
        each
        for each in of(f"nemo-{name}", lambda it: it["gpus"])
        if each[0] == precision and begins <= each[1] <= ends
    ]
    return [watts for *_, watts in logged], max(mib for _, _, mib, *_ in logged) / 1024


def at_7500():
    """steps.md's section on 16 layers at 7,500 tokens: its table, gains, energy and memory."""
    plain, fp8, exact = real(HALF_E2E).values()
    before, rollout_alone = real(HALF_8K).values()
    kilojoules = [
        sum(drawn(HALF_E2E, row["precision"])[0]) / 1e3 / row["steps"]
        for row in (plain, fp8, exact)
    ]
    decoding = [
        fmean(drawn(HALF_E2E, *span)[0])
        for span in (
            ("bf16", "19:51:10", "19:51:50"),
            (E2E, "20:07:05", "20:07:33"),
            (BOTH, "19:59:00", "19:59:27"),
        )
    ]
    held, scoring = drawn(HALF_E2E, BOTH)[1], drawn(HALF_E2E, "bf16", "19:50:25", "19:50:32")[1]
    earlier = [
        sum(drawn(HALF_8K, *span)[0]) / 1e3
        for span in ((KV, "17:24:57", "17:26:09"), ("bf16", "17:17:43", "17:19:12"))
    ]
    peaks = {
        run["cell"].split("/")[1]: run["rows"][-1]["memory/peak"]
        for run in of(f"nemo-{HALF_E2E}", lambda it: it["runs"])
    }
    return [
        *(real_row(name, phase, 1, HALF_E2E) for name, phase, _ in REAL_ROWS),
        f"was {fp8['times_bf16']['step']:.2f} times as fast with `{BOTH}` as in BF16, and "
        f"{exact['times_bf16']['step']:.2f} times with `{EXACT}`. The plan says "
        f"{plain['plan']['step'] / fp8['plan']['step']:.2f} and "
        f"{plain['plan']['step'] / exact['plan']['step']:.2f}.",
        f"sampled {fp8['times_bf16']['rollout']:.2f} times as fast, `exact` "
        f"{exact['times_bf16']['rollout']:.2f} times.",
        "logprobs gained {logprob:.2f} times, training {train:.2f}".format(**fp8["times_bf16"]),
        f"trained at {100 * plain['mfu_train']:.0f}% of the GPU's peak. Of the same peak `{BOTH}` "
        f"reached {100 * fp8['mfu_train']:.0f}%",
        f"`{KV}` gained {rollout_alone['times_bf16']['step']:.2f} times:** it took "
        f"{rollout_alone['step']:.1f} s on another H200, and BF16 {before['step']:.1f}, one step "
        f"of each. The plan says {before['plan']['step'] / rollout_alone['plan']['step']:.2f}. The "
        f"rollout gained {rollout_alone['times_bf16']['rollout']:.2f} times",
        f"a step took {earlier[1] / earlier[0]:.1f} to {kilojoules[0] / kilojoules[1]:.1f} times "
        f"less energy:** with `{BOTH}` the GPU drew "
        "{1:.1f} kJ, in BF16 {0:.1f}, with `exact` {2:.1f},".format(*kilojoules),
        "BF16 decodes at {:.0f} of an H200's 700 W, `exact` at {:.0f}, `{}` at {:.0f}.".format(
            *decoding[:2], BOTH, decoding[2]
        ),
        "`{}` took {:.1f} kJ, BF16 beside it {:.1f}.".format(KV, *earlier),
        f"had up to {held:.0f} GiB with `{BOTH}` and {scoring:.0f} in BF16, where plans say "
        "{1:.0f} and {0:.0f}.".format(
            *(memory_per_gpu(it).needed_gib("logprob") for _, it in timed(HALF_E2E)[:2])
        ),
        "Training allocated {:.1f} GiB in BF16 and {:.1f} in FP8".format(
            peaks["bf16-tis"], peaks[f"{BOTH}-tis"]
        ),
        "plans expect {1.train:.0f} s of FP8 training there, {0.train:.0f} of BF16's with tensor "
        "parallel 2; logprobs {1.logprob:.0f} and {0.logprob:.0f}.".format(
            *map(at_8k_on_h100, ("bf16", BOTH))
        ),
    ]


def sixteen_adapted():
    """experts.md's section on 16 layers with LoRA: its table, gains, mismatch and energy."""
    plain, kv, linear = real(ADAPTED).values()
    bf16, *of_fp8 = ([*zip(*row["raw"].values(), strict=True)] for row in (plain, kv, linear))
    (second_of_kv, third_of_kv), (second, third) = (
        [before[-1] / row[-1] for before, row in zip(bf16, each, strict=True)] for each in of_fp8
    )
    runs = {run["cell"].split("/")[1].removesuffix("-tis"): run["rows"][-2:]
            for run in of(f"nemo-{ADAPTED}", lambda it: it["runs"])}  # fmt: skip

    def mean(key, name):
        return fmean(row[key] for row in runs[name])

    names = (LINEAR, KV, "bf16")
    kls = [f"{mean('mismatch/kl', each):.1e}".replace("e-0", "e-") for each in names]
    rerouted = [mean("replay/rerouted_fraction", each) for each in names]
    kilojoules = [sum(drawn(ADAPTED, each)[0]) / 2e3 for each in (KV, LINEAR, "bf16")]
    logged = of(f"nemo-{ADAPTED}", lambda it: it["gpus"])
    worked = [
        fmean(busy for name, at, _, busy, _ in logged if name == "bf16" and begins <= at <= ends)
        for begins, ends in (("22:56:01", "22:57:14"), ("22:57:38", "22:58:39"))
    ]
    refits = [seconds for row in (kv, linear) for seconds in row["raw"]["refit"]]
    slow, fast = plain["raw"]["step"][1], kv["raw"]["step"][1]
    slower = plain["raw"]["train"][1] - kv["raw"]["train"][1]
    said = plain["plan_memory_gib"]["train"] - 6  # GiB of reserve
    rollouts = [row["raw"]["rollout"][1] for row in (plain, linear, kv)]
    peak = max(row["memory/peak"] for rows in runs.values() for row in rows)
    return [
        *(real_row(name, phase, 1, ADAPTED) for name, phase, _ in REAL_ROWS),
        f"took {kv['step']:.1f} s with `{KV}`, {linear['step']:.1f} with `{LINEAR}` and "
        f"{plain['step']:.1f} in BF16.",
        f"`{KV}` gained {third_of_kv:.2f} times, `{LINEAR}` {third:.2f}.**",
        f"it was {second_of_kv:.2f} and {second:.2f}, as BF16's rollout took "
        f"{plain['raw']['rollout'][0]:.0f} s there, and {rollouts[0]:.0f} in the third. A kernel "
        f"ran for {worked[0]:.0f}% of the {plain['raw']['rollout'][0]:.0f} s and {worked[1]:.0f}% "
        f"of the {rollouts[0]:.0f}.",
        f"was slow, {kv['raw']['train'][1]:.1f} s. With the {plain['raw']['train'][1]:.1f} s of "
        f"BF16's third training it would have gained {slow / (fast + slower):.2f} times.",
        f"The plan says {plain['plan']['step'] / kv['plan']['step']:.2f} and "
        f"{plain['plan']['step'] / linear['plan']['step']:.2f}.",
        "it took {:.1f} s in BF16, {:.1f} with `fp8-linear` and {:.1f} with `fp8-kv-attn`.".format(
            *rollouts
        ),
        "was {} nats a token with `fp8-linear`, {} with `fp8-kv-attn`, {} in BF16.".format(*kls),
        "Of the replayed routes {:.0f}, {:.0f} and {:.0f}% differ".format(
            *(100 * each for each in rerouted)
        ),
        "had {logprob:.1f} s for BF16's logprobs and {train:.1f} for its training.".format(
            **of(f"real-steps-{ADAPTED}", lambda it: it["rows"])[0]["plan"]
        ),
        f"Training reached {100 * plain['mfu_train']:.0f}% of the GPU's peak.",
        "drew {:.0f} kJ with `fp8-kv-attn`,** {:.0f} with `fp8-linear` and {:.0f} in BF16,".format(
            *kilojoules
        ),
        f"took {min(refits):.1f} to {max(refits):.1f} s in FP8,** and proved "
        f"{runs[KV][-1]['refit/verified_weights']:,} FP8 weights each; in BF16 "
        "{:.1f} to {:.1f}.".format(*sorted(plain["raw"]["refit"])),
        f"training allocated {peak:.0f} GiB, where the plan says {said:.0f} without its reserve.",
        f"filled the GPU to {max(drawn(ADAPTED, each)[1] for each in names):.0f} GiB,",
    ]


def set_up_at_7500():
    """What log.md says of the first lease's set-up, and of PyTorch's allocator."""
    run = of("nemo-8b16-8k-h200", lambda it: it)
    setups = (run["seconds"][name]["Total setup"] for name in (BOTH, "bf16", KV))
    rounds = [line.split("] peak")[0].split("[")[1].split(", ") for line in
              run["allocator"]["output"]]  # fmt: skip
    default, rounded, _ = run["allocator"]["output"]
    assert default.endswith("allocated 64.5 reserved 135.6 retries 1")
    assert rounded.endswith("allocated 68.0 reserved 94.5 retries 0")
    return [
        f"Its set-up took {next(setups):.0f} s on the new machine",
        "The later runs set up in {:.0f} s in BF16 and {:.0f} in".format(*setups),
        f"which took {float(rounds[0][2]) - float(rounds[0][1]):.2f} s.",
    ]


def waiting_on_h100():
    """What docs/speed.md says of BF16's cache on 8 H100 at 8k, and of its rollout's part."""
    [found] = compose_plans(["model=llama31-8b", "precision=bf16", "grpo.max_new_tokens=8192"])
    settled = found.settled
    seconds, lengths = step_seconds(settled), usual_lengths(settled)
    running = decode_of_engine(settled, mean_context(settled, lengths)).running
    assert settled.layout.rollout_tensor == 2 and 0.45 < seconds.rollout / seconds.total < 0.55
    return (
        f"BF16's cache holds {running} of the {settled.sequences_per_engine:.0f} sequences that an "
        "engine of two GPUs serves, and the rollout is half of a step."
    )


def unstalled():
    """How many runs of all of 8B scored 15k to 16k tokens a GPU at once, the optimizer kept."""
    whole = [
        row
        for name in CELLS
        for row, settled in timed(name)
        if settled.recipe.model.shape.layers == 32 and not settled.recipe.lora.is_on
    ]
    assert all(row["layout"]["keeps_optimizer"] for row in whole)
    each_gpu = [
        row["layout"]["logprob_batch"] * (17 + row["answer"]) / row["layout"]["context"]
        for row in whole
    ]
    assert sum(14_500 < each < 16_384 for each in each_gpu) == 10
    return "Ten runs of all of 8B above scored 15k to 16k tokens a GPU at once"


def long_answers_with_lora():
    """Times as fast as BF16 that FP8 is to be for all of 30B-A3B with LoRA at its usual 16k."""
    words = ("model=qwen3-30b-a3b", "lora=attention", "cluster.gpu=h200", "cluster.gpus_per_node=2")
    [plan] = compose_plans(words, lambda _: MAIN)
    said = dict(precisions(plan, MAIN))["precisions"]
    return dict(re.findall(r"(\S+) ([\d.]+)x", said))[KV]


def by_context():
    """The step over two GPUs, and what the plan says of it."""
    row, settled = single("8b8-context")
    said = step_seconds(settled, Lengths(17, row["answer"])).total
    return (
        f"Their step took {row['step']:.1f} s, where the plan says {said:.1f}. "
        f"Training reached {row['mfu_train']:.0%} of the GPUs' peak"
    )


QUIET = "glue-8b-proof-h100"
EXPERTS_POINTS = (
    *(
        ("h100", *point)
        for point in ((32, 1), (64, 1), (256, 1), (16, 4), (8, 8), (32, 8), (88, 8))
    ),
    *(("h200", *point) for point in ((64, 1), (256, 1), (16, 4), (64, 4))),
)
KV_FILES = {"h100": "rollout-30b-h100", "h200": "rollout-30b-kv-h200"}
MOE_DECODE = {
    (LINEAR, "h100"): partial(decode, "rollout-30b-h100", f"{LINEAR}-deepgemm"),
    (KV, "h100"): partial(decode, "rollout-30b-h100", KV),
    (LINEAR, "h200"): partial(decode, "rollout-30b-h200", f"{LINEAR}-deepgemm"),
    (KV, "h200"): partial(decode, "rollout-30b-kv-h200", KV),
}
SIXTY, SEEDS = "nemo-formats-60-h100", "nemo-formats-seeds-h200"
TINY, WORKING, STUDY = "stress-tiny", "stress-working-more", "experiment-h200"
LONGER = (4096, 8192, 16384)
MOE, LLAMA = "small-qwen3-moe", "small-llama"
KV_CELLS = (f"{KV}-none", f"{KV}-tis", f"{E2E}-none")
DECIDED_113M = (f"{LINEAR}-none", f"{LINEAR}-tis", f"{KV}-none", f"{KV}-tis", f"{E2E}-none")
EXACT_CELLS = ((E2E, "exact"), (E2E, "cheap"), (LINEAR, "cheap"), ("bf16", "cheap"))
LINEAR_CELLS = (f"{LINEAR}-none", f"{LINEAR}-tis", f"{E2E}-tis")
STUDIED = (("bf16", "none"), (LINEAR, "none"), (LINEAR, "tis"), (LINEAR, "mis"), (KV, "none"),
           (KV, "tis"), (E2E, "none"))  # fmt: skip
SAID = {
    "README.md": [
        lambda: "{} times on 8 H100, {} on 8 H200, {} with LoRA on two H200.".format(
            *experts_gains(), long_answers_with_lora()
        ),
        pays_from,
        lambda: (
            f"On four H200s `{BOTH}` made a whole step of Llama 3.1 8B **{real_gain('step')}** "
            f"as fast as in BF16, on two {real_gain('step', TWO)}."
        ),
        beside_theirs,
        lambda: "`{}` took {:.0f} s, and their recipe of FP8 training [{:.0f}](docs".format(
            BOTH,
            *(row["step"] for row in draw_steps.rows_of(f"real-steps-{STOCK_2K}.json").values()),
        ),
        lambda: f"[{real_gain('step', H100S)}](docs/research/steps.md#four-h100s-and-nemo-rls",
        lambda: f"where the plan says {planned_gain(H100S):.2f}.",
        lambda: f"{real_gain('step', ADAPTERS)} as fast with `{KV}`",
        whole_steps,
        whole_exact_steps,
        lambda: (
            f"a step was **{real_gain('step', ALIKE_2K)}** as fast as BF16's; at a limit of 8k "
            f"eight should gain {planned('h200', 8192)[EXACT]} times."
        ),
        erring_as_on_four_h100s,
        half_the_layers,
        lambda: f"one H100, up to 4k | `fp8-kv-attn` | {planned_lora()}x |",
        lambda: (
            f"[whole steps {real_gain('step', ADAPTERS).removesuffix(' times')}x]"
            "(docs/speed.md#what-a-step-gained)"
            ", with answers of 4,000 tokens, twice as long; for these the plan says "
            f"{planned_gain(ADAPTERS):.2f}x |"
        ),
        short_on_h100,
        long_on_h100,
        lambda: f"longer, without an FP8 cache | `bf16` | `{E2E}` {on_h100(E2E)} |",
        lambda: f"| `{BOTH}` | {on_h100(BOTH, 2048, *LONGER)} |",
        lambda: "| `fp16` | {}x to {}x (8B, 8 H100) |".format(*fp16_on_h100()),
        fp16_kl,
        lambda: (
            f"first choice: up to 4k on 2 to 8 GPUs, up to 8k on 8 | `{EXACT}` | {on_h200(EXACT)} |"
        ),
        lambda: (
            f"fastest, with an FP8 cache: up to 8k on 2 to 8 GPUs, up to 16k on 8 | `{BOTH}` | "
            f"{on_h200(BOTH)}; at 16k {planned('h200', 16384)[BOTH]}x |"
        ),
        lambda: f"[decode alone {profiled_gains().replace(' to', 'x to')}x]",
        lambda: f"about {minutes('demo')} minutes on 2 idle cores",
        lambda: f"| {minutes('demo')} and {minutes('test')} min |",
        experts_cell,
        whole_copy,
        lambda: f"| [within {widest('113m', LLAMA)} points](docs/research/experiment.md",
        experts_lost,
        experts_served,
        lambda: "tiny models {} points uncorrected".format(losses().split(" to ")[0]),
        lambda: "and {} with `tis`".format(losses().split(" to ")[1].removesuffix(" points")),
        node_hours,
        estimated_on_h100,
        experts_step,
        lambda: "on 2 GPUs {:.0f} GB of host memory, on 4 {:.0f} GB, by".format(
            host_gb("h200", 2), host_gb("h100", 4)
        ),
        lambda: f"| 8 H100 or H200; {host_gb('h100', 8):.0f} GB of host memory,",
        lambda: f"{disk('llama31-8b')} GB",
        lambda: f"{disk('qwen3-30b-a3b') / 1000:.1f} TB",
    ],
    "docs/speed.md": [
        lambda: f"With LoRA on two H200s it is {long_answers_with_lora()}.",
        lambda: "gains {} times by estimate, on H200 {}.".format(*experts_gains()),
        with_reference,
        waiting_on_h100,
        gain_errors,
        lambda: missing_rows(pair_rows(), "docs/speed.md"),
        step_errors,
        lambda: "sampled {} times as fast, scored {} and trained {} times.".format(
            *(real_gain(phase).removesuffix(" times") for phase in ("rollout", "logprob", "train"))
        ),
        lambda: missing_rows(decode_summary(), "docs/speed.md"),
        lambda: f"{real_gain('step')} as fast as in BF16",
        lambda: "shortened the rollout, which explains {} times. The rest of its {} is".format(
            *kv_on_four().split(" to ")
        ),
        lambda: f"with LoRA on one {real_gain('step', ADAPTERS).removesuffix(' times')}.",
        gain_errors,
        *(partial(planned_row, precision) for precision in (LINEAR, KV, E2E, BOTH)),
    ],
    "docs/nemo.md": [lambda: "Ours gave [all but {1:.1f} of {0:.0f} GiB]".format(*converted())],
    "docs/research/experts.md": [
        lambda: missing_rows(all_of_30b_pair(), "docs/research/experts.md"),
        lambda: missing_rows(experts_rows(), "docs/research/experts.md"),
        experts_busy,
        larger_micro_batches,
        lambda: "differed from cuBLAS's by {} of their norm, a second pass by cuBLAS by {}.".format(
            *experts_numbers("30b32-again")
        ),
        lambda: "With 16 experts it was {} and {}.".format(*experts_numbers("30b16e")),
        grouped_step,
        six_layers,
        six_layers_token,
        lambda: missing_rows(six_layers_copied(), "docs/research/experts.md"),
        lambda: missing_rows(short_refits(), "docs/research/experts.md"),
        lambda: missing_rows(sixteen_adapted(), "docs/research/experts.md"),
    ],
    "docs/research/steps.md": [
        *(
            partial(lambda n, name: exact_phases(name)[n], *each)
            for each in product(range(3), (ALIKE, ALIKE_2K))
        ),
        *(partial(beside, name, phase) for name, phase, _ in REAL_ROWS),
        lambda: beside_rest("of training, before the GPUs began", before_training()),
        lambda: beside_rest("between phases", between_phases()),
        beside_eight,
        after_four_threads,
        lambda: "was on the way to some {:.0f} s, ours to {:.0f}:".format(
            cut_step("NeMo RL's"), cut_step(KV)
        ),
        lambda: "In these two steps {:.0f} and {:.0f} s of theirs moved".format(*moved()),
        stock_on_eight,
        lambda: (
            f"gained {real_gain('step', H100S)}**, its rollout "
            f"{real_gain('rollout', H100S).removesuffix(' times')}. The plan says "
        ),
        lambda: f"The plan says {planned_gain(H100S):.2f}. BF16 sampled",
        lambda: f"So `fp8-kv-attn` gained {kv_on_four()} times.",
        lambda: missing_rows(beside_their_training(), "docs/research/steps.md"),
        lambda: "for {} of our seconds and {} of theirs".format(
            at_work("18:53:09", "18:54:28"), at_work("19:00:01", "19:02:19")
        ),
        six_layers_planned,
        short_refits_planned,
        lambda: "took {1:.1f} s a step, BF16 {0:.1f}. The gains were".format(
            *(row["step"] for row in real(XQA_2K).values())
        ),
        lambda: "gains were rollout {}, logprobs {}, training {} times, over four steps and".format(
            *(
                real_gain(phase, XQA_2K).removesuffix(" times")
                for phase in ("rollout", "logprob", "train")
            )
        ),
        lambda: "The plan says {1:.1f} and {0:.1f}. This rollout".format(
            *(row["plan"]["step"] for row in real(XQA_2K).values())
        ),
        lambda: f"2,000 tokens an answer: {real_gain('step', XQA_2K)}.**",
        lambda: "planned as {1:.2f} times BF16, where two machines gave {0:.2f}.".format(
            *eight_layers()
        ),
        *(partial(real_row, *each, run) for run in (FOUR, TWO, ADAPTERS) for each in REAL_ROWS),
        lambda: missing_rows(trust_rows(), "docs/research/steps.md"),
        lambda: missing_rows(by_ring(), "docs/research/steps.md"),
        lambda: missing_rows(at_7500(), "docs/research/steps.md"),
        unstalled,
        decode_errors,
        by_context,
    ],
    "docs/research/speed.md": [
        lambda: (
            f"| {times(SHORT, LINEAR):.2f} | {times(LONG, LINEAR):.2f} | "
            f"{decode('rollout-8b-h200', 'fp8-linear-deepgemm')} |"
        ),
        lambda: (
            f"| {times(SHORT, KV):.2f} | {times(LONG, KV):.2f} | {decode('rollout-8b-h200', KV)} |"
        ),
        lambda: f"| {times(AGAIN, E2E):.2f} to {times(SHORT, E2E):.2f} | {times(LONG, E2E):.2f} |",
        lambda: f"{times(AGAIN, BOTH):.2f} to {times(SHORT, BOTH):.2f} | {times(LONG, BOTH):.2f} |",
    ],
    "docs/research/decode.md": [
        lambda: f"{profiled_gains(LINEAR, 'decode-30b')} times as fast",
        lambda: f"with `fp8-kv-attn` {profiled_gains(KV, 'decode-30b')}.",
        *(partial(experts_table, *each) for each in decode_rows("decode-30b", "bf16")),
        *(partial(lambda n: experts_rates()[n], n) for n in range(3)),
        lambda: missing_rows(xqa_rows(), "docs/research/decode.md"),
        lambda: f"A step of 8B is {xqa_of_steps()} times as fast as with vLLM's",
        lambda: f"of 30B-A3B {xqa_of_steps('30b')} times",
        lambda: f"with `fp8-kv-attn` it is {experts_by_xqa()} times",
        decode_kls,
        *(partial(lambda n: beside_xqa()[n], n) for n in range(2)),
        lambda: f"**Against BF16 it is {xqa_of_bf16()} times,**",
        lambda: f"with FlashAttention 3, and {xqa_of_bf16()} with",
        xqa_alone,
        lambda: "at up to {:.1f} TB/s of the GPU's 4.8, FlashAttention 3 at {:.1f} ([".format(
            *(
                max(row["tb_s"] for heads in (8, 4) for row in decode_ways(way, heads).values())
                for way in (XQA, FA3)
            )
        ),
        lambda: f"either kernel is off by {xqa_errors()} from attention in FP32",
        lambda: f"cache and attention {profiled_gains()} times",
        lambda: f"it is {decode('rollout-8b-h200', KV)} times",
        experts_decode,
        *(partial(experts_row, *point) for point in EXPERTS_POINTS),
    ],
    "docs/recipes.md": [
        lambda: f"{of('checkpoint-memory-cpu', lambda it: it['peak resident bytes']) / 1e9:.1f} GB",
        lambda: f"KL of {served('fp8-linear'):.1e}".replace("e-0", "e-"),
        *(partial(long_row, *row) for row in LONG_ROWS),
        lora_of_8b,
    ],
    "docs/correction.md": [
        *(partial(bounds, signal) for signal in SIGNALS),
        lambda: f"above {GROWTH.watch:g} | above {GROWTH.unstable:g} |",
    ],
    "docs/research/correction.md": [
        *(partial(studied, *cell) for cell in STUDIED),
        *(partial(predicted, mask) for mask in ("token", "geometric", "mean-k3", "max-k3")),
        lambda: f"without correction, {told(TINY, 'fp8-kv-attn-none')} points",
        lambda: f"`mis`, {told(TINY, 'fp8-kv-attn-mis')}; with `tis` it is open",
        lambda: told(TINY, "fp8-kv-attn-tis").removesuffix(", open"),
        lambda: f"`mis` loses most, {told(WORKING, 'fp8-kv-attn-mis')}, then",
        lambda: f"`tis`, {told(WORKING, 'fp8-kv-attn-tis')}; no correction",
    ],
    "docs/research/mismatch.md": [
        *(partial(aligned_row, "H200", E2E, align) for align in ("none", "cheap")),
        *(partial(aligned_row, "H100", each, "cheap") for each in (LINEAR, E2E, "bf16")),
        *(partial(aligned_row, "8b8-H100", E2E, align) for align in ("none", "cheap")),
        *(
            partial(exact_row, "nemo-exact-h100", *cell, seed)
            for cell in EXACT_CELLS
            for seed in (42, 43, 44)
            if (cell[0], seed) != ("bf16", 44)
        ),
        *(
            partial(exact_row, "nemo-exact-8b8-h100", E2E, each)
            for each in ("exact", "cheap", "none")
        ),
        partial(exact_row, "nemo-exact-8b8-h100", "bf16", "none"),
        exact_attention,
        *(partial(exact_step, E2E, "exact", step) for step in (1, 2, 3)),
        lambda: "largest KL {}; BF16's {}".format(*exact_steps_of_2k()),
        partial(exact_step, "bf16", "none", 1),
        partial(short_answers, "unfilled", "4,096 tokens, not filled"),
        partial(short_answers, "filled", "4,096 tokens, filled to 2,944"),
        partial(short_answers, "small", "1,024 tokens, filled to 1,024"),
        *(partial(lambda n: unequal_rows()[n], n) for n in range(3)),
        lambda: (
            "largest KL {4}. Rewards rise from {2} to {0} in the mean of steps 15 to 24, in BF16 "
            "from {3} to {1},"
        ).format(*exact_learns()),
        lambda: exact_decode_in(
            "decode of 8B {0} (256 sequences of 1k), {1} (8 of 4k), {2} (one of 8k)"
        ),
        *(partial(heads_of_64, each) for each in ("bf16", E2E, LINEAR)),
    ],
    "docs/research/experiment.md": [
        *(partial(decided_row, "113m", cell, LLAMA) for cell in DECIDED_113M),
        *(partial(decided_row, "113m-moe", cell, MOE) for cell in (f"{LINEAR}-none", f"{KV}-tis")),
        *(partial(decided_row, it, cell) for it in ("eighty", "long") for cell in KV_CELLS[:2]),
    ],
    "notebooks/01-precision.ipynb": [
        lambda: f"{times(SHORT, E2E):.2f} times as fast as BF16 at answers of 2,000",
        lambda: f"and {times(LONG, E2E):.2f} times at 7,168",
        lambda: f"it is {times(SHORT, BOTH):.2f} and {times(LONG, BOTH):.2f}",
        lambda: f"were {real_gain('step')} as fast as BF16 on four H200s, {two_h200s()} on two",
        lambda: f"made a step {real_gain('step')} as fast on four H200s, {two_h200s()} on two",
        lambda: "it was {1} times as fast, {0} by".format(*kv_on_four().split(" to ")),
        lambda: "took {:.1f} to {:.1f} seconds".format(*real_refits()),
        lambda: "takes {:.0%} less time".format(1 - refit("bytes") / refit("stock")),
        lambda: "costs {:.0f} ms by these medians, {:.0%}".format(*proof()),
        lambda: "| FP8's gain, for 8B on 8 H100 {} to {} times by the plan |".format(
            *(pick(planned("h100", 2048)[each] for each in FP8S) for pick in (min, max))
        ),
    ],
    CLUSTER: [
        swept,
        lambda: f"its precisions, in {sweep_hours('sweep=precision', 'model=llama31-8b')}.",
    ],
    "docs/research/rollout-backends.md": [
        predicted_loop,
        predicted_sampling,
        predicted_apart,
        predicted_fusion,
        predicted_tiles,
    ],
    "docs/research/nemo.md": [
        lambda: f"takes {refit('bytes', QUIET):.2f} s with every byte proven. The proof",
        lambda: "The proof costs {:.0f} ms of it, {:.0%} of a refit".format(*proof(QUIET)),
        lambda: f"Stock NeMo RL took {refit('stock'):.2f} s in",
        lambda: f"where ours took {refit('bytes'):.2f}",
        lambda: f"the layers, the proof costs {proof('glue-8b16-h200')[0]:.0f} ms",
        lambda: f"{proof(QUIET)[1]:.1%} of a refit without one; in the middle round",
        lambda: f"in the middle round {proof_by_rounds():.1%}. The goal was 3%.",
        lambda: "stopped {} of the {}. The".format(*(COUNTED[n] for n in stopped("ledger"))),
        lambda: f"stopped all\n{COUNTED[min(stopped('full'))]}. `bytes`",
    ],
    "docs/peers.md": [saved],
    "docs/research/log.md": [
        lambda: missing_rows(set_up_at_7500(), "docs/research/log.md"),
        lambda: "[{} minutes and {} seconds]".format(*fusion_wait()),
        lambda: "had {:.1f} GiB page-locked. When our worker had".format(*converted()),
        lambda: "all but {1:.1f} were free again".format(*converted()),
        lambda: f"made one step, {all_of_30b_again()[0]:.1f} s with compilation, and",
        lambda: f"NeMo RL's set-up {all_of_30b_again()[1]:.0f} with the",
        lambda: (
            "A checkpoint of {:.1f} GiB, by formula, left [{:.1f} taken with NeMo RL's save; "
            "{:.1f} after ours]"
        ).format(*staged()),
        lambda: "of 8B on 8 H100 in BF16 goes from {} GiB".format(
            host_memory_before_and_now("model=llama31-8b", "precision=bf16")
        ),
        lambda: "of 30B-A3B on 8 H200 in `fp8-kv-attn` from {}.".format(
            host_memory_before_and_now(
                "model=qwen3-30b-a3b", "precision=fp8-kv-attn", "cluster.gpu=h200"
            )
        ),
    ],
    "docs/research/measured.md": [
        sixteen_experts,
        lambda: all_of_30b()[3],
        lambda: (
            "one of {:.1f} GiB by formula leaves {:.1f} taken with NeMo RL's `save_checkpoint`, "
            "{:.1f} after ours"
        ).format(*staged()),
        formats_measured,
        lambda: exact_decode_in(
            "{0} with 256 sequences of 1k tokens, {1} with 8 of 4k, {2} with one of 8k; "
            "BF16's over it: {4}, {5}, {6}"
        ),
    ],
    "docs/algorithms.md": [replayed_30b, *(partial(replayed, each) for each in (128, 64, 16, 4))],
    "notebooks/03-end-to-end.ipynb": [
        lambda: f"ends {told('dense', 'fp8-e2e-tis', LLAMA).removesuffix(', open')} points",
    ],
    "docs/precision.md": [
        lambda: "gains {} times on H100 and {} on H200 by".format(*experts_gains()),
        lambda: "A whole step gains {} and {} times so".format(*experts_gains()),
        lambda: f"Qwen3-30B-A3B with {experts_gains()[0]} on H100.",
        *(partial(exact_summary, *cell) for cell in EXACT_CELLS),
        exact_attention,
        lambda: "took {} ms with it, {} without.".format(*exact_decode()),
        lambda: exact_decode_in(
            "takes {0} times as long as without it. With 8 of 4k it takes {1} times, with one of "
            "8k {2} times. The last is {3} times BF16's"
        ),
        lambda: "reward rose from {2} to {0}, BF16's from {3} to {1}.".format(*exact_learns()),
        lambda: "were {} as fast, of 2,000 tokens {}.".format(
            *(real_gain("step", name) for name in (ALIKE, ALIKE_2K))
        ),
        lambda: "KL was at most {}, BF16's {}.".format(*exact_steps_of_2k()),
        partial(sixty_steps_row, "tiny Llama", "d"),
        partial(sixty_steps_row, "tiny Qwen3-MoE", "m"),
        experts_means,
        noise_area,
        *(partial(four_bits_learn, number) for number in range(5)),
        lambda: f"its KL is {late_kl('fp8-e2e-tis') / late_kl('fp8-linear-tis'):.1f} times that",
        lambda: f"Rollouts were {rollout_share(FOUR)} of a",
        lambda: f"on four H200s, {rollout_share(TWO)} on two,",
        lambda: f"{real_gain('step')} BF16 on four H200s, {real_gain('step', TWO)}".removesuffix(
            " times"
        ),
        lambda: f"and {rollout_share(ADAPTERS)} with LoRA",
        lambda: f"the layers trained {slower_at_tensor_2()} times as long",
        lambda: f"for {ranges():.2%} of that pass",
        lambda: f"{MOE_DECODE[LINEAR, 'h100']()} times as fast on one H100 with `fp8-linear`",
        lambda: f"and {MOE_DECODE[KV, 'h100']()} times with `fp8-kv-attn`. On an H200",
        lambda: (
            f"{MOE_DECODE[LINEAR, 'h200']()}\n  times with `fp8-linear`. "
            f"With an FP8 cache it is {experts_by_xqa()}"
        ),
        *(
            partial(told_row, study, cells)
            for study, cells in ((TINY, KV_CELLS), (WORKING, KV_CELLS), ("moe", LINEAR_CELLS))
        ),
    ],
}


@pytest.mark.parametrize(
    ("page", "said"), [(page, said) for page, each in SAID.items() for said in each]
)
def test_a_number_on_a_page_is_the_result_files(page, said):
    assert said() in (ROOT / page).read_text()


@pytest.mark.parametrize("name", draw_steps.DRAWINGS)
def test_the_figure_shows_the_files_numbers(name):
    texts = re.findall(r">([^<>]+)</text>", (draw_steps.FOLDER / f"{name}.svg").read_text())
    for file in draw_steps.DRAWINGS[name].panels.values():
        assert {draw_steps.label(row) for row in draw_steps.drawn(file).values()} <= {*texts}


@pytest.mark.parametrize("name", draw_decode.DRAWINGS)
def test_the_decode_figure_shows_the_files_numbers(name):
    texts = re.findall(r">([^<>]+)</text>", (draw_steps.FOLDER / f"{name}.svg").read_text())
    for point in draw_decode.POINTS:
        rows = {cell: decode_rows(name, cell)[point] for cell in draw_decode.CELLS}
        assert {draw_decode.label(row, rows["bf16"]) for row in rows.values()} <= {*texts}


def shown(page):
    """Each command of a page, with the lines below it."""
    for block in re.findall(r"```\n(\$ .*?)```", page.read_text(), re.S):
        command, *lines = block.splitlines()
        yield command.removeprefix("$ "), [line for line in lines if line != "..."]


def test_the_tours_commands_print_what_the_tour_shows(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    found = list(shown(ROOT / "docs" / "tour.md"))
    assert len(found) == 8
    for command, lines in found:
        python, flag, *words = command.replace("outputs/tour", f"{tmp_path}/tour").split()
        assert (python, flag) == ("python", "-m")
        ran = typed(*words)
        said = [line.rstrip() for line in (ran.stdout + ran.stderr).splitlines()]
        wanted = [line.replace("outputs/tour", f"{tmp_path}/tour") for line in lines]
        assert [line for line in wanted if line not in said] == [], ran.stdout + ran.stderr


def test_the_page_of_ones_own_model_and_reward_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    page = ROOT / "docs" / "your-model.md"
    [mine] = re.findall(r"^```python\n(.+?)^```", page.read_text(), re.M | re.S)
    (tmp_path / "my_reward.py").write_text(mine)
    found = list(shown(page))
    assert len(found) == 2
    for command, lines in found:
        words = command.replace("my_reward.py", f"{tmp_path}/my_reward.py").split()[2:]
        ran = typed(*words, f"outputs={tmp_path}")
        said = [line.rstrip() for line in ran.stdout.splitlines()]
        assert [line for line in lines if line not in said] == [], ran.stdout + ran.stderr
    [metrics] = tmp_path.glob("tiny-llama/*/*/metrics.jsonl")
    means = [json.loads(line)["reward/mean"] for line in metrics.read_text().splitlines()[1:]]
    assert len(means) == 20 and any(mean * 512 % 2 for mean in means)  # halves are among them


def test_the_commands_of_the_user_pages_plan(capsys):
    """Every `recipes.grpo` and `recipes.plan` line of README and the user pages composes."""
    lines = dict[str, str]()
    for page in PAGES:
        if "research" in page.parts:
            continue
        typed_there = re.compile(r"^python -m recipes\.(?:grpo|plan) (.+?)(?:  +#.*)?$", re.M)
        lines |= dict.fromkeys(typed_there.findall(page.read_text()), page.name)
    assert len(lines) > 20
    for line, page in lines.items():
        own = ("cluster=my", "correction=my", "--keys")
        words = [word for word in line.split() if not word.startswith(own)]
        assert plan_line(words) == 0, f"{page}: {line}: {capsys.readouterr().err}"


def test_readme_makes_the_model_that_its_next_line_asks_for(tmp_path):
    """Without the model, the line says how to make it: as README does."""
    text = (ROOT / "README.md").read_text()
    [line] = re.findall(r"^python -m (recipes\.grpo model=small-llama .+)$", text, re.M)
    ran = subprocess.run(
        [sys.executable, "-m", *line.split()], cwd=tmp_path, env=os.environ | {"PYTHONPATH": ROOT},
        capture_output=True, text=True,
    )  # fmt: skip
    [advice] = re.findall(r"(python -m recipes\.make_model .+) makes it", ran.stderr)
    assert f"{advice} " in text


def test_the_example_of_nemos_readme_runs():
    """That of glue's is in tests/glue, which runs with torch alone."""
    text = (ROOT / "fp8_nemo" / "nemo" / "README.md").read_text()
    [example] = re.findall(r"^```python\n(.+?)^```", text, re.M | re.S)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
