from __future__ import annotations

import pytest
import torch
from torch import nn

import benchmarks.gpu.main as gpu
import benchmarks.overhead.main as overhead
import benchmarks.peers.main as peers
import benchmarks.pipeline.convolutions as convolutions
import benchmarks.planning.main as planning
import benchmarks.seeds.main as seeds
import benchmarks.swap.main as swap
import benchmarks.tile.main as tile
import benchmarks.tile.seed000 as seed000
import benchmarks.tile.tokens as tokens
from memfit.zoo import Example
from tests.short_nets import RESNET
from tests.small_disk import keep_disk

GPT = "zoo:gpt?layers=1&width=32&heads=2&positions=32"
RANDOM = f"{__file__}:with_dropout"


@pytest.fixture(autouse=True)
def own_cost_cache(tmp_path_factory, monkeypatch):
    """The costs and links of these tests, measured once; what they swap is gone when they end."""
    path = str(tmp_path_factory.getbasetemp() / "benchmarks")
    monkeypatch.setenv("MEMFIT_CACHE", path)
    monkeypatch.setenv("MEMFIT_SWAP_DIR", path)
    keep_disk(1e9)


def trunk(batch: int, shape: tuple[int, ...]) -> Example:
    """Two convolutions over an image, the least that tiles are for."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.LazyLinear(4))
    x = torch.randn(batch, *shape)
    model(x)
    return Example(model=model, args=(x,), loss_fn=torch.mean)


def with_dropout(batch: int, shape: tuple[int, ...]) -> Example:
    """A few layers with random ops, whose memory is nearly all their results: they compile in a part of a GPT's time.

    A step that runs its random ops again with other numbers has other gradients, and 4096 samples fill the buffers of
    the threads that swap several times.
    """
    layers: list[nn.Module] = []
    for features in (*shape, 64, 64):
        layers += [nn.Linear(features, 64), nn.GELU(), nn.Dropout(0.2)]
    model = nn.Sequential(*layers, nn.Linear(64, 4))
    return Example(model=model, args=(torch.randn(batch, *shape),), loss_fn=lambda output: output.square().mean())


def rows(text: str) -> list[list[str]]:
    """Cells of all table rows, headers included, separators not."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_overhead(capsys):
    overhead.main(["--only", f"{GPT}@4@32", "--budgets", "90", "--wall", "1"])
    (_, model, header, first, timed) = rows(capsys.readouterr().out)
    assert model[0] == first[0] == "gpt"
    found = dict(zip(header, timed, strict=True))
    assert float(found["measured peak MiB"]) <= float(found["budget MiB"])
    assert found["tensors that differ"].startswith("0 of ")
    assert found["overhead, wall clock %"]


def test_overhead_without_measuring(capsys):
    overhead.main(["--only", f"{RANDOM}@1024@32", "--budgets", "90,1", "--no-measure"])
    (*_, header, fits, not_) = rows(capsys.readouterr().out)
    assert dict(zip(header, fits, strict=True))["measured peak MiB"] == ""
    assert "does not fit" in not_[3]


def test_peers(capsys):
    peers.main(["--only", f"{GPT}@4@32", "--peers", "budget 0.2", "--wall", "1"])
    header, *cells = rows(capsys.readouterr().out)
    found = [dict(zip(header, row, strict=True)) for row in cells]
    plain, budget = found
    assert plain["peer's gradients"] == "equal"
    assert budget["peer's gradients"].startswith("WRONG")  # random ops run again with another state
    assert {row["memfit's bits"] for row in found} <= {"equal", ""}


def test_seed_003(capsys):
    seeds.main(["--only", "003", "--batches", "2", "--run", "2", "--budget", "1MB", "--model", RANDOM, "--shape", "32"])
    header, memfit = rows(capsys.readouterr().out)
    assert float(dict(zip(header, memfit, strict=True))["peak after, measured GB"]) <= 0.001


def test_seed_004(capsys):
    seeds.main(["--only", "vgg16", "--run", "1", "--case", "zoo:keras-cnn@1@1x16x16"])
    *_, memfit = rows(capsys.readouterr().out)
    assert memfit[1] == "memfit, held as the seed"
    assert memfit[3] == memfit[4]  # predicted and measured


def test_largest_batch(capsys):
    seeds.main(
        ["--only", "max-batch", "--model", "zoo:mlp?width=64&layers=1", "--shape", "64", "--batch-budget", "4MB"]
    )
    _, *seed, swap, recompute, auto = rows(capsys.readouterr().out)
    assert [row[1] for row in seed] == ["seed 001, swap", "seed 001, recompute", "seed 001, hybrid"]
    assert float(auto[5]) >= float(recompute[5]) > 1
    assert float(swap[5]) >= 1


def test_seed_001(capsys):
    case = "zoo:mlp?layers=6&width=64@4096@16"  # whose checkpoints are to be swapped
    seeds.main(["--only", "001-resnet18", "--run", "1", "--wall", "1", "--case", case])
    header, *cells = rows(capsys.readouterr().out)
    found = {row[2]: dict(zip(header, row, strict=True)) for row in cells if row[1] == "memfit"}
    assert [row[1] for row in cells].count("seed 001") == 4
    assert {row["tensors that differ"][:5] for row in found.values()} == {"", "0 of "}
    for row in found.values():
        assert float(row["peak, measured MiB"]) <= 1.02 * float(row["peak MiB"])
    assert float(found["hybrid"]["host or disk peak MiB"]) > 0


def test_swap(capsys):
    swap.main(["--only", f"{RANDOM}@4096@32", "--budgets", "65", "--ways", "swap", "--wall", "1"])
    header, _, moved = rows(capsys.readouterr().out)
    found = dict(zip(header, moved, strict=True))
    assert float(found["measured peak MiB"]) <= float(found["predicted peak MiB"]) * 1.02
    assert found["tensors that differ"].startswith("0 of ") and found["moved out + in MiB"]


def test_a_slow_link(capsys):
    swap.main(["--only", f"{RANDOM}@4096@32", "--budgets", "50", "--link-share", "0.25"])
    header, row = rows(capsys.readouterr().out)
    found = dict(zip(header, row, strict=True))
    assert float(found["with swaps: extra %"]) <= float(found["recompute alone: extra %"])


def test_planning(capsys):
    planning.main(["--only", "zoo:mlp?width=32&layers=3@64@16", "--budgets", "99", "--fitted", "--repeats", "1"])
    header, planned, _, fitted = rows(capsys.readouterr().out)
    assert float(dict(zip(header, planned, strict=True))["planning s"]) < 60
    assert fitted[0] == "mlp"


def test_tile(capsys):
    tile.main(["--only", f"{__file__}:trunk@4@3x32x32", "--wall", "0"])
    header, row = rows(capsys.readouterr().out)
    found = dict(zip(header, row, strict=True))
    assert float(found["least with tiling MiB"]) <= float(found["least without tiling MiB"])
    assert found["gradients beyond rounding"].startswith("0 of ")


def test_tokens(capsys):
    sizes = ["--tokens", "96", "--width", "24", "--layers", "1", "--vocabulary", "900", "--repeats", "1"]
    cells: list[list[str]] = []
    for only, budget in (("projection", "least"), ("gpt2", "1.2")):
        tokens.main(["--only", only, "--budgets", budget, *sizes])
        header, *found = rows(capsys.readouterr().out)
        cells += found
    for row in cells:
        found = dict(zip(header, row, strict=True))
        assert float(found["peak MiB"]) < float(found["baseline peak MiB"])
        assert found["tensors beyond rounding"] == "0"
    assert len(cells) == 2


def test_gpu_on_a_cpu(capsys):
    gpu.main(["--only", f"{RANDOM}@256@32", "--budgets", "110", "--repeats", "1", "--device", "cpu"])
    header, plain, room = rows(capsys.readouterr().out)
    assert float(dict(zip(header, plain, strict=True))["step ms"]) > 0
    assert dict(zip(header, room, strict=True))["runs again"] == "0"


def test_seed_000(capsys):
    model = "zoo:vgg16-trunk?features=8"
    seed000.main(["--model", model, "--sizes", "32", "--grids", "2x2", "--shares", "", "--repeats", "1"])
    header, *cells = rows(capsys.readouterr().out)
    found = {row[1]: dict(zip(header, row, strict=True)) for row in cells}
    assert {"none", "checkpoint_sequential 5", "tile:2x2", "memfit, none's peak"} <= set(found)
    memfit = found["memfit, none's peak"]
    assert float(memfit["peak MiB"]) <= float(found["none"]["peak MiB"])


def test_weight_gradients_of_convolutions(capsys):
    convolutions.main(["--only", f"{RESNET}@2@3x32x32", "--repeats", "1"])
    header, row = rows(capsys.readouterr().out)
    found = dict(zip(header, row, strict=True))
    assert found["products"] == "3 of 6"  # all but the first and the two of the widest images
    assert float(found["times as quick"]) > 0
