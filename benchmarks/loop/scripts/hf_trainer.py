"""`Trainer` of transformers: accumulation, evaluation, checkpoints, and training on from one of them."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from weights import told


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, number):
        ids = torch.randint(0, 500, (48,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def trainer(folder, epochs):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=500, n_positions=64))
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=epochs,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        bf16="--bf16" in sys.argv,
    )
    return Trainer(model, arguments, train_dataset=Texts(), eval_dataset=Texts())


with tempfile.TemporaryDirectory() as folder:
    trainer(folder, 1).train()
    resumed = trainer(folder, 2)
    resumed.train(resume_from_checkpoint=True)
    told(resumed.model)
