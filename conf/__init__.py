"""The Hydra groups of lightning_zero. Hydra takes a folder as ``pkg://`` source only with this file in it."""
