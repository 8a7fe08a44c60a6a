"""The features of the table; each module is one of its headings, in this order."""

MODULES = ("callbacks", "hooks", "optimization", "modules", "trainer", "data", "checkpoints", "logging", "precision")
MODULES += ("utilities", "afterwards")
