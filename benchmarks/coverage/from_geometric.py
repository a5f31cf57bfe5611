"""Every convolution of PyTorch Geometric, two of each in a row, on one small random graph."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.script import NotBuilt, Sample, Script, train

__all__ = ["group", "names", "script"]

NODES, EDGES, WIDTH = 32, 200, 16

KNOWN: dict[str, Any] = {
    "in_channels": WIDTH,
    "out_channels": WIDTH,
    "channels": WIDTH,
    "hidden_channels": WIDTH,
    "heads": 2,
    "K": 2,
    "dim": 2,
    "kernel_size": 3,
    "num_relations": 3,
    "edge_dim": 4,
    "num_layers": 2,
    "k": 4,
    "num_nodes": NODES,
    "space_dimensions": 2,
    "propagate_dimensions": 4,
    "alpha": 0.1,
    "walk_length": 2,
    "num_heads": 2,
    "s": 2,
    "dropout": 0.1,
    "shared_weights": True,
    "num_types": 1,
    "num_edge_types": 2,
    "edge_type_emb_dim": 4,
    "edge_attr_emb_dim": 4,
    "hidden_size": WIDTH,
    "towers": 1,
    "out_heads": 1,
    "first_aggr": True,
    "filter_size": 2,
    "num_node_types": 1,
}


def names() -> Iterator[str]:
    from torch_geometric.nn import conv

    yield from (n for n in conv.__all__ if n.endswith("Conv") and n not in ("MessagePassing", "HeteroConv"))


def group(name: str) -> str:
    return "convolutions"


def script(name: str) -> Script:
    return train(lambda: sample(name))


class _OfAGraph(nn.Module):
    """One convolution with the rest of what it takes, so that the node features are the input."""

    def __init__(self, inner: nn.Module, taken: dict[str, Any]) -> None:
        super().__init__()
        self.first, self.inner, self.taken = nn.Linear(WIDTH, WIDTH), inner, taken

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> Any:
        given = {"edge_index": edge_index} if "edge_index" in self.taken else {}
        return self.inner(self.first(x).relu(), **(self.taken | given))


def sample(name: str) -> Sample:
    """A layer and a graph with whatever its signatures ask for."""
    from torch_geometric.nn import conv

    made = getattr(conv, name)
    wanted = inspect.signature(made.__init__).parameters
    options = {n: KNOWN[n] for n, p in wanted.items() if p.default is p.empty and n in KNOWN}
    perceptron = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    twice = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU())
    options |= {
        "GINConv": {"nn": perceptron},
        "GINEConv": {"nn": perceptron, "edge_dim": 4},
        "EdgeConv": {"nn": twice},
        "DynamicEdgeConv": {"nn": twice, "k": 4},
        "NNConv": {"nn": nn.Linear(4, WIDTH * WIDTH)},
        "PNAConv": {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([0, 4, 8, 4])},
        "PointNetConv": {"local_nn": nn.Linear(WIDTH + 3, WIDTH)},
        "PointGNNConv": {
            "mlp_h": nn.Linear(WIDTH, 3),
            "mlp_f": nn.Linear(WIDTH + 3, WIDTH),
            "mlp_g": nn.Linear(WIDTH, WIDTH),
        },
        "PDNConv": {"edge_dim": 4, "hidden_channels": WIDTH},
        "GMMConv": {"dim": 2, "kernel_size": 3},
        "GCN2Conv": {"alpha": 0.1},
        "SSGConv": {"alpha": 0.1},
        "APPNP": {"K": 2, "alpha": 0.1},
        "GPSConv": {"conv": conv.GCNConv(WIDTH, WIDTH), "heads": 2},
        "DirGNNConv": {"conv": conv.SAGEConv(WIDTH, WIDTH)},
        "FusedGATConv": {"in_channels": WIDTH, "out_channels": WIDTH},
    }.get(name, {})
    inner = made(**options)
    taken = _taken(inner, options)
    return Sample(model=_OfAGraph(inner, taken), args=(torch.randn(NODES, WIDTH), torch.randint(0, NODES, (2, EDGES))))


def _taken(inner: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = {
        "edge_index": None,
        "edge_type": torch.randint(0, 2, (EDGES,)),
        "edge_attr": torch.rand(EDGES, int(options.get("edge_dim", options.get("dim", 4)))),
        "pos": torch.randn(NODES, 3),
        "normal": torch.nn.functional.normalize(torch.randn(NODES, 3), dim=-1),
        "node_type": torch.zeros(NODES, dtype=torch.long),
        "pseudo": torch.rand(EDGES, 2),
        "x_0": torch.randn(NODES, WIDTH),
        "x0": torch.randn(NODES, WIDTH),
        "pos_edge_index": torch.randint(0, NODES, (2, EDGES)),
        "neg_edge_index": torch.randint(0, NODES, (2, EDGES)),
        "hyperedge_index": torch.randint(0, 12, (2, EDGES)),
        "batch": None,
    }
    parameters = list(inspect.signature(inner.forward).parameters.items())[1:]
    needed = {n for n, p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    if "edge_attr" in dict(parameters) and ("edge_dim" in options or "dim" in options):
        needed.add("edge_attr")
    needed |= {"edge_type"} & {n for n, _ in parameters}
    if isinstance(options.get("nn"), nn.Linear):  # makes a weight of each edge
        needed.add("edge_attr")
    if needed - set(known):
        raise NotBuilt(f"no input is known for {', '.join(sorted(needed - set(known)))}")
    return {n: known[n] for n, _ in parameters if n in needed}
