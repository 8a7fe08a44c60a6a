"""A causal language model of Hugging Face, from a folder, trained on a text of one's own, and out into a folder again.

Every rank reads its shards of the files and writes its shards of the result: no rank ever holds the whole model.

python examples/finetune_causal_lm.py [FOLDER]
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from tiny_llama import TEXT, make_folder, pieces
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_zero import ZeroStrategy


class CausalLM(LightningModule):
    def __init__(self, folder: Path, lr: float = 3e-3) -> None:
        super().__init__()
        self.folder, self.lr = folder, lr
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):  # no memory: values come from zero's init_from, shard by shard
                self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.folder))
            self.model.train()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main(folder: Path, out: Path) -> None:
    seed_everything(0, verbose=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = pieces(tokenizer.encode(TEXT[:300_000]), length=64)
    trainer = Trainer(
        strategy=ZeroStrategy("zero3", init_from=str(folder)),
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    train_loader = DataLoader(data[64:], batch_size=8, shuffle=True)
    trainer.fit(CausalLM(folder), train_loader, DataLoader(data[:64], batch_size=8))
    trainer.strategy.export(out)  # on all ranks
    if trainer.is_global_zero:
        print(f"validation loss: {trainer.callback_metrics['val_loss']:.3f}")
        model = AutoModelForCausalLM.from_pretrained(out)  # an ordinary folder
        prompt = tokenizer("The statement", return_tensors="pt")
        text = model.generate(**prompt, max_new_tokens=40, do_sample=True, top_k=20, pad_token_id=0)
        print(tokenizer.decode(text[0]))


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("outputs", "tiny_llama")
    if not given.exists():
        make_folder(given)
    main(given, Path("outputs", "finetuned"))
