"""QLoRA: PEFT's adapters on a base model in 4 bits (bitsandbytes), whose bytes are frozen and in shards.

pip install "lightning-zero[qlora]"
python examples/qlora.py [FOLDER]
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from lora import LoRA
from peft import LoraConfig, get_peft_model
from tiny_llama import TEXT, make_folder, pieces
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from lightning_zero import ZeroStrategy


class QLoRA(LoRA):
    def configure_model(self) -> None:
        if self.model is None:
            bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
            device = self.trainer.strategy.root_device  # each rank quantises here, before the model is sharded
            base = AutoModelForCausalLM.from_pretrained(
                self.folder, quantization_config=bits, device_map={"": device}, dtype=torch.float32
            )
            adapters = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "lm_head"], r=8)
            self.model = get_peft_model(base, adapters)
            self.model.train()


def main(folder: Path, out: Path) -> None:
    seed_everything(0, verbose=False)
    data = pieces(AutoTokenizer.from_pretrained(folder).encode(TEXT[:200_000]), length=64)
    trainer = Trainer(
        strategy=ZeroStrategy("zero3", checkpoint={"exclude_frozen": True}),
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    model = QLoRA(folder, lr=1e-2)
    trainer.fit(model, DataLoader(data[64:], batch_size=8, shuffle=True), DataLoader(data[:64], batch_size=8))
    trainer.strategy.export(out)  # on all ranks; PeftModel.from_pretrained(base, out) reads it
    if trainer.is_global_zero:
        print(f"validation loss: {trainer.callback_metrics['val_loss']:.3f}")


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("outputs", "tiny_llama")
    if not given.exists():
        make_folder(given)
    main(given, Path("outputs", "qlora"))
