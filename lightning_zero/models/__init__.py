"""The default model of the main job."""
