"""LoRA: PEFT's adapters on a base model that is frozen and sharded. Checkpoints and the export hold the adapters alone.

python examples/lora.py [FOLDER]
"""

import sys
from pathlib import Path

import torch
from finetune_causal_lm import CausalLM
from lightning.pytorch import Trainer, seed_everything
from peft import LoraConfig, get_peft_model
from tiny_llama import TEXT, make_folder, pieces
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from lightning_zero import ZeroStrategy


class LoRA(CausalLM):
    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            adapters = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "lm_head"], r=8)
            self.model = get_peft_model(self.model, adapters)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def main(folder: Path, out: Path) -> None:
    seed_everything(0, verbose=False)
    data = pieces(AutoTokenizer.from_pretrained(folder).encode(TEXT[:200_000]), length=64)
    strategy = ZeroStrategy("zero3", init_from=str(folder), checkpoint={"exclude_frozen": True})
    trainer = Trainer(
        strategy=strategy,
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    model = LoRA(folder, lr=1e-2)
    trainer.fit(model, DataLoader(data[64:], batch_size=8, shuffle=True), DataLoader(data[:64], batch_size=8))
    trainer.strategy.export(out)  # on all ranks; PeftModel.from_pretrained(base, out) reads it
    if trainer.is_global_zero:
        print(f"validation loss: {trainer.callback_metrics['val_loss']:.3f}")
        size = (out / "adapter_model.safetensors").stat().st_size
        print(f"adapters: {out}, {size / 1024:.0f} KiB")


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("outputs", "tiny_llama")
    if not given.exists():
        make_folder(given)
    main(given, Path("outputs", "adapters"))
