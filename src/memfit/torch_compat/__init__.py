"""The private interfaces of torch that memfit uses, each imported and named here and nowhere else.

A private interface may change with any release of torch. `tests/torch_compat` uses each of these names once and checks
the behaviour that memfit relies on, so a new release that breaks one fails a test that names it.

`core` holds what `import torch` has loaded: dispatch, fake tensors, graphs, the autograd engine, memory. `compiler`
holds Dynamo and AOTAutograd, whose import takes seconds. `distributed` needs a torch that is built with
`torch.distributed`.

Known limits: private attributes of torch's objects (`tensor._base`, `tensor._version`, `module._parameters`,
`storage._cdata`, `op._schema`) are used where the objects are.
"""
