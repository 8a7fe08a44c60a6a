"""What Lightning's documentation shows under DDP, each beside DDP under rows of ZeRO: the table of docs/lightning.md.

``python -m tests.lightning_table`` (``make lightning-table``) runs all of it and prints the table.

- ``table``: the registry of features, what a run finds of one, and what docs/lightning.md says
- ``bench``: a row's trainers, and what a run is compared by
- ``features/``: the features, by the headings of the table
- ``test_table``: that docs/lightning.md says what the registry claims, and that each claim is true
"""
