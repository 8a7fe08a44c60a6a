"""Fabric's strategy, which uses the same engine as the Trainer's strategy. Code that both strategies share is in
``trainer``."""
