"""The models of the main job.

::

    gpt             the default one            language_model  what they have in common
    hugging_face    causal LMs of transformers  muon            Muon for its matrices, AdamW for the rest
    sample          text that is written when training ends
"""
