"""Callbacks: ZeroMonitor (``monitor``; ``flops`` counts its FLOPs), and Lightning's callbacks on sharded modules:
``averaging``, and ``parameters`` (ModelPruning, BaseFinetuning)."""
