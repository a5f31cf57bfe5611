"""Lightning: a module that holds the model, accumulation, validation."""

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from weights import told

lightning.seed_everything(0, verbose=False)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        parts = [part for _ in range(6) for part in (nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1))]
        self.net = nn.Sequential(nn.Linear(64, 256), *parts, nn.Linear(256, 10))

    def training_step(self, batch, number):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, number):
        self.log("validation", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


data, model = TensorDataset(torch.randn(1200, 64), torch.randint(0, 10, (1200,))), Classifier()
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    accumulate_grad_batches=2,
)
trainer.fit(model, DataLoader(data, 512, shuffle=True), DataLoader(data, 512))
told(model)
