from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from memfit.cli import main


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.out.rstrip().splitlines()[-1]


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Costs measured in this session only, on one thread: these models are tiny."""
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path_factory.getbasetemp() / "costs"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def memfit(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs a command line given as words."""

    def run(*words: object) -> Outcome:
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return Outcome(code=code, out=out, err=err)

    return run
