"""Groups of our own commands: train, plan and submit."""
