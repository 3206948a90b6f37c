"""The glue: stages of `wan_tpu` on slices of `cluster`. No maths."""
