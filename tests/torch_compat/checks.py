"""Checks of private interfaces, each with the names that it uses."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Checks"]


class Checks(dict[Callable[[], None], tuple[str, ...]]):
    """The names that each check uses."""

    def uses(self, *names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
        """Registers a check of these names."""

        def register(check: Callable[[], None]) -> Callable[[], None]:
            self[check] = names
            return check

        return register

    def checked(self) -> set[str]:
        """All names that are checked."""
        return {name for names in self.values() for name in names}
