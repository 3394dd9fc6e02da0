"""Plan a command line: all of its cells or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from fp8_nemo.correction.quantiles import verdict_of
from fp8_nemo.nemo_config.host import MAIN, Host, HostError
from fp8_nemo.plan.model import checkpoint_mistakes, position_mistakes
from fp8_nemo.plan.plan import Plan, PlanError, plan_recipe
from fp8_nemo.recipe.compose import Cell, ComposeError, compose_cells, refuse_cells
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.settled import Layout


def compose_plans(
    arguments: Iterable[str],
    host_of: Callable[[Recipe], Host] = lambda recipe: MAIN,
    layout_of: Callable[[Plan], Layout | None] = lambda plan: None,
) -> list[Plan]:
    """Compose a command line and plan every cell.

    Args:
        arguments: as for `compose`.
        host_of: gives the NeMo RL that a recipe would run in, as `checkout.host_of` finds it.
        layout_of: gives the layout with which a run was first submitted, which it keeps.

    Raises:
        ComposeError: with one line per distinct mistake in any cell, what a backend forbids
            included, or because two cells are one and the same run.
    """
    cells = compose_cells(arguments)
    planned = [_plan(cell, host_of, layout_of) for cell in cells]
    refuse_cells([cell.words for cell in cells], [lines for _, lines in planned])
    plans = [plan for plan, _ in planned if plan]
    _refuse_duplicates([cell.words for cell in cells], plans)
    return plans


def _plan(
    cell: Cell,
    host_of: Callable[[Recipe], Host],
    layout_of: Callable[[Plan], Layout | None],
) -> tuple[Plan | None, list[str]]:
    """Return one cell's plan, or None and why it cannot run; a measurement's notes come last."""
    recipe = cell.recipe
    measured = verdict_of(recipe.correction)
    lines = [str(each) for each in (*measured.mistakes, *checkpoint_mistakes(recipe.model))]
    try:
        plan = plan_recipe(recipe, host_of(recipe))
        if plan.layout and (first := layout_of(plan)) not in (None, plan.layout):
            plan = plan_recipe(recipe, host_of(recipe), first)
    except (PlanError, HostError) as error:
        return None, lines + str(error).splitlines()
    lines += map(str, position_mistakes(plan.settled))
    return dataclasses.replace(plan, notes=(*plan.notes, *cell.notes, *measured.notes)), lines


def _refuse_duplicates(cells: list[list[str]], plans: list[Plan]) -> None:
    """Refuse two cells of one name: they would write into one directory."""
    first: dict[str, list[str]] = {}
    lines = []
    for cell, plan in zip(cells, plans, strict=True):
        earlier = first.setdefault(plan.run_name, cell)
        if earlier is not cell:
            lines.append(f"{' '.join(cell)}: the same run as {' '.join(earlier)}; drop one of them")
    if lines:
        raise ComposeError(lines)
