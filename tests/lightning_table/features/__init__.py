"""The features of the table; each module is one of its headings."""

HEADINGS = {
    "callbacks": "Callbacks",
    "hooks": "Hooks",
    "optimization": "Optimization",
    "modules": "Modules and their steps",
    "trainer": "Trainer",
    "data": "Data",
    "checkpoints": "Checkpoints",
    "logging": "Logging",
    "precision": "Precision",
    "utilities": "Utilities, profilers, the tuner, the CLI",
    "afterwards": "The module without the Trainer",
}
