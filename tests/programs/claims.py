"""Claims about a library of torch: programs that check one claim each on the ranks of a mesh.

All claims run in one start of the ranks, and what fails is reported claim by claim.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import partita as pt

__all__ = ["Claims", "raises"]

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
        check: takes the mesh. It raises if the claim is wrong.
        tests: the tests of torch that make this claim.
        sizes: the sizes of the mesh, by axis.
        differs: what differs from torch, in words that stand on the page about torch.
    """

    check: Callable[[Any], None]
    tests: tuple[str, ...]
    sizes: Sizes
    differs: str

    @property
    def is_about_four_ranks(self) -> bool:
        return math.prod(self.sizes.values()) == 4


class Claims(list[Claim]):
    """A list of claims, which `@claims.add("test_of_torch")` extends.

    Args:
        sizes: the sizes of the mesh of a claim that names none.
    """

    def __init__(self, sizes: Sizes):
        self.sizes = sizes

    def add(
        self, *tests: str, sizes: Sizes | None = None, differs: str = ""
    ) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
        """Returns a decorator that adds a claim."""

        def add(check: Callable[[Any], None]) -> Callable[[Any], None]:
            self.append(Claim(check, tests, sizes or self.sizes, differs))
            return check

        return add

    def run_on_threads(self, *checks: Callable[[Any], None]) -> dict[str, str]:
        """Check some claims with ranks in one process, by default all that Gloo does not check.

        Returns the errors by the name of the claim.
        """
        wrong = {}
        for claim in self:
            if claim.check not in checks if checks else claim.is_about_four_ranks:
                continue
            with pt.ranks(**claim.sizes) as world:
                try:
                    world.run(claim.check)
                except Exception as error:
                    wrong[claim.check.__name__] = describe_error(error)
        return wrong

    def run_on_gloo(self) -> dict[str, str]:
        """Check the claims about four ranks. Every rank, a process, calls this.

        Returns the errors by the name of the claim.
        """
        wrong = {}
        for claim in filter(lambda claim: claim.is_about_four_ranks, self):
            sizes = tuple(claim.sizes.values())
            mesh = pt.init_device_mesh("cpu", sizes, mesh_dim_names=tuple(claim.sizes))
            try:
                claim.check(mesh)
            except Exception as error:
                wrong[claim.check.__name__] = describe_error(error)
        return wrong

    def list_unwritten(self, page: str) -> set[str]:
        """Returns the differences from torch that are not stated on a page."""
        text = " ".join(page.split()).lower()
        return {c.differs for c in self if " ".join(c.differs.split()).lower() not in text}


def describe_error(error: BaseException) -> str:
    lines = traceback.extract_tb(error.__traceback__)
    at = next((f"{f.name}:{f.lineno} " for f in reversed(lines) if "/tests/" in f.filename), "")
    return f"{at}{type(error).__name__}: {error}"


@contextmanager
def raises(kind: type[Exception] | tuple[type[Exception], ...], *texts: str) -> Iterator[None]:
    """Expect an error of this kind with all of these texts."""
    try:
        yield
    except kind as error:
        missing = [text for text in texts if text not in str(error)]
        if missing:
            raise AssertionError(f"{missing} not in: {type(error).__name__}: {error}") from error
        return
    raise AssertionError(f"no error with {' and '.join(texts)}")
