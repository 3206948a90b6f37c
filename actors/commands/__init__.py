"""Commands that need more than `wan_tpu` alone; each is imported when it is run."""
