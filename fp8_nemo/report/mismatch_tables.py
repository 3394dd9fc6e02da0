"""Show what a measurement says: tables, and a correction whose bounds come from it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from fp8_nemo.correction.quantiles import MeasureError, Measurement
from fp8_nemo.recipe.compose import ComposeError, compose, option_folder, option_names
from fp8_nemo.recipe.options.correction import DIVERGENCES, RATIOS, Correction
from fp8_nemo.runs.metrics import write_whole
from fp8_nemo.runs.run_dir import report_dir
from fp8_nemo.runs.terminal import table

if TYPE_CHECKING:  # the verb has looked for torch before anything here is called
    from fp8_nemo.correction.mismatch import LogprobPair

OWN = re.compile(r"my[\w.-]*")
"""Names that git ignores in conf/correction, as a site's own in conf/cluster."""


def mismatch_tables(
    pairs: Collection[LogprobPair], measurement: Measurement, reject: float
) -> Iterator[Table]:
    """Lay out the mismatch, what every option would do to it, and bounds for every statistic.

    Args:
        pairs: every batch.
        measurement: of them.
        reject: the wanted share of tokens, above 0 and below 1.
    """
    yield _distribution(pairs, measurement)
    yield _effects(pairs)
    yield _proposals(measurement, reject)


def _distribution(pairs: Collection[LogprobPair], measurement: Measurement) -> Table:
    """Lay out KL and 99th percentile of `|log_ratio|`, in all, by position and by length."""
    from fp8_nemo.correction.measure import by_length, by_position

    title = f"mismatch of {measurement.tokens:,} tokens in {measurement.sequences:,} sequences"
    parts = {
        "all at": by_position(pairs, parts=1),
        "position": by_position(pairs),
        "length": by_length(pairs),
    }
    rows = [
        (f"{what} {name}", f"{kl:.2e}", f"{p99:.3f}")
        for what, found in parts.items()
        for name, kl, p99 in found
    ]
    return table(title, ("tokens", "KL (k3)", "p99 |log ratio|"), rows)


def _effects(pairs: Collection[LogprobPair]) -> Table:
    """Lay out what every option of conf/correction would do to these batches."""
    from fp8_nemo.correction.measure import effect

    rows = []
    for name in option_names("correction"):
        try:
            [recipe] = compose([f"correction={name}", "correction.measurement=null"])
        except ComposeError as error:  # a site's own file
            rows.append((name, error.lines[0], "", "", ""))
            continue
        found = effect(pairs, recipe.correction)
        shares = f"{found.clipped:.2%}", f"{found.rejected:.2%}"
        rows.append((name, *shares, f"{found.ess:.4f}", f"{found.mean:.4f}"))
    heads = ("correction", "clips", "rejects", "ESS", "mean multiplier")
    return table("what each correction would do", heads, rows)


def _proposals(measurement: Measurement, reject: float) -> Table:
    """Lay out for every statistic the bounds that reject the wanted share."""
    rows = []
    for name in (*RATIOS, *DIVERGENCES):
        low, high = measurement.bounds(name, reject)
        share = measurement.rejected(Correction(mask=name, low=low, high=high))
        rows.append((name, "" if low is None else f"{low:.6g}", f"{high:.6g}", f"{share:.2%}"))
    title = f"bounds that reject {reject:.2%} of these tokens"
    return table(title, ("correction.mask", "low", "high", "rejects"), rows)


def write_measurement(measurement: Measurement, measured: Path) -> Path:
    """Write `report/mismatch.json` beside what was measured; return the file.

    Args:
        measurement: what is written.
        measured: a run directory, or a file in the folder that is to get the report.

    Raises:
        OSError: it cannot be written.
    """
    file = report_dir(measured if measured.is_dir() else measured.parent) / "mismatch.json"
    write_whole(file, measurement.to_json())
    return file


def write_option(
    name: str | None, mask: str, reject: float, measurement: Measurement, file: Path
) -> list[Path]:
    """Write `conf/correction/NAME.yaml`: min(r_t, 2) where a statistic is in measured bounds.

    Args:
        name: beginning with `my`, which git ignores; without a name nothing is written.
        mask: a row of `correction.STATISTICS`.
        reject: the wanted share of tokens.
        measurement: what the bounds are taken from.
        file: where it stands.

    Raises:
        MeasureError: the name is not one that git ignores, or is taken; nothing differs from
            nothing in what was measured.
    """
    if not name:
        return []
    path = option_folder("correction") / f"{name}.yaml"
    if not OWN.fullmatch(name):
        raise MeasureError(f"--write {name}: must begin with my, as git ignores such options")
    if path.exists():
        raise MeasureError(f"--write {name}: {path} is there; take another name, or delete it")
    low, high = measurement.bounds(mask, reject)
    if high == low or high == 0:
        raise MeasureError(
            f"--write {name}: {mask} is {high:g} wherever it was measured, and bounds from there "
            "would reject all that differs; measure a run whose rollouts are in FP8"
        )
    share = measurement.rejected(Correction(mask=mask, low=low, high=high))
    bounds = {"mask": mask, "low": low, "high": high, "measurement": str(file.absolute())}
    lines = [
        f"# min(r_t, 2) where {mask} is in bounds that rejected {share:.2%} of "
        f"{measurement.tokens:,} measured tokens",
        "defaults: [tis, _self_]",
        "",
        f"name: {name}",
        *(f"{key}: {value}" for key, value in bounds.items() if value is not None),
    ]
    write_whole(path, "\n".join(lines) + "\n")
    return [path]
