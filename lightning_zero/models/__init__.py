"""The models of the main job.

::

    gpt             the default one
    hugging_face    causal LMs of transformers
    language_model  what they have in common
"""
