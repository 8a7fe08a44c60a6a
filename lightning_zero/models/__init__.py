"""The models of the main job: ``gpt`` (the default), ``hugging_face`` (causal LMs of transformers), and their common
base class in ``language_model``.
"""
