"""Callbacks: ZeroMonitor (``monitor``, which counts FLOPs with ``flops``), and Lightning's callbacks on shards
(``averaging``, ``stochastic_averaging``, ``finetuning``, ``pruning``)."""
