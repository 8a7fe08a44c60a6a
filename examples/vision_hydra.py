"""The digits of vision.py in a Hydra app that composes the groups of lightning_zero.

python examples/vision_hydra.py zero/stage=zero2 zero/precision=bf16 trainer.max_epochs=3 model.channels=16
"""

import sys

import hydra
from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from omegaconf import DictConfig, OmegaConf

from lightning_zero import ZeroStrategy
from lightning_zero.settings import ConfigError


@hydra.main(version_base="1.3", config_path="conf", config_name="vision")
def main(cfg: DictConfig) -> None:
    try:
        zero = OmegaConf.to_object(cfg.zero)  # a ZeroConfig: its values are checked here
    except ConfigError as error:
        sys.exit(f"error: {error}")
    seed_everything(cfg.seed, verbose=False)
    trainer = instantiate(cfg.trainer, strategy=ZeroStrategy(config=zero))
    trainer.fit(instantiate(cfg.model), datamodule=instantiate(cfg.data))
    if trainer.is_global_zero:
        print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
