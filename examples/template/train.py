"""A small Hydra project with its own groups; Hydra creates the objects. Nothing of lightning_zero is in the code.

python train.py                                    # Lightning's own strategy
python train.py +zero/into=trainer zero/stage=zero2  # the same training under ZeRO; docs/hydra_project.md continues
"""

import hydra
from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float:
    seed_everything(cfg.seed, workers=True, verbose=False)
    trainer = instantiate(cfg.trainer, callbacks=list(instantiate(cfg.callbacks).values()))
    model, data = instantiate(cfg.model), instantiate(cfg.data)
    trainer.fit(model, datamodule=data, ckpt_path=cfg.ckpt_path)
    loss = trainer.callback_metrics["val_loss"].item()
    if trainer.is_global_zero:
        strategy = type(trainer.strategy).__name__
        zero = getattr(trainer.strategy, "config", None)
        setting = f" {zero.stage.name.name}, offload {zero.offload.name.name}" if zero else ""
        print(f"{strategy}{setting}: validation loss {loss:.6f} after {trainer.global_step} steps")
    return loss


if __name__ == "__main__":
    main()
