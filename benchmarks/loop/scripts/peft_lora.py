"""LoRA of peft on a Llama with grouped queries, an attention mask of ones."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from weights import told

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=500,
)
adapters = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.1)
model = get_peft_model(LlamaForCausalLM(config), adapters)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
for _ in range(4):
    ids = torch.randint(0, 500, (4, 48))
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
told(model)
