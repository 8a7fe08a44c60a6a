"""The default data of the main job."""
