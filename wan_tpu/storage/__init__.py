"""Where checkpoints, inputs, results and snapshots lie: a folder, gs:// or s3://; a module for each."""
