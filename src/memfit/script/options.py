"""What `memfit run` was asked for, and how child processes learn it: by two variables of the environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass

from memfit.errors import SpecError

__all__ = ["ScriptOptions", "from_environment", "into_environment"]

_BUDGET = "MEMFIT_BUDGET"
_MORE = "MEMFIT_RUN"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions:
    """How the training steps of a script are planned.

    Attributes:
        budget: as for `memfit.fit`; shared by all models that the script trains.
        levers: `"bitwise"` or `"all"`.
        tiers: as for `memfit.fit`.
        search_seconds: as for `memfit.fit`.
        dry_run: whether the script ends at its first training call, when it is known how this is planned.
    """

    budget: str = "auto"
    levers: str = "bitwise"
    tiers: str | None = None
    search_seconds: float = 8.0
    dry_run: bool = False


def into_environment(options: ScriptOptions, environment: MutableMapping[str, str]) -> None:
    """Writes the options for child processes, where `memfit_budget.pth` of the installed package sees the budget."""
    environment[_BUDGET] = options.budget
    environment[_MORE] = json.dumps({k: v for k, v in asdict(options).items() if k != "budget"})


def from_environment(environment: Mapping[str, str]) -> ScriptOptions | None:
    """The options in the environment; None without a budget there.

    Raises:
        SpecError: if they are damaged.
    """
    budget = environment.get(_BUDGET)
    if not budget:
        return None
    try:
        more = json.loads(environment.get(_MORE) or "{}")
        return ScriptOptions(budget=budget, **more)
    except (TypeError, ValueError) as error:
        raise SpecError(f"the variable {_MORE} holds no options of memfit run: {error}") from error
