"""A small Wan 2.2 I2V: its data, its training, and the scoring of its videos."""
