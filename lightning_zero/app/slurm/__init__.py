"""SLURM jobs: ``cluster`` holds the settings of the group ``cluster``, ``script`` writes a job's script."""
