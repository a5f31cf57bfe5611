from collections.abc import Callable, Iterator

import pytest
import torch

from memfit.zoo import Example


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are tiny: several threads on a busy machine only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    """Skips a test whose parameter `spec` needs a package that is not installed."""
    spec = getattr(request.node, "callspec", None) and request.node.callspec.params.get("spec")
    package = {"hf": "transformers", "timm": "timm", "torchvision": "torchvision"}.get(str(spec).partition(":")[0])
    if package:
        pytest.importorskip(package)


@pytest.fixture
def run_step() -> Callable[[Example], float]:
    """One forward and backward; checks that the loss is a finite scalar and every parameter gets a gradient."""

    def run(example: Example) -> float:
        output = example.model(*example.args, **example.kwargs)
        loss = output.loss if example.loss_fn is None else example.loss_fn(output)
        assert loss.shape == () and loss.isfinite()
        loss.backward()
        for name, parameter in example.model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert any(parameter.grad.abs().max() > 0 for parameter in example.model.parameters())
        return loss.item()

    return run
