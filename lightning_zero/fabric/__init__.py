"""Fabric's strategy, on the same engine as the Trainer's: ``strategy`` has the strategy, with fabric.save and
fabric.load, its precision plugin, and the module inside the wrapper of fabric.setup. Code that both strategies share is
in ``trainer``."""
