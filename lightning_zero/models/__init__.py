"""The models of the main job: ``gpt`` (the default), ``hugging_face`` and their base class in ``language_model``."""
