"""`wan-tpu doctor`: what a machine with TPUs should be looked at for before a checkpoint is fetched."""
