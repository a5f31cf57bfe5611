"""`SFTTrainer` of TRL, which checkpoints the model by itself: accumulation, padding, bf16; `--lora` adds PEFT."""

import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
from weights import told

words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(500)}, unk_token="w0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
texts = [
    torch.randint(2, 500, (40 + n % 3 * 8,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(24)
]

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=500,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
)
with tempfile.TemporaryDirectory() as folder:
    trainer = SFTTrainer(
        model,
        SFTConfig(
            folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            bf16="--bf16" in sys.argv,
            padding_free="--padding-free" in sys.argv,
            max_length=None,
        ),
        train_dataset=Dataset.from_dict({"input_ids": texts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if "--lora" in sys.argv else None,
    )
    trainer.train()
    told(trainer.model)
