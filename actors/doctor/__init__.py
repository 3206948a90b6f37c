"""`wan-tpu doctor`: checks of a machine with TPUs, before a checkpoint is fetched."""
