"""Runs the stages of `wan_tpu` on the slices of `cluster`: pools, pipeline, batches, jobs, the service, commands."""
