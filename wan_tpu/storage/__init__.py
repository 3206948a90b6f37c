"""Storage of checkpoints, inputs, results and snapshots: a folder, gs:// or s3://, with a module for each."""
