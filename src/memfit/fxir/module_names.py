"""Names of modules: the user's module that an op belongs to, by its name in `named_modules`.

Dynamo records for each node the modules whose code was running, by the path over which Dynamo reached them, such as
`L['self'].layer1._modules['0']`. After a graph break the path begins at a variable of the resumed code
(`L['___stack0']`). Such a path tells a reader nothing, and blocks of one module look like blocks of other modules.

The technique: a path that leads to a name of the model becomes that name. For any other path, the record also holds the
identity of the module, by which it is found in the model.

Known limits: a module that is called under two names gets the name of the path that leads to it; after a graph break it
gets the first name.
"""

from __future__ import annotations

from torch import fx, nn

__all__ = ["module_of", "name_modules"]


def name_modules(graph: fx.Graph, model: nn.Module) -> None:
    """Corrects the paths of modules in the records of a Dynamo graph where they do not lead to a name of the model."""
    modules = list(model.named_modules(remove_duplicate=False))
    names = {str(id(module)): name for name, module in reversed(modules)}
    known = {name for name, _ in modules}
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if not stack:
            continue
        node.meta["nn_module_stack"] = {
            key: (path if _clean(str(path)) in known else _path(names, key, path), *rest)
            for key, (path, *rest) in stack.items()
        }


def _path(names: dict[str, str], key: object, path: str) -> str:
    name = names.get(str(key).partition("@")[0])
    return path if name is None else f"L['self'].{name}" if name else "L['self']"


def module_of(node: fx.Node) -> str:
    """Qualified name of the module that called the node, `""` if it is the root or unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        return _clean(str(path))
    return ""


def _clean(path: str) -> str:
    """Converts `L['self'].layer1._modules['0'].conv1` to `layer1.0.conv1`."""
    path = path.replace("__dict__.", "").replace(".__dict__", "").replace("['_modules']", "._modules")
    path = (
        path.replace("._modules['", ".")
        .replace("_modules['", "")
        .replace("._modules.", ".")
        .replace("']", "")
        .replace("L['", "")
    )
    path = path.replace("[", ".").replace("]", "").replace("'", "").replace('"', "")
    parts = [p for p in path.split(".") if p]
    while parts and parts[0] in ("self", "impl", "__self__", "model", "fn", "L") and len(parts) >= 1:
        if parts[0] == "model" and len(parts) > 1 and "__self__" not in path and "impl" not in path:
            break
        parts = parts[1:]
    return ".".join(parts)
