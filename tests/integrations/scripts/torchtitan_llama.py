"""torchtitan's Llama in shards, on a CPU: the weights after some steps with the policy of the first argument."""

import hashlib
import os
import sys

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

import torch
import torchtitan.tools.utils

torchtitan.tools.utils.device_type = "cpu"

# ruff: noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.parallelize import parallelize_llama

import memfit
from memfit.integrations.torchtitan import BudgetAC

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
config = model_registry("debugmodel").model
config.layers = config.layers[:2]
with torch.device("meta"):
    model = config.build()
for module in list(model.modules()):
    if hasattr(module, "inner_attention"):
        module.inner_attention = ScaledDotProductAttention(None)
policies = {"none": None, "full": FullAC.Config()}
model = parallelize_llama(
    model,
    parallel_dims=ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1),
    training=TrainingConfig(mixed_precision_param="float32"),
    parallelism=ParallelismConfig(),
    compile_config=CompileConfig(enable=False),
    ac_config=policies[sys.argv[1]] if sys.argv[1] in policies else BudgetAC.Config(budget=sys.argv[1]),
    dump_folder=".",
)
model.to_empty(device="cpu")
model.init_states()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids, places = torch.randint(2000, (4, 64)), torch.arange(64).expand(4, 64)
for _ in range(3):
    logits = model(ids, places)
    torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().to_local().numpy().tobytes())
plan = memfit.plan_of(model).summary() if sys.argv[1] not in policies else ""
print("weights", digest.hexdigest()[:16], sum(p.numel() for p in model.parameters()), plan)
torch.distributed.destroy_process_group()
